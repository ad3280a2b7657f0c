"""Streamed speech over real connections: official clients, slow and vanishing readers, swaps."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.service import Server, eventually
from benchmarks.tones import publish_tone
from tests.process.nginx import Nginx

Launch = Callable[..., Server]
PIECE_BYTES = 2 * 2400  # a tenth of a second of 24 kHz PCM
BIG = "pieces:1500:0.001"  # 7.2 MB of PCM: more than the sockets between hold, and never there at once


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One worker with one instance: whatever holds it is seen by the next request."""
    root = tmp_path_factory.mktemp("streaming")
    publish_tone(root / "models")
    found = Server(root / "models", root / "run", workers=1)
    yield found
    found.stop()


@pytest.fixture
def server(shared: Server, request: pytest.FixtureRequest) -> Server:
    """The shared server, whose log is printed if this test fails."""
    request.node.started_servers = [shared]
    return shared.wait_ready()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that holds back all pieces but the first; it opens with the test's end at the latest."""
    path = tmp_path / "gate"
    yield path
    if not path.exists():
        path.write_text("0")


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tone", "input": text, "voice": "sine", "response_format": "pcm", **fields}


def speak(server: Server, text: str = "hello", **fields: Any) -> httpx.Response:
    with server.client() as client:
        return client.post("/v1/audio/speech", json=body(text, **fields))


def connect(server: Server, text: str, *, name: str, version: str = "1.1") -> socket.socket:
    """Send a request with the id *name* on a connection with a small receive buffer."""
    content = json.dumps(body(text)).encode()
    head = [f"POST /v1/audio/speech HTTP/{version}", "Host: t", f"Content-Length: {len(content)}",
            f"X-Request-ID: {name}", "", ""]  # fmt: skip
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.settimeout(30)
    found.connect(("127.0.0.1", server.port))
    found.sendall("\r\n".join(head).encode() + content)
    return found


def served(server: Server, name: str) -> list[dict[str, str]]:
    """Return the events of the request with the id *name*."""
    lines = [line for line in server.logged("request_served") if f"request_id={name} " in line]
    return [dict(pair.split("=", 1) for pair in line.split() if "=" in pair) for line in lines]


def test_official_clients_get_bytes_before_the_rest_is_computed(server: Server, gate: Path) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        speech = client.audio.speech
        with speech.with_streaming_response.create(**body(f"gate:{gate}")) as answer:
            pieces = answer.iter_bytes()
            first = next(pieces)
            assert not gate.exists(), "the first bytes waited for the second piece"
            gate.write_text("2")
            assert len(first + b"".join(pieces)) == 3 * PIECE_BYTES
        assert len(speech.create(**body("pieces:3:0.1")).content) == 3 * PIECE_BYTES
        assert speech.create(**body("hello", response_format="wav")).content[40:44] != b"\xff" * 4
        events = speech.create(**body("pieces:2:0.1", stream_format="sse")).text.strip().split("\n\n")
        *deltas, done = [json.loads(event.removeprefix("data: ")) for event in events]
        assert sum(len(base64.b64decode(delta["audio"])) for delta in deltas) == 2 * PIECE_BYTES
        assert done["type"] == "speech.audio.done"
        with pytest.raises(openai.BadRequestError):
            speech.create(**body("hello", speed=9.0))
    assert asyncio.run(_asynchronous(server)) == 3 * PIECE_BYTES


async def _asynchronous(server: Server) -> int:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        speech = client.audio.speech
        async with speech.with_streaming_response.create(**body("pieces:3:0.1")) as answer:
            return sum([len(piece) async for piece in answer.iter_bytes()])


def test_nginx_hands_on_the_first_bytes_at_once(server: Server, gate: Path, tmp_path: Path) -> None:
    with Nginx(tmp_path / "nginx", server) as nginx, httpx.Client(base_url=nginx.url, timeout=30) as client:
        with client.stream("POST", "/v1/audio/speech", json=body(f"gate:{gate}")) as answer:
            pieces = answer.iter_raw()
            first = next(pieces)
            gate.write_text("1")
            assert len(first + b"".join(pieces)) == 2 * PIECE_BYTES


def test_a_client_that_leaves_is_noticed_and_frees_the_instance(server: Server, gate: Path) -> None:
    """Noticed while there is nothing to send; the place comes back with the instance, not before."""
    with connect(server, f"gate:{gate}", name="left") as client:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    (event,) = eventually(lambda: served(server, "left"))
    assert event["cancelled"] == "True"
    assert server.workers()[0]["in_flight"] == 1
    gate.write_text("9")
    assert len(speak(server).content) == PIECE_BYTES
    eventually(lambda: server.workers()[0]["in_flight"] == 0)
    assert len(served(server, "left")) == 1


def test_a_client_that_leaves_a_long_stream_stops_it(server: Server) -> None:
    with connect(server, "pieces:600:0.05", name="left-long") as client:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert speak(server).status_code == 200
    (event,) = served(server, "left-long")
    assert event["cancelled"] == "True"
    assert float(event["audio_s"]) < 30, "all the pieces that nobody reads were computed"
    assert {"queue_ms", "inference_ms", "first_byte_ms", "total_ms", "bytes"} <= event.keys()


def test_a_slow_reader_of_a_stream_holds_no_instance(server: Server) -> None:
    with connect(server, BIG, name="slow") as reader:
        assert reader.recv(100).startswith(b"HTTP/1.1 200")
        assert speak(server).status_code == 200
        assert not served(server, "slow"), "the slow reader had all of it already"
    (event,) = eventually(lambda: served(server, "slow"))
    assert event["cancelled"] == "True"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_late_error_is_seen_as_a_broken_response(server: Server, gate: Path, version: str) -> None:
    """Without its last chunk; before HTTP/1.1, where an end means all is well, with a reset."""
    with connect(server, f"gate:{gate}", name=f"late-{version}", version=version) as client:
        received = client.recv(100)
        gate.write_text("raise!")
        try:
            while more := client.recv(65536):
                received += more
            assert version == "1.1", "a plain end"
        except ConnectionResetError:
            assert version == "1.0"
    assert b"\r\n0\r\n" not in received
    assert b"error" not in received
    assert any(f"request_id=late-{version} " in line for line in server.logged("response_aborted"))
    assert speak(server).status_code == 200


def test_a_swap_lets_a_streaming_response_finish_from_the_old_version(
    launch: Launch, models: Path, gate: Path
) -> None:
    server = launch(models, workers=1).wait_ready()
    with server.client() as client:
        with client.stream("POST", "/v1/audio/speech", json=body(f"gate:{gate}")) as answer:
            pieces = answer.iter_raw()
            received = next(pieces)
            publish_tone(models)
            server.signal(signal.SIGHUP)
            eventually(lambda: server.workers("draining"))
            assert speak(server).headers["x-model-version"] == "v2"
            gate.write_text("3")
            received += b"".join(pieces)
    assert answer.headers["x-model-version"] == "v1"
    assert len(received) == 4 * PIECE_BYTES
    eventually(lambda: (server.status()["last_swap"] or {}).get("serving") == "v2")
