"""A thousand random kills, stops and continues of workers under load: only who was inside one may fail."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.load import Load
from benchmarks.service import Server, eventually

SIGNALS = 1000
KILL_SHARE = 0.15  # of the steps; each costs a fork and a warm-up, and the test has to end
SEED = 20240229
WORKERS = 3
CLIENTS = 4  # a stopped worker can hold one that computes and one or two that are being sent
MOST_SECONDS = 120.0


def test_a_thousand_random_signals_fail_nobody_outside_a_killed_worker(
    launch: Callable[..., Server], models: Path
) -> None:
    server = launch(models, workers=WORKERS, env={"WARMSERVE_CRASH_LIMIT": "1000"}).wait_ready()
    chance = random.Random(SEED)
    kills: list[float] = []
    sent, until = 0, time.monotonic() + MOST_SECONDS
    with Load(server.url, clients=CLIENTS, texts=("hello", "sleep:0.02", "pieces:2:0.01")) as load:
        while sent < SIGNALS and time.monotonic() < until:
            victim = chance.choice(server.workers())["pid"]
            if chance.random() < KILL_SHARE:
                kills.append(time.monotonic())
                os.kill(victim, signal.SIGKILL)
                sent += 1
                eventually(lambda gone=victim: _whole_again(server, gone), what="READY after a kill")
            else:
                os.kill(victim, signal.SIGSTOP)
                load.wait_for(1)  # somebody else answers
                os.kill(victim, signal.SIGCONT)
                sent += 2
        load.wait_for(10)
    assert sent >= SIGNALS, f"only {sent} signals in {MOST_SECONDS:g} s"
    assert len(kills) > 10
    eventually(lambda: server.status()["status"] == "READY")
    unexplained = [a for a in load.bad() if not any(a.started <= kill <= a.ended for kill in kills)]
    assert unexplained == []
    assert len(load.bad()) <= 2 * len(kills)  # one that computes, and one that is being sent
    assert server.status()["restarts"] == {"SIGKILL": len(kills)}
    assert len(server.workers()) == WORKERS


def _whole_again(server: Server, gone: int) -> bool:
    workers = [w["pid"] for w in server.workers()]
    return gone not in workers and len(workers) == WORKERS and server.status()["ready"]
