"""A version swapped under load: how long, what requests felt, what it cost in memory."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

from benchmarks.load import Load
from benchmarks.report import Figure, percentile
from benchmarks.service import Server, eventually
from benchmarks.tones import publish_tone

LARGE_MB = 512


def duration(scratch: Path, workers: int) -> list[Figure]:
    """SIGHUP to the first answer of the new version, and to the end of the swap; latency meanwhile."""
    models = scratch / f"swap{workers}"
    publish_tone(models)
    server = Server(models, scratch / f"run{workers}", workers=workers).wait_ready()
    with Load(server.url, 1, texts=("sleep:0.1",)) as load:
        # Watched as the swaps are below: reading the board costs this process, and so the clients, something.
        eventually(lambda: server.status() and len(load.answers) >= 100, within_s=60)
        steady = [a.ended - a.started for a in load.answers]
        swaps = []
        for _ in range(5):
            version = publish_tone(models)
            count, began = len(load.answers), time.monotonic()
            before = server.status()["requests"]
            server.signal(signal.SIGHUP)
            eventually(lambda before=before: (server.status()["last_swap"] or {}).get("covers", 0) > before)
            ended = time.monotonic() - began
            load.wait_for(2)
            first = next(a.ended for a in load.answers[count:] if a.version == version.name) - began
            during = [a.ended - a.started for a in load.answers[count:] if a.started < began + ended]
            swaps.append((first, ended, max(during)))
    bad = len(load.bad())
    server.stop()
    firsts, ends, worst = zip(*swaps, strict=True)
    ratio = max(worst) / percentile(steady, 1.0)
    return [
        Figure(f"W={workers}: SIGHUP to the first answer of the new version", f"{sorted(firsts)[2]:.2f} s"),
        Figure(f"W={workers}: SIGHUP to the end of the swap", f"{sorted(ends)[2]:.2f} s"),
        Figure(f"W={workers}: worst latency in 5 swaps / worst in steady state", f"{ratio:.2f}", "1.5"),
        Figure(f"W={workers}: failed requests of {len(load.answers)}", str(bad), "0"),
    ]


def memory(scratch: Path) -> list[Figure]:
    """Peak of what the master and its workers hold while two large versions are swapped."""
    models = scratch / "large"
    publish_tone(models, ballast_mb=LARGE_MB)
    server = Server(models, scratch / "large-run", workers=2).wait_ready()
    with Load(server.url, 1, texts=("hello",)) as load:
        load.wait_for(20)
        before = _held_mb(server)
        publish_tone(models, ballast_mb=LARGE_MB, gain=0.4)
        peak, done = [before], threading.Event()

        def sample() -> None:
            while not done.is_set():
                peak.append(_held_mb(server))

        thread = threading.Thread(target=sample)
        thread.start()
        server.signal(signal.SIGHUP)
        eventually(lambda: (server.status()["last_swap"] or {}).get("serving") == "v2", within_s=120)
        done.set()
        thread.join()
    server.stop()
    worker = max(0.0, before - LARGE_MB) / 3  # the arbiter and two workers
    return [
        Figure(f"{LARGE_MB} MB model, W=2: memory before", f"{before:.0f} MB"),
        Figure(
            "peak during the swap",
            f"{max(peak):.0f} MB",
            f"{2 * LARGE_MB + (before - LARGE_MB) + worker:.0f} MB",
        ),
    ]


def _held_mb(server: Server) -> float:
    """Return what the service holds: each process's share of what is not a weight, and each version once.

    Shares of the weights themselves would not add up: processes are read one after the other, and a fork
    in between changes the shares of those already read.
    """
    other, versions = 0.0, set()
    for pid in [server.pid, *(w["pid"] for w in server.status().get("workers", []) if "pid" in w)]:
        try:
            smaps = Path(f"/proc/{pid}/smaps").read_text()
        except OSError:
            continue
        weights = False
        for line in smaps.splitlines():
            if "-" in line.split(" ", 1)[0]:
                weights = line.endswith(".safetensors")
                if weights:
                    versions.add(line.rsplit("/", 2)[-2])
            elif line.startswith("Pss:") and not weights:
                other += int(line.split()[1]) / 1024
    return other + len(versions) * LARGE_MB
