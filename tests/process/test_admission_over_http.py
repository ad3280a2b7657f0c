"""Keys, limits and the order of queues with real workers and the official client."""

from __future__ import annotations

import hashlib
import http.client
import json
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.service import Server, eventually, warmserve
from server.listeners import _queued_unix

Launch = Callable[..., Server]


def line(name: str, limits: str = "") -> str:
    return f"{name} {hashlib.sha256(name.encode()).hexdigest()} {limits}\n"


def ask(server: Server, key: str, text: str = "hello") -> bytes:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        return client.audio.speech.create(
            model="tone", input=text, voice="sine", response_format="pcm"
        ).content


def test_keys_are_asked_for_and_exchanged_by_hup(launch: Launch, models: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line("alice") + line("bob"))
    server = launch(models, env={"WARMSERVE_API_KEYS_FILE": str(keys)}).wait_ready()
    assert ask(server, "alice") and ask(server, "bob")
    with pytest.raises(openai.AuthenticationError) as error:
        ask(server, "eve")
    assert error.value.code == "invalid_api_key"
    assert any(" key=alice " in entry for entry in server.logged("request_served"))
    assert hashlib.sha256(b"alice").hexdigest() not in server.log_text()

    keys.write_text(line("alice") + "bob is gone\n")
    server.signal(signal.SIGHUP)
    refused = eventually(lambda: server.logged("settings_refused"), what="the refusal")
    assert "line 2" in refused[0]
    assert ask(server, "bob"), "the old keys stay"

    keys.write_text(line("alice"))
    assert warmserve(server, "reload", "--wait").returncode == 0
    with pytest.raises(openai.AuthenticationError):
        ask(server, "bob")
    assert ask(server, "alice")


def test_limits_count_over_all_workers(launch: Launch, models: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line("alice", "concurrency=2") + line("bob", "rate=3/h"))
    server = launch(models, workers=3, env={"WARMSERVE_API_KEYS_FILE": str(keys)}).wait_ready()
    together = threading.Barrier(3)

    def slow(_number: int) -> int:
        together.wait()
        try:
            ask(server, "alice", "pieces:20:0.05")
        except openai.RateLimitError as error:
            assert error.code == "concurrency_limited" and error.response.headers["Retry-After"]
            return 429
        return 200

    with ThreadPoolExecutor(3) as clients:
        assert sorted(clients.map(slow, range(3))) == [200, 200, 429]
    assert ask(server, "alice")
    for _ in range(3):
        assert ask(server, "bob")
    with pytest.raises(openai.RateLimitError) as error:
        ask(server, "bob")
    assert error.value.code == "rate_limited"
    with server.admin() as admin:
        text = admin.get("/metrics").text
    assert 'warmserve_rejected_total{reason="concurrency_limited"} 1.0' in text
    assert 'warmserve_rejected_total{reason="rate_limited"} 1.0' in text


class UnixConnection(http.client.HTTPConnection):
    """A connection to a unix socket."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


def test_the_first_address_is_served_first(launch: Launch, models: Path, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    server = launch(models, workers=1, args=("-b", f"unix:{first}", "-b", f"unix:{second}")).wait_ready()
    order: list[str] = []

    def speak(address: str, text: str, note: str = "") -> None:
        connection = UnixConnection(address, timeout=60)
        body: Any = {"model": "tone", "input": text, "voice": "sine", "response_format": "pcm"}
        connection.request("POST", "/v1/audio/speech", json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().read()
        if note:
            order.append(note)

    gate = tmp_path / "gate"
    with ThreadPoolExecutor(8) as clients:
        try:
            clients.submit(speak, second, f"gate:{gate}")
            eventually(lambda: [w for w in server.workers() if w["in_flight"]], what="the busy instance")
            bulk = [clients.submit(speak, second, "hello", "bulk") for _ in range(3)]
            eventually(lambda: _waiting(second) == 3, what="a queue at the second address")
            urgent = [clients.submit(speak, first, "hello", "urgent") for _ in range(2)]
            eventually(lambda: _waiting(first) == 2, what="a queue at the first address")
        finally:
            gate.write_text("0")
        for future in (*bulk, *urgent):
            future.result(60)
    assert order == ["urgent", "urgent", "bulk", "bulk", "bulk"]


def _waiting(path: str) -> int:
    """Return how many connections to the unix socket wait to be accepted (ss's Recv-Q, from the kernel)."""
    for entry in Path("/proc/net/unix").read_text().splitlines():
        if entry.endswith(f" {path}") and entry.split()[3] == "00010000":
            return _queued_unix(int(entry.split()[6]))
    return -1
