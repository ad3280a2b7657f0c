"""Files in use are never touched: deleting beside swaps and kills, at any moment."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.load import Load
from benchmarks.service import Server, eventually, warmserve
from benchmarks.tones import publish_tone
from tests.process.test_swap_fails_nobody import finish_swap
from weights.lease import leased_by
from weights.store import Store
from weights.verify import verify_layout

Launch = Callable[..., Server]


def test_gc_in_a_loop_during_swaps_touches_nothing_in_use(launch: Launch, models: Path) -> None:
    server = launch(models, workers=2).wait_ready()
    stop = threading.Event()
    results: list[tuple[int, str]] = []

    def collect() -> None:
        while not stop.is_set():
            done = warmserve(server, "gc", "--keep", "0")
            results.append((done.returncode, done.stderr))

    thread = threading.Thread(target=collect)
    thread.start()
    with Load(server.url, 2) as load:
        for _ in range(6):
            version = publish_tone(models)
            assert finish_swap(server)["serving"] == version.name
    eventually(lambda: len(results) >= 2)
    stop.set()
    thread.join()
    assert not load.bad(), load.bad()[:3]
    assert all(code == 0 for code, _ in results), results
    left = {version.name for version in Store(models).versions()}
    assert left >= {"v6", "v7"}, "current and previous stay"
    warmserve(server, "gc", "--keep", "0")
    assert {version.name for version in Store(models).versions()} == {"v6", "v7"}


def test_gc_keeps_what_another_master_serves(launch: Launch, models: Path) -> None:
    """Two masters on one directory: neither's gc deletes what the other maps."""
    first = launch(models, workers=1).wait_ready()
    for _ in range(3):
        publish_tone(models)
    second = launch(models, workers=1).wait_ready()
    assert second.status()["current"] == "v4"
    done = warmserve(second, "gc", "--keep", "1")
    assert done.returncode == 0
    assert "kept v1" in done.stderr
    assert first.workers()
    assert {v.name for v in Store(models).versions()} >= {"v1", "v4"}
    assert "deleted v2" in done.stdout


def test_gc_dry_run_deletes_nothing_and_leftovers_are_swept(launch: Launch, models: Path) -> None:
    server = launch(models, workers=1).wait_ready()
    for _ in range(3):
        publish_tone(models)
    (models / ".publish-interrupted").mkdir()
    dry = warmserve(server, "gc", "--keep", "1", "--dry-run")
    assert "would delete v2" in dry.stdout
    assert len(Store(models).versions()) == 4
    assert warmserve(server, "gc", "--keep", "1").returncode == 0
    assert not list(models.glob(".publish-*"))


def test_kills_at_random_moments_leave_no_lease_no_orphan_and_no_half_version(
    launch: Launch, models: Path
) -> None:
    """kill -9 of masters and workers, mid-boot, mid-swap and mid-publish."""
    choose = random.Random(7)
    for _ in range(6):
        server = launch(models, workers=2, env={"WARMSERVE_DRAIN_TIMEOUT_S": "2"})
        if choose.random() < 0.7:
            server.wait_ready()
            publish_tone(models)
            server.signal(signal.SIGHUP)
            eventually(lambda server=server: server.status().get("requests") == 1)
        else:
            eventually(server.status)
        pids = [w["pid"] for w in server.status().get("workers", []) if "pid" in w]
        if pids and choose.random() < 0.5:
            os.kill(choose.choice(pids), signal.SIGKILL)
        os.kill(server.pid, signal.SIGKILL)
        server.process.wait(10)
        eventually(lambda: not any(leased_by(v.path) for v in Store(models).versions()), within_s=20)
        eventually(lambda pids=pids: not any(Path(f"/proc/{pid}").exists() for pid in pids), within_s=20)
        for version in Store(models).versions():
            verify_layout(version.path)
    assert not Store(models).leftovers()
