"""Keep-alive: idle instances are rehearsed, no request waits for it, and a bad one costs its worker only."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.service import Server, eventually
from benchmarks.tones import publish_tone

Launch = Callable[..., Server]
OFTEN = {"WARMSERVE_KEEPALIVE_S": "0.2"}


def speak(client: httpx.Client, text: str = "hello") -> httpx.Response:
    body = {"model": "tone", "input": text, "voice": "sine", "response_format": "pcm"}
    return client.post("/v1/audio/speech", json=body)


def kept(server: Server) -> list[str]:
    return [line for line in server.logged("warmed") if "tier=keepalive" in line]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def faulty(tmp_path: Path, gate: Path) -> Path:
    models = tmp_path / "models"
    publish_tone(models, family="faulty", gate=str(gate))
    return models


def test_idle_instances_are_rehearsed_and_it_is_said(launch: Launch, models: Path) -> None:
    server = launch(models, env=OFTEN | {"WARMSERVE_POOL_SIZE": "2"}).wait_ready()
    pids = {w["pid"] for w in server.workers()}
    eventually(lambda: pids <= {int(_field(line, "pid")) for line in kept(server)}, what="both rehearsed")
    assert all(w["keepalive_ms"] > 0 for w in server.workers())
    with server.admin() as admin:
        counts = [
            float(line.split()[-1])
            for line in admin.get("/metrics").text.splitlines()
            if line.startswith("warmserve_warmup_duration_seconds_count") and 'tier="keepalive"' in line
        ]
    assert counts[0] >= 2


def test_zero_turns_it_off_and_the_default_is_long(launch: Launch, models: Path) -> None:
    server = launch(models, env={"WARMSERVE_KEEPALIVE_S": "0"}).wait_ready()
    with server.client() as client:
        for _ in range(5):
            assert speak(client, "sleep:0.2").status_code == 200
    assert kept(server) == []


def test_no_request_waits_for_a_keepalive(launch: Launch, faulty: Path, gate: Path) -> None:
    """One worker is held in its keep-alive: all requests are answered by the other, which then has none."""
    server = launch(faulty, env=OFTEN).wait_ready()
    gate.write_text("hold")
    eventually(lambda: [w for w in server.workers() if w["in_flight"]], what="a keep-alive that runs")
    (held,) = [w["pid"] for w in server.workers() if w["in_flight"]]
    with server.client() as client:
        for _ in range(30):
            assert speak(client).status_code == 200
    eventually(lambda: sorted(w["served"] for w in server.workers()) == [0, 30])
    assert [w["pid"] for w in server.workers() if w["served"] == 0] == [held]
    gate.unlink()
    eventually(lambda: kept(server))


def test_keepalives_under_load_delay_nobody(launch: Launch, models: Path) -> None:
    """Many of them between many requests: requests that waited for an instance, counted one by one."""
    server = launch(models, env={"WARMSERVE_KEEPALIVE_S": "0.02"}).wait_ready()
    pace = threading.Event()
    asked = 0
    with server.client() as client:
        while len(kept(server)) < 12 or asked < 100:
            assert speak(client).status_code == 200
            asked += 1
            pace.wait(0.05)  # idle moments: without them no instance is ever due
    waited = [float(_field(line, "queue_ms")) for line in server.logged("request_served")]
    # One that met a keep-alive would have waited for it in the pool, at its back in the order of tickets.
    assert len([ms for ms in waited if ms > 20]) <= len(waited) // 50


def test_a_failing_keepalive_replaces_its_worker(launch: Launch, faulty: Path, gate: Path) -> None:
    server = launch(faulty, env=OFTEN).wait_ready()
    before = {w["pid"] for w in server.workers()}
    gate.write_text("raise!")
    with server.client() as client:
        eventually(lambda: server.status()["restarts"].get("keepalive_failed", 0) >= 1)
        assert speak(client).status_code == 200
        gate.unlink()
        eventually(lambda: server.status()["status"] == "READY" and len(server.workers()) == 2)
        assert speak(client).status_code == 200
    assert before != {w["pid"] for w in server.workers()}
    assert any("reason=keepalive_failed" in line for line in server.logged("worker_worn"))


def test_a_keepalive_that_computes_nonsense_replaces_its_worker(launch: Launch, tmp_path: Path) -> None:
    """The second call after warm-up gives NaN, as after a bit has flipped: the next keep-alive finds out."""
    models = tmp_path / "models"
    publish_tone(models, family="faulty", nan_from=4)
    server = launch(models, workers=1, env=OFTEN).wait_ready()
    eventually(lambda: server.status()["restarts"].get("keepalive_failed", 0) >= 1)
    assert any("NaN" in line for line in server.logged("worker_worn"))


def test_a_keepalive_that_hangs_is_a_stuck_instance(launch: Launch, faulty: Path, gate: Path) -> None:
    server = launch(faulty, env=OFTEN | {"WARMSERVE_REQUEST_TIMEOUT_S": "1"}).wait_ready()
    gate.write_text("hold")
    with server.client() as client:
        eventually(lambda: server.status()["restarts"].get("instance_stuck", 0) >= 1)
        assert speak(client).status_code == 200
    gate.unlink()
    eventually(lambda: server.status()["status"] == "READY")


def test_the_turn_is_free_again_when_its_worker_is_killed(launch: Launch, faulty: Path, gate: Path) -> None:
    server = launch(faulty, env=OFTEN).wait_ready()
    gate.write_text("hold")
    eventually(lambda: [w for w in server.workers() if w["in_flight"]])
    (held,) = [w["pid"] for w in server.workers() if w["in_flight"]]
    gate.unlink()
    os.kill(held, 9)
    server.wait_ready()
    seen = len(kept(server))
    eventually(lambda: len(kept(server)) >= seen + 2)


def _field(line: str, name: str) -> Any:
    return dict(pair.split("=", 1) for pair in line.split() if "=" in pair)[name]
