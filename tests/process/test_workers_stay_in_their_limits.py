"""What a worker does when it should not go on: it is replaced, nobody notices, and it is said why."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.load import Load
from benchmarks.service import Server, eventually
from benchmarks.tones import publish_tone

Launch = Callable[..., Server]


def speak(client: httpx.Client, text: str = "hello") -> httpx.Response:
    body = {"model": "tone", "input": text, "voice": "sine", "response_format": "pcm"}
    return client.post("/v1/audio/speech", json=body)


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    publish_tone(models, family="faulty")
    return models


class LowestReady:
    """Watches how many workers were ready, from the board, at every moment it could look."""

    def __init__(self, server: Server) -> None:
        self._server, self._stop = server, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.lowest = len(server.workers())

    def __enter__(self) -> LowestReady:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self.lowest = min(self.lowest, len(self._server.workers()))


def restarts(server: Server) -> dict[str, int]:
    found: dict[str, int] = server.status()["restarts"]
    return found


def wait_replaced(server: Server, reason: str, count: int = 1) -> None:
    eventually(lambda: restarts(server).get(reason, 0) >= count, what=f"a worker replaced for {reason}")
    eventually(lambda: server.status()["status"] in ("READY", "BUSY"), what="as many workers as wanted")


def test_a_worker_over_its_memory_limit_is_replaced_once_another_is_ready(
    launch: Launch, faulty: Path
) -> None:
    server = launch(faulty, env={"WARMSERVE_WORKER_MEMORY_LIMIT": "250MiB"}).wait_ready()
    with server.client() as client, Load(server.url) as load, LowestReady(server) as watch:
        assert speak(client, "leak:300").status_code == 200
        wait_replaced(server, "memory_limit")
        load.wait_for(20)
    assert watch.lowest == 2
    assert load.bad() == []
    (line,) = server.logged("worker_worn")
    assert "reason=memory_limit" in line and "the limit is 262144000" in line
    assert all(w["unique_bytes"] < 250 << 20 for w in server.workers() if "unique_bytes" in w)


def test_a_version_whose_workers_need_more_than_the_limit_is_refused(launch: Launch, faulty: Path) -> None:
    server = launch(faulty, env={"WARMSERVE_WORKER_MEMORY_LIMIT": "1MB"})
    assert server.process.wait(60) == 3
    assert any("reason=memory_limit" in line for line in server.logged("version_refused"))


def test_workers_are_recycled_after_max_requests_and_never_fewer_are_ready(
    launch: Launch, models: Path
) -> None:
    limits = {"WARMSERVE_MAX_REQUESTS": "15", "WARMSERVE_MAX_REQUESTS_JITTER": "5"}
    server = launch(models, env=limits).wait_ready()
    with Load(server.url, texts=("hello", "pieces:2:0.02")) as load, LowestReady(server) as watch:
        wait_replaced(server, "max_requests", count=3)
    assert load.bad() == []
    assert watch.lowest == 2
    assert all(w["served"] < 16 or w.get("worn") for w in server.workers())


def test_gunicorns_own_flag_for_max_requests_goes_the_same_way(launch: Launch, models: Path) -> None:
    server = launch(models, args=("--max-requests", "10")).wait_ready()
    with Load(server.url, texts=("hello",)) as load, LowestReady(server) as watch:
        wait_replaced(server, "max_requests", count=2)
    assert load.bad() == [] and watch.lowest == 2


def test_a_single_worker_without_surge_stays_although_it_is_worn(launch: Launch, models: Path) -> None:
    env = {"WARMSERVE_SURGE": "0", "WARMSERVE_MAX_REQUESTS": "3"}
    server = launch(models, workers=1, env=env).wait_ready()
    (before,) = server.workers()
    with server.client() as client:
        assert [speak(client).status_code for _ in range(12)] == [200] * 12
    assert server.workers()[0]["pid"] == before["pid"]
    assert server.workers()[0]["worn"] == "max_requests"


def test_an_instance_that_does_not_come_back_costs_its_request_and_its_worker_only(
    launch: Launch, faulty: Path
) -> None:
    env = {"WARMSERVE_REQUEST_TIMEOUT_S": "1.5", "WARMSERVE_POOL_SIZE": "2"}
    server = launch(faulty, env=env).wait_ready()
    with server.client() as client, Load(server.url, texts=("hello", "sleep:0.3")) as load:
        stuck = speak(client, "sleep:600")
        assert stuck.status_code == 504
        assert stuck.json()["error"]["code"] == "deadline_exceeded"
        wait_replaced(server, "instance_stuck")
        load.wait_for(20)
    assert load.bad() == []
    (line,) = server.logged("worker_defunct")
    assert "reason=instance_stuck" in line


def test_not_ready_while_the_only_pool_is_stuck_and_ready_again_by_itself(
    launch: Launch, faulty: Path
) -> None:
    """READY needs an instance that could take a request; one that hangs is BUSY, then gone."""
    server = launch(faulty, workers=1, env={"WARMSERVE_REQUEST_TIMEOUT_S": "1"}).wait_ready()
    seen: list[tuple[str, int]] = []
    with server.client() as client, server.admin() as admin:
        assert speak(client, "sleep:600").status_code == 504

        def replaced() -> bool:
            answer = admin.get("/readyz")
            seen.append((answer.json()["status"], answer.status_code))
            return restarts(server).get("instance_stuck", 0) == 1 and seen[-1] == ("READY", 200)

        eventually(replaced)
        assert speak(client).status_code == 200
    assert ("READY", 200) not in seen[:-1], "ready was said while nothing could be served"


def test_instances_that_keep_hanging_roll_the_version_back(launch: Launch, tmp_path: Path) -> None:
    """Broken workers count like dead ones: the version before serves again."""
    models = tmp_path / "models"
    publish_tone(models, family="faulty")
    server = launch(
        models, env={"WARMSERVE_REQUEST_TIMEOUT_S": "1", "WARMSERVE_CRASH_LIMIT": "2"}
    ).wait_ready()
    publish_tone(models, family="faulty", gain=0.4)
    server.signal(signal.SIGHUP)
    eventually(lambda: (server.status()["last_swap"] or {}).get("to") == "v2")
    with server.client() as client:
        assert [speak(client, "sleep:600").status_code for _ in range(2)] == [504, 504]
        eventually(lambda: server.status()["current"] == "v1" and server.status()["status"] == "READY")
        assert speak(client).headers["x-model-version"] == "v1"
    assert server.status()["last_swap"]["reason"] == "crashing"


@pytest.mark.parametrize("fault", ["segv!", "raise!", "nan!"])
def test_a_request_that_breaks_its_worker_or_itself_breaks_nobody_else(
    launch: Launch, faulty: Path, fault: str
) -> None:
    server = launch(faulty).wait_ready()
    with server.client() as client, Load(server.url, texts=("hello",)) as load:
        if fault == "segv!":
            with pytest.raises(httpx.HTTPError):
                speak(client, fault)
            eventually(lambda: restarts(server).get("SIGSEGV") == 1)
        else:
            assert speak(client, fault).status_code == 500
        server.wait_ready()
        load.wait_for(10)
    assert load.bad() == []


def test_a_device_that_fails_costs_its_request_and_its_worker_only(launch: Launch, faulty: Path) -> None:
    server = launch(faulty).wait_ready()
    with server.client() as client, Load(server.url, texts=("hello",)) as load:
        broken = speak(client, "device!")
        assert (broken.status_code, broken.json()["error"]["code"]) == (503, "device_failed")
        assert broken.headers["retry-after"]
        wait_replaced(server, "device_failed")
        load.wait_for(10)
    assert load.bad() == []
    (line,) = server.logged("worker_defunct")
    assert "reason=device_failed" in line and "an illegal memory access" in line


def test_a_full_device_costs_one_more_try_or_one_request(launch: Launch, faulty: Path) -> None:
    server = launch(faulty, env={"WARMSERVE_POOL_SIZE": "2"}).wait_ready()
    before = {w["pid"] for w in server.workers()}
    with server.client() as client, Load(server.url, texts=("hello",)) as load:
        assert speak(client, "oom:1").status_code == 200
        refused = speak(client, "oom:9")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "device_out_of_memory")
        with pytest.raises(httpx.RemoteProtocolError):  # a piece is out: cut, and not said to be whole
            speak(client, "late oom!")
        load.wait_for(10)
    assert load.bad() == []
    assert {w["pid"] for w in server.workers()} == before


def test_loading_slowly_keeps_admin_answering_and_the_port_closed(launch: Launch, tmp_path: Path) -> None:
    """Admin answers while a worker loads; how long each tier took is on the board and in the log."""
    models = tmp_path / "models"
    publish_tone(models, family="faulty", load_delay_s=1.0, warmup_delay_s=0.5)
    server = launch(models, workers=1)
    eventually(lambda: server.workers("warming") and server.admin_path.exists())
    with server.admin() as admin:
        eventually(lambda: _status(admin) == "STARTING", what="an answer while loading")
    (worker,) = server.wait_ready().workers()
    assert worker["load_ms"] >= 1000 and worker["warmup_ms"] >= 500
    tiers = [line for line in server.logged("warmed") if " tier=" in line]
    assert ["tier=load" in tiers[0], "tier=inference" in tiers[1]] == [True, True]


def _status(admin: httpx.Client) -> Any:
    try:
        return admin.get("/readyz").json()["status"]
    except httpx.HTTPError:
        return None


def test_metrics_name_every_reason(launch: Launch, models: Path) -> None:
    server = launch(models, env={"WARMSERVE_MAX_REQUESTS": "5"}).wait_ready()
    with server.client() as client, server.admin() as admin:
        for _ in range(12):
            speak(client)
        wait_replaced(server, "max_requests")
        text = admin.get("/metrics").text
    assert 'warmserve_worker_restarts_total{reason="max_requests"}' in text
    assert 'warmserve_warmup_duration_seconds_count{model="tone",tier="keepalive"} 0' in text
