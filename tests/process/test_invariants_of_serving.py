"""The invariants of DESIGN that hold while one version serves, each under its own name."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.service import Server, eventually
from benchmarks.tones import publish_tone
from weights.lease import exclusive
from weights.residency import residency

Launch = Callable[..., Server]


def speak(client: httpx.Client, text: str = "hello", **fields: object) -> httpx.Response:
    body = {"model": "tone", "input": text, "voice": "sine", "response_format": "pcm", **fields}
    return client.post("/v1/audio/speech", json=body)


def connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_one_copy_of_the_weights_however_many_workers(launch: Launch, tmp_path: Path) -> None:
    """Summed Pss of the weight mappings stays at one copy and no weight page is private."""
    models = tmp_path / "models"
    version = publish_tone(models, ballast_mb=64)
    server = launch(models, workers=4).wait_ready()
    with server.client() as client:
        for _ in range(60):
            assert speak(client).status_code == 200
    pids = [server.pid, *(int(w["pid"]) for w in server.workers())]
    files = list(version.path.glob("*.safetensors"))
    usages = [usage for pid in pids for usage in residency(files, pid).values()]
    assert all(u.rss_bytes > 0 for u in usages[1:]), "every worker maps the weights"
    assert sum(u.pss_bytes for u in usages) <= 1.05 * sum(f.stat().st_size for f in files)
    assert sum(u.anonymous_bytes for u in usages) == 0


def test_no_request_meets_a_cold_model(launch: Launch, tmp_path: Path) -> None:
    """The port refuses connections until a worker is warm; the first connection after that is served."""
    models = tmp_path / "models"
    publish_tone(models, warmup_delay_s=1.0)
    server = launch(models, workers=2)
    eventually(lambda: server.workers("warming"), what="a warming worker")
    refused = 0
    while not server.workers():
        if connects(server.port):
            break
        refused += 1
        time.sleep(0.01)
    assert refused > 10, "the port was open before the model was warm"
    eventually(lambda: connects(server.port), what="an open port")
    assert server.status()["workers"], "a board to read"
    with server.client() as client:
        assert speak(client).status_code == 200
    assert all(w["warmup_ms"] >= 1000 for w in server.wait_ready().workers())


def test_ready_means_ready_while_every_instance_is_busy(launch: Launch, models: Path) -> None:
    """Admin answers come while all instances compute, and say BUSY; the data port then queues."""
    server = launch(models, workers=2).wait_ready()
    with ThreadPoolExecutor(4) as threads, server.admin() as admin:
        long = [threads.submit(speak, server.client(), "sleep:3") for _ in range(2)]
        eventually(lambda: admin.get("/readyz").json()["status"] == "BUSY", within_s=10)
        for path in ("/livez", "/readyz", "/startupz", "/status", "/v2/health/live", "/v2/health/ready"):
            assert admin.get(path).status_code == 200
        assert not any(future.done() for future in long), "an answer waited for an instance"
        assert [future.result().status_code for future in long] == [200, 200]
        eventually(lambda: admin.get("/readyz").json()["status"] == "READY")


def test_not_ready_once_workers_stop_reporting(launch: Launch, models: Path) -> None:
    server = launch(models, workers=2).wait_ready()
    stopped = [int(w["pid"]) for w in server.workers()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: not server.status()["ready"], within_s=10)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    eventually(lambda: server.status()["ready"])


def test_nobody_waits_behind_a_busy_worker_while_another_is_idle(launch: Launch, models: Path) -> None:
    """With one worker held busy, every further request is served by the other, over kept-open clients too."""
    server = launch(models, workers=2).wait_ready()
    with ThreadPoolExecutor(1) as threads, server.client() as client:
        speak(client)
        busy = threads.submit(speak, server.client(), "sleep:6")
        eventually(lambda: any(w["in_flight"] for w in server.workers()))
        for _ in range(50):
            assert speak(client).status_code == 200
        assert not busy.done(), "a request waited for the busy worker"
        assert busy.result().status_code == 200


def test_a_silent_connection_takes_no_capacity(launch: Launch, models: Path) -> None:
    server = launch(models, workers=1).wait_ready()
    with socket.create_connection(("127.0.0.1", server.port)), server.client() as client:
        assert speak(client).status_code == 200
        assert server.workers()[0]["in_flight"] == 0


def test_a_slow_reader_holds_no_instance(launch: Launch, models: Path) -> None:
    server = launch(models, workers=1).wait_ready()
    body = json.dumps(
        {"model": "tone", "input": "seconds:120", "voice": "sine", "response_format": "pcm"}
    ).encode()
    head = b"POST /v1/audio/speech HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n"
    with socket.socket() as reader, server.client() as client:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.port))
        reader.sendall(head % len(body) + body)
        reader.recv(100)
        assert speak(client).status_code == 200


def test_a_client_too_slow_to_send_loses_its_place(launch: Launch, models: Path) -> None:
    server = launch(models, workers=1, env={"WARMSERVE_READ_TIMEOUT_S": "1"}).wait_ready()
    with socket.create_connection(("127.0.0.1", server.port)) as slow, server.client() as client:
        slow.sendall(b"POST /v1/audio/speech HTTP/1.1\r\n")
        eventually(lambda: server.workers()[0]["in_flight"] == 1)
        assert speak(client).status_code == 200


def test_connections_beyond_the_queue_are_refused_at_once(launch: Launch, models: Path) -> None:
    """Nothing unbounded: 503 with Retry-After while the one worker is still busy; the queued are served."""
    server = launch(models, workers=1, env={"WARMSERVE_MAX_QUEUE": "3"}).wait_ready()
    answers: list[httpx.Response] = []
    with ThreadPoolExecutor(12) as threads:
        busy = threads.submit(speak, server.client(), "sleep:4")
        eventually(lambda: server.workers()[0]["in_flight"] == 1)
        more = [threads.submit(lambda: answers.append(speak(server.client()))) for _ in range(8)]
        eventually(lambda: len(answers) == 5, within_s=3, what="five refusals")
        assert not busy.done()
        assert {a.status_code for a in answers} == {503}
        assert all(a.headers["retry-after"] == "1" for a in answers)
        assert {a.json()["error"]["code"] for a in answers} == {"overloaded"}
        for future in more:
            future.result()
        assert busy.result().status_code == 200
    assert sorted(a.status_code for a in answers) == [200] * 3 + [503] * 5


def test_a_killed_worker_is_replaced_from_the_mapping(launch: Launch, models: Path) -> None:
    """Nothing else notices: the other worker serves all along, and the file is not verified again."""
    server = launch(models, workers=2).wait_ready()
    victim, other = (int(w["pid"]) for w in server.workers())
    codes: list[int] = []
    done = threading.Event()

    def load() -> None:
        with server.client() as client:
            while not done.is_set():
                codes.append(speak(client).status_code)

    thread = threading.Thread(target=load)
    thread.start()
    eventually(lambda: len(codes) > 3)
    # Stopped while idle and then killed: it holds no request, so none may fail.
    eventually(lambda: _stop_idle(server, victim), within_s=20)
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: {int(w["pid"]) for w in server.workers()} - {victim, other})
    server.wait_ready()
    done.set()
    thread.join()
    assert set(codes) == {200}
    assert other in {int(w["pid"]) for w in server.workers()}
    assert len(server.logged("version_prepared")) == 1
    assert len(server.logged("worker_died")) == 1


def _stop_idle(server: Server, pid: int) -> bool:
    """Stop *pid*; keep it stopped only if it holds no connection."""
    os.kill(pid, signal.SIGSTOP)
    idle = next(w["in_flight"] for w in server.workers() if w["pid"] == pid) == 0
    sockets = sum(
        os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:") for fd in os.listdir(f"/proc/{pid}/fd")
    )
    if idle and sockets <= _idle_sockets(server, pid):
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def _idle_sockets(server: Server, pid: int) -> int:
    return 2  # its two listeners


def test_workers_leave_and_the_lease_ends_when_the_master_is_killed(launch: Launch, models: Path) -> None:
    server = launch(models, workers=2).wait_ready()
    pids = [int(w["pid"]) for w in server.workers()]
    os.kill(server.pid, signal.SIGKILL)
    server.process.wait(10)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), within_s=10)
    with exclusive(models / "v1"):
        pass


def test_term_finishes_running_requests(launch: Launch, models: Path) -> None:
    server = launch(models, workers=2).wait_ready()
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(speak, server.client(), "sleep:1.5") for _ in range(2)]
        eventually(lambda: sum(w["in_flight"] for w in server.workers()) == 2)
        server.signal(signal.SIGTERM)
        assert [future.result().status_code for future in running] == [200, 200]
    assert server.process.wait(20) == 0


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"fail": "build"}, "warmup_failed"),
        ({"fail": "raise"}, "warmup_failed"),
        ({"fail": "nan"}, "warmup_not_finite"),
        ({"fail": "silence"}, "warmup_silent"),
        ({"fail": "empty"}, "warmup_empty"),
        ({"fail": "exit"}, "exit_7"),
        ({"fail": "segv"}, "SIGSEGV"),
        ({"fail": "init"}, "load_failed"),
    ],
)
def test_a_version_that_cannot_serve_ends_the_first_boot(
    launch: Launch, tmp_path: Path, damage: dict[str, str], reason: str
) -> None:
    """A clear message with the reason, a non-zero exit, no crash loop."""
    models = tmp_path / "models"
    publish_tone(models, **damage)
    server = launch(models, workers=2)
    assert server.process.wait(60) == 3
    assert f"reason={reason}" in server.log_text()
    assert len(server.logged("worker_spawned")) <= 2


def test_no_version_at_all_is_said_plainly(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    server = launch(tmp_path / "models")
    assert server.process.wait(60) == 3
    assert "reason=no_version" in server.log_text()


def test_files_are_refused_before_use(launch: Launch, models: Path) -> None:
    """One flipped byte, and no worker is ever made from it."""
    weights = next((models / "v1").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    server = launch(models)
    assert server.process.wait(60) == 3
    log = server.log_text()
    assert "reason=checksum_wrong" in log
    assert weights.name in log
    assert not server.logged("worker_spawned")


def test_first_boot_serves_an_older_version_when_the_newest_is_bad(launch: Launch, models: Path) -> None:
    publish_tone(models, fail="raise")
    server = launch(models).wait_ready()
    eventually(lambda: server.status()["status"] == "DEGRADED")
    assert "v2" in server.status()["reason"]
    with server.client() as client:
        assert speak(client).headers["x-model-version"] == "v1"
