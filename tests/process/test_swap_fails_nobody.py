"""A swap fails nobody: SIGHUP under load, directly and through nginx."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.load import Answer, Load
from benchmarks.service import Server, eventually
from benchmarks.tones import damage_weights, publish_copy, publish_tone
from server.board import Board, live_boards
from tests.process.nginx import Nginx
from weights.store import Store, Version

Launch = Callable[..., Server]


def finish_swap(server: Server, *, within_s: float = 60) -> dict[str, object]:
    """Send HUP and return the record of the swap that answers it."""
    before = server.status()["requests"]
    server.signal(signal.SIGHUP)

    def ended() -> dict[str, object] | None:
        last = server.status().get("last_swap") or {}
        return last if last.get("covers", 0) > before else None

    return eventually(ended, within_s=within_s, what="the end of a swap")


class Watch:
    """Samples the board and keeps the fewest ready workers ever seen."""

    def __init__(self, server: Server) -> None:
        self.server, self.fewest, self.most_alive = server, 99, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            workers = self.server.status().get("workers", [])
            self.fewest = min(self.fewest, sum(w.get("phase") == "ready" for w in workers))
            self.most_alive = max(self.most_alive, len(workers))
            time.sleep(0.005)


def was_current(answer: Answer, history: list[tuple[str, float, float]]) -> bool:
    """Tell whether the answer's version was served at some moment of the request: no sooner, no later.

    *history*: each good version with the moments its swap was asked for and was over.
    """
    place = [name for name, _, _ in history].index(answer.version)
    followed = history[place + 1][2] if place + 1 < len(history) else float("inf")
    return history[place][1] <= answer.ended and answer.started <= followed


def bad_version(models: Path, kind: int) -> Version:
    """Publish a bad version, of another kind each time."""
    fails = ("raise", "nan", "silence", "exit", "segv", "build")
    if kind % 2:
        return publish_tone(models, fail=fails[kind // 2 % len(fails)])
    version = publish_tone(models)
    damage_weights(version, ("checksum", "truncated", "missing", "manifest")[kind // 2 % 4])
    return version


def test_twenty_swaps_under_load_fail_nobody(launch: Launch, models: Path, tmp_path: Path) -> None:
    """Every third one to a bad version; direct clients and nginx clients, with connections upstream kept or
    not; short, long, large and streamed answers.
    """
    server = launch(models, workers=2).wait_ready()
    good = "v1"
    history = [("v1", 0.0, 0.0)]
    with (
        Nginx(tmp_path / "nginx", server) as nginx,
        Nginx(tmp_path / "keeping", server, keepalive=True) as keeping,
        Load(server.url, 2) as direct,
        Load(nginx.url, 1) as proxied,
        Load(keeping.url, 1) as kept,
    ):
        with Watch(server) as watch:
            for number in range(20):
                if number % 3 == 2:
                    bad = bad_version(models, number // 3)
                    last = finish_swap(server)
                    assert last["result"] in ("refused", "rolled_back"), last
                    assert last["serving"] == good
                    assert last["to"] in (bad.name, None)
                else:
                    version = publish_tone(models, gain=0.3 + 0.02 * number)
                    began = time.monotonic()
                    last = finish_swap(server)
                    assert last["result"] == "done", last
                    assert last["serving"] == version.name
                    good = version.name
                    history.append((good, began, time.monotonic()))
    for load in (direct, proxied, kept):
        assert not load.bad(), load.bad()[:3]
        assert not [answer for answer in load.answers if not was_current(answer, history)]
        assert len(load.answers) > 20
    assert watch.fewest >= 2
    assert watch.most_alive <= 3
    served = direct.versions() + proxied.versions() + kept.versions()
    assert len(served) > 3
    assert all(int(name[1:]) in {v.number for v in Store(models).versions()} for name in served)
    refused = {line.partition("version=")[2].split()[0] for line in server.logged("version_refused")}
    assert not refused & set(served), "a bad version answered a request"


def test_a_request_is_served_by_a_version_that_was_current_when_it_started(
    launch: Launch, models: Path
) -> None:
    server = launch(models, workers=2).wait_ready()
    publish_tone(models)
    with Load(server.url, 3) as load:
        load.wait_for(10)
        began = time.monotonic()
        finish_swap(server)
        ended = time.monotonic()
        load.wait_for(10)
    assert not load.bad()
    assert {a.version for a in load.answers if a.ended < began} == {"v1"}
    assert {a.version for a in load.answers if a.started > ended} == {"v2"}


def test_a_slow_new_generation_delays_no_request(launch: Launch, models: Path) -> None:
    """Stock gunicorn terminates the old workers before the new ones have booted."""
    server = launch(models, workers=2).wait_ready()
    publish_tone(models, warmup_delay_s=2.0)
    with Load(server.url, 2, texts=("hello",)) as load:
        load.wait_for(5)
        server.signal(signal.SIGHUP)
        eventually(lambda: server.workers("warming"))
        load.wait_for(20)
        assert server.workers("warming"), "answers came only once the new worker was ready"
        assert len(server.workers()) == 2
    assert not load.bad()


def test_hups_during_a_swap_become_one_more_swap_after_it(launch: Launch, models: Path) -> None:
    server = launch(models, workers=2).wait_ready()
    publish_tone(models, warmup_delay_s=0.5)
    server.signal(signal.SIGHUP)
    eventually(lambda: server.workers("warming"))
    for _ in range(5):
        before = server.status()["requests"]
        server.signal(signal.SIGHUP)
        eventually(lambda before=before: server.status()["requests"] > before)
    eventually(lambda: (server.status()["last_swap"] or {}).get("covers") == 6)
    eventually(lambda: not server.status()["swapping"])
    assert server.status()["generation"] == 3


def test_hup_with_nothing_new_recycles_every_worker(launch: Launch, models: Path) -> None:
    server = launch(models, workers=2).wait_ready()
    before = {w["pid"] for w in server.workers()}
    with Load(server.url, 2) as load:
        assert finish_swap(server)["result"] == "done"
    assert not load.bad()
    assert not before & {w["pid"] for w in server.workers()}
    assert server.status()["current"] == "v1"


def test_the_old_mapping_and_lease_go_with_the_last_old_worker(launch: Launch, models: Path) -> None:
    server = launch(models, workers=2).wait_ready()
    publish_tone(models)
    assert finish_swap(server)["result"] == "done"
    eventually(lambda: server.logged("generation_released"))
    Store(models).delete(1)
    maps = [
        Path(f"/proc/{pid}/maps").read_text() for pid in [server.pid, *(w["pid"] for w in server.workers())]
    ]
    assert not any("/v1/" in text for text in maps)


def test_a_copied_and_renamed_directory_is_a_valid_version(launch: Launch, models: Path) -> None:
    server = launch(models).wait_ready()
    publish_copy(models, Store(models).versions()[0])
    assert finish_swap(server)["serving"] == "v2"


def test_scaling_by_ttin_and_ttou(launch: Launch, models: Path) -> None:
    server = launch(models, workers=2).wait_ready()
    with Load(server.url, 2) as load:
        server.signal(signal.SIGTTIN)
        eventually(lambda: len(server.workers()) == 3)
        server.signal(signal.SIGTTOU)
        eventually(lambda: server.status()["size"] == 2 and len(server.status()["workers"]) == 2)
    assert not load.bad()


@pytest.mark.parametrize("allowed", [False, True])
def test_without_surge_a_single_worker_is_swapped_only_when_a_gap_is_allowed(
    launch: Launch, models: Path, allowed: bool
) -> None:
    env = {"WARMSERVE_SURGE": "0", "WARMSERVE_ALLOW_GAP": str(int(allowed))}
    server = launch(models, workers=1, env=env).wait_ready()
    publish_tone(models)
    last = finish_swap(server)
    if allowed:
        assert last["serving"] == "v2"
    else:
        assert (last["result"], last["reason"], last["serving"]) == ("refused", "gap_not_allowed", "v1")


def test_without_surge_no_more_workers_than_configured_are_ever_in_memory(
    launch: Launch, models: Path
) -> None:
    server = launch(models, workers=2, env={"WARMSERVE_SURGE": "0"}).wait_ready()
    publish_tone(models)
    with Load(server.url, 2) as load, Watch(server) as watch:
        assert finish_swap(server)["serving"] == "v2"
    assert not load.bad()
    assert watch.most_alive <= 2
    assert watch.fewest >= 1


def test_a_draining_worker_finishes_what_it_began(launch: Launch, models: Path) -> None:
    server = launch(models, workers=1).wait_ready()
    publish_tone(models)
    with ThreadPoolExecutor(1) as threads:
        body = {"model": "tone", "input": "sleep:3", "voice": "sine", "response_format": "wav"}
        running = threads.submit(httpx.post, f"{server.url}/v1/audio/speech", json=body, timeout=30)
        eventually(lambda: server.workers()[0]["in_flight"] == 1)
        server.signal(signal.SIGHUP)
        eventually(lambda: server.workers("draining"))
        answer = running.result()
    assert answer.status_code == 200
    assert answer.headers["x-model-version"] == "v1"
    eventually(lambda: (server.status()["last_swap"] or {}).get("serving") == "v2")


def test_a_worker_that_does_not_drain_in_time_is_killed(launch: Launch, models: Path) -> None:
    server = launch(models, workers=1, env={"WARMSERVE_DRAIN_TIMEOUT_S": "1"}).wait_ready()
    publish_tone(models)
    with ThreadPoolExecutor(1) as threads:
        body = {"model": "tone", "input": "sleep:25", "voice": "sine"}
        running = threads.submit(httpx.post, f"{server.url}/v1/audio/speech", json=body, timeout=30)
        eventually(lambda: server.workers()[0]["in_flight"] == 1)
        assert finish_swap(server, within_s=15)["serving"] == "v2"
        with pytest.raises(httpx.HTTPError):
            running.result()


def test_usr2_upgrades_the_master_and_fails_nobody(launch: Launch, models: Path) -> None:
    """A new master beside the old one, then TERM to the old one."""
    server = launch(models, workers=2).wait_ready()
    with Load(server.url, 2) as load:
        server.signal(signal.SIGUSR2)
        upgraded = eventually(lambda: _other_master(server))
        eventually(lambda: _ready_workers(server, upgraded) == 2, within_s=60)
        server.signal(signal.SIGTERM)
        assert server.process.wait(40) == 0
        load.wait_for(10)
    assert not load.bad(), load.bad()[:3]
    os.kill(upgraded, signal.SIGTERM)
    eventually(lambda: not Path(f"/proc/{upgraded}").exists())


def _other_master(server: Server) -> int | None:
    pids = [int(path.name.partition(".")[2]) for path in live_boards(server.run_dir)]
    return next((pid for pid in pids if pid != server.pid), None)


def _ready_workers(server: Server, pid: int) -> int:
    board = Board.open(server.run_dir / f"board.{pid}")
    return sum(slot.get("phase") == "ready" for slot in board.workers().values())
