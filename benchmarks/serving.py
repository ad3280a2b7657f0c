"""One version served: start, replacement, one copy, fairness between workers, cost of a request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import Figure, median, percentile
from benchmarks.service import Server, eventually
from weights.residency import residency

SENTENCE = {
    "model": "hibari",
    "voice": "heart",
    "input": "Hello, how are you today?",
    "response_format": "wav",
}
PAIRS, BUSY_MS = 200, 200


def start(models: Path, scratch: Path) -> list[Figure]:
    """Launch to first audio, against importing torch in the same minute."""
    imports, launches = [], []
    for turn in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imports.append(time.monotonic() - began)
        began = time.monotonic()
        server = Server(models, scratch / f"start{turn}")
        with server.client() as client:
            eventually(lambda client=client: _answers(client), within_s=60)
        launches.append(time.monotonic() - began)
        server.stop()
    beyond = median([launch - alone for launch, alone in zip(launches, imports, strict=True)])
    return [
        Figure("launch to first audio, hibari", f"{median(launches):.2f} s"),
        Figure("`import torch` alone, same run", f"{median(imports):.2f} s"),
        Figure("launch beyond `import torch`", f"{beyond:.2f} s", "1.5 s"),
    ]


def _answers(client: httpx.Client) -> bool:
    try:
        return client.post("/v1/audio/speech", json=SENTENCE).status_code == 200
    except httpx.ConnectError:
        return False


def replacement(models: Path, scratch: Path) -> list[Figure]:
    """A worker killed with -9: the new one's fork to ready."""
    server = Server(models, scratch / "replacement").wait_ready()
    spans = []
    for _ in range(7):
        victim = server.workers()[0]["pid"]
        before = {w["pid"] for w in server.workers()}
        os.kill(victim, signal.SIGKILL)
        fresh = eventually(lambda before=before: [w for w in server.workers() if w["pid"] not in before])[0]
        spans.append(fresh["age_s"] - fresh["ready_age_s"])
        server.wait_ready()
        time.sleep(1)  # let the other figures of the next round start from rest
    server.stop()
    return [Figure("replacement worker, fork to ready, hibari", f"{median(spans):.3f} s", "0.3 s")]


def one_copy(models: Path, scratch: Path) -> list[Figure]:
    """Four workers after 200 requests: what the weights cost, and what a worker costs."""
    server = Server(models, scratch / "copy", workers=4).wait_ready()
    with ThreadPoolExecutor(4) as threads, server.client() as client:
        list(threads.map(lambda _: client.post("/v1/audio/speech", json=SENTENCE), range(200)))
    files = list((models / "v1").glob("*.safetensors"))
    pids = [server.pid, *(w["pid"] for w in server.workers())]
    usages = [usage for pid in pids for usage in residency(files, pid).values()]
    size = sum(file.stat().st_size for file in files)
    private = [_private_mb(pid) for pid in pids[1:]]
    server.stop()
    return [
        Figure(
            "weights, 4 workers, summed Pss / file size",
            f"{sum(u.pss_bytes for u in usages) / size:.3f}",
            "1.05",
        ),
        Figure("weights, anonymous bytes", f"{sum(u.anonymous_bytes for u in usages)}", "0"),
        Figure("private memory of a worker, largest of 4", f"{max(private):.0f} MB", "60 MB"),
    ]


def _private_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kilobytes = sum(
        int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Private_Clean"))
    )
    return kilobytes / 1024


def fairness(models: Path, scratch: Path) -> list[Figure]:
    """Pairs of simultaneous requests, two workers of one instance each, clients that keep connections."""
    server = Server(models, scratch / "pairs", workers=2).wait_ready()
    body = {"model": "tone", "voice": "sine", "input": f"sleep:{BUSY_MS / 1000}", "response_format": "wav"}
    with server.client() as one, server.client() as two, ThreadPoolExecutor(2) as threads:
        single = median([_timed(one, body) for _ in range(10)])
        slower = [max(threads.map(_timed, (one, two), (body, body))) for _ in range(PAIRS)]
    server.stop()
    ratio = max(slower) / single
    return [Figure(f"{PAIRS} pairs of {BUSY_MS} ms requests, slowest / single", f"{ratio:.2f}", "1.3")]


def _timed(client: httpx.Client, body: dict[str, Any]) -> float:
    began = time.monotonic()
    assert client.post("/v1/audio/speech", json=body).status_code == 200
    return time.monotonic() - began


def overhead(models: Path, scratch: Path) -> list[Figure]:
    """What the server adds to the family's own time, in the server and as a client sees it."""
    server = Server(models, scratch / "overhead", workers=1).wait_ready()
    body = {"model": "tone", "voice": "sine", "input": "hello", "response_format": "pcm"}
    with server.client() as client:
        seen = [_timed(client, body) * 1000 for _ in range(400)][100:]
    rows = [
        dict(p.split("=", 1) for p in line.split() if "=" in p) for line in server.logged("request_served")
    ]
    own = [float(row["total_ms"]) - float(row["inference_ms"]) for row in rows[100:]]
    family = median([float(row["inference_ms"]) for row in rows[100:]])
    server.stop()
    return [
        Figure("server cost of a request beyond the family, median", f"{median(own):.2f} ms", "3 ms"),
        Figure("the same with connect, as the client sees it, median", f"{median(seen) - family:.2f} ms"),
        Figure("the same, 99th percentile", f"{percentile(seen, 0.99) - family:.2f} ms"),
    ]
