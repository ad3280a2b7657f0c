"""What warm-up buys, what staying warm and being watched cost, and whether memory stays where it was."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, median
from benchmarks.service import Server, eventually
from server.memory import own_memory

STARTS = 5  # servers, or processes, whose first request is compared with their tenth
DRIFT_REQUESTS = 5000
IDLE_S = 600  # of one keep-alive, the default


def first_request(name: str, models: Path, scratch: Path, body: Mapping[str, Any]) -> list[Figure]:
    """First request against the tenth: of a server, whose workers are warm, and of a process that is not."""
    warm = []
    for turn in range(STARTS):
        server = Server(models, scratch / f"warm-{name}-{turn}", workers=1).wait_ready()
        with server.client() as client:
            warm.append([_timed(client, body) for _ in range(12)])
        server.stop()
    command = [sys.executable, "-m", "benchmarks.unwarmed", str(models)]
    cold = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(STARTS)
    ]
    return [_first_to_tenth(f"{name}, warmed", warm), _first_to_tenth(f"{name}, not warmed", cold)]


def _first_to_tenth(what: str, runs: list[list[float]]) -> Figure:
    firsts, tenths = median([run[0] for run in runs]), median([run[9] for run in runs])
    value = f"{firsts:.1f} ms / {tenths:.1f} ms = {firsts / tenths:.2f}"
    return Figure(f"first request / tenth, {what}", value)


def _timed(client: Any, body: Mapping[str, Any]) -> float:
    began = time.monotonic()
    client.post("/v1/audio/speech", json=body).raise_for_status()
    return (time.monotonic() - began) * 1000


def keepalive(models: Path, scratch: Path) -> list[Figure]:
    """What one keep-alive takes, and so which share of a core an idle worker spends on them."""
    server = Server(models, scratch / "keepalive", env={"WARMSERVE_KEEPALIVE_S": "0.2"}).wait_ready()
    eventually(lambda: len(_kept(server)) >= 20, within_s=120)
    took = median([float(line.split(" ms=")[1].split()[0]) for line in _kept(server)])
    server.stop()
    return [
        Figure("one keep-alive, hibari", f"{took:.0f} ms"),
        Figure(f"share of a core for an idle worker, every {IDLE_S} s", f"{took / 10 / IDLE_S:.4f} %"),
    ]


def _kept(server: Server) -> list[str]:
    return [line for line in server.logged("warmed") if "tier=keepalive" in line]


def scrape(models: Path, scratch: Path, workers: int) -> Figure:
    """The time of a scrape of /metrics, from a client's side, connection included."""
    server = Server(models, scratch / f"scrape{workers}", workers=workers).wait_ready()
    spans = []
    with server.admin() as admin:
        for _ in range(50):
            began = time.monotonic()
            size = len(admin.get("/metrics").raise_for_status().content)
            spans.append((time.monotonic() - began) * 1000)
    server.stop()
    return Figure(
        f"scrape of /metrics, {workers} workers, {size / 1000:.0f} kB, median", f"{median(spans):.1f} ms"
    )


def drift(models: Path, scratch: Path, body: Mapping[str, Any]) -> Figure:
    """Memory of a worker's own after DRIFT_REQUESTS requests, against after the first hundred."""
    server = Server(models, scratch / "drift", workers=1, env={"WARMSERVE_KEEPALIVE_S": "0"}).wait_ready()
    (worker,) = server.workers()
    rollup = Path(f"/proc/{worker['pid']}/smaps_rollup")
    with server.client() as client:
        for _ in range(100):
            _timed(client, body)
        before = own_memory(rollup)["unique_bytes"]
        for _ in range(DRIFT_REQUESTS):
            _timed(client, body)
        after = own_memory(rollup)["unique_bytes"]
    server.stop()
    value = f"{before / 1e6:.1f} MB, then {(after - before) / 1e6:+.1f} MB"
    return Figure(f"a worker's own memory over {DRIFT_REQUESTS} requests, hibari", value)
