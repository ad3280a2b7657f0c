"""What ended the master, its workers or a healthy version once: each case that was found, kept."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.service import GUNICORN, ROOT, Server, eventually, warmserve
from benchmarks.tones import publish_tone
from server.board import Board, live_boards
from tests.process.test_swap_fails_nobody import finish_swap
from tests.process.test_systemd import Manager

Launch = Callable[..., Server]
BODY = {"model": "tone", "voice": "sine", "response_format": "wav"}


def ask(url: str, text: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/audio/speech", json={**BODY, "input": text}, timeout=30)


@pytest.mark.parametrize("letter", ["語", "🙂", "\udc80"])
def test_a_reason_in_any_script_and_length_fits_the_board(launch: Launch, models: Path, letter: str) -> None:
    """At boot and at HUP, from the check and from a worker."""
    publish_tone(models, fail="raise", message=letter.encode("utf-16", "surrogatepass").hex(), times=2000)
    server = launch(models, workers=1).wait_ready()
    eventually(lambda: server.status()["status"] == "DEGRADED")
    publish_tone(models, fail="raise", message=letter.encode("utf-16", "surrogatepass").hex(), times=2000)
    assert finish_swap(server)["reason"] == "warmup_failed"
    publish_tone(models, fail="init", message=letter.encode("utf-16", "surrogatepass").hex(), times=2000)
    assert finish_swap(server)["reason"] == "prepare_failed"
    assert ask(server.url, "hello").status_code == 200


def test_a_worker_that_somebody_else_tells_to_leave_finishes_its_request(
    launch: Launch, models: Path
) -> None:
    server = launch(models, workers=1, env={"WARMSERVE_BOOT_TIMEOUT_S": "2"}).wait_ready()
    time.sleep(2.5)  # its boot deadline lies in the past now; what is tested is that this does not matter
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, server.url, "sleep:2")
        eventually(lambda: server.workers()[0]["in_flight"] == 1)
        os.kill(server.workers()[0]["pid"], signal.SIGTERM)
        assert running.result().status_code == 200
    assert not server.logged("worker_overdue")
    server.wait_ready()


def test_deaths_of_the_version_before_do_not_count(launch: Launch, models: Path) -> None:
    server = launch(models, workers=2, env={"WARMSERVE_CRASH_LIMIT": "3"}).wait_ready()
    for _ in range(2):
        os.kill(server.workers()[0]["pid"], signal.SIGKILL)
        eventually(lambda: len(server.workers()) < 2 or server.status()["restarts"])
        server.wait_ready()
    publish_tone(models)
    assert finish_swap(server)["serving"] == "v2"
    os.kill(server.workers()[0]["pid"], signal.SIGKILL)
    eventually(lambda: len(server.logged("worker_died")) == 3)
    server.wait_ready()
    assert server.status()["current"] == "v2"


def test_a_poison_request_does_not_make_versions_flip(launch: Launch, models: Path) -> None:
    """Both versions die of it: the service tries the other one once, and then stays where it is."""
    publish_tone(models, dies_on_request=True)
    server = launch(models, workers=2, env={"WARMSERVE_CRASH_LIMIT": "2"}).wait_ready()
    publish_tone(models, dies_on_request=True)
    assert finish_swap(server)["serving"] == "v3"
    kill_by_asking(server, deaths=6)
    eventually(lambda: not server.status()["swapping"], within_s=60)
    current, flips = server.status()["current"], len(server.logged("swap_rolled_back"))
    assert current in ("v2", "v3")
    assert 1 <= flips <= 2
    kill_by_asking(server, deaths=len(server.logged("worker_died")) + 3)
    assert server.status()["current"] == current
    assert len(server.logged("swap_rolled_back")) == flips


def kill_by_asking(server: Server, *, deaths: int) -> None:
    """Send requests that kill a worker each, until *deaths* are logged."""

    def enough() -> bool:
        try:
            ask(server.url, "hello")
        except httpx.HTTPError:
            pass
        return len(server.logged("worker_died")) >= deaths

    eventually(enough, within_s=90, what=f"{deaths} deaths")


def test_a_boot_that_never_reaches_all_workers_still_answers_hup(
    launch: Launch, models: Path, tmp_path: Path
) -> None:
    publish_tone(models, only_one=str(tmp_path / "room"))
    server = launch(models, workers=2)
    eventually(lambda: len(server.workers()) == 1 and server.logged("worker_failed"), within_s=60)
    version = publish_tone(models)
    assert finish_swap(server)["serving"] == version.name


def test_a_version_published_while_the_boot_fails_is_tried(launch: Launch, models: Path) -> None:
    publish_tone(models, fail="raise", warmup_delay_s=3)
    server = launch(models, workers=1)
    eventually(lambda: server.workers("warming"), within_s=60)
    publish_tone(models)
    server.signal(signal.SIGHUP)
    eventually(lambda: server.status().get("current") == "v3" and server.workers(), within_s=60)


@pytest.mark.parametrize("pin", ["v9", "nonsense"])
def test_a_reload_that_cannot_begin_is_answered(
    launch: Launch, models: Path, tmp_path: Path, pin: str
) -> None:
    manager = Manager(tmp_path / "notify")
    server = launch(models, env={"NOTIFY_SOCKET": str(manager.path)}).wait_ready()
    eventually(lambda: len(manager.heard()) == 1)
    (models / "CURRENT").write_text(f"{pin}\n")
    refused = warmserve(server, "reload", "--wait")
    assert refused.returncode == 3, refused.stderr
    eventually(lambda: len(manager.heard()) == 3)
    assert manager.heard()[2].startswith("READY=1\n")
    manager.socket.close()


def test_a_family_that_leaves_a_process_behind_does_not_hold_the_master(launch: Launch, models: Path) -> None:
    server = launch(models, workers=1).wait_ready()
    publish_tone(models, fail="init", forks=True)
    assert finish_swap(server, within_s=15)["reason"] == "prepare_failed"


def test_exit_in_warm_up_is_named_at_once(launch: Launch, models: Path) -> None:
    server = launch(models, workers=1).wait_ready()
    publish_tone(models, fail="system exit")
    assert finish_swap(server, within_s=30)["reason"] == "warmup_failed"


def test_a_failed_upgrade_leaves_the_service_as_it_is(launch: Launch, models: Path, tmp_path: Path) -> None:
    """The interpreter is gone when USR2 comes: the old master and its workers go on."""
    server = launch(models, workers=2)
    eventually(server.status, within_s=60)
    server.wait_ready()
    pids = {w["pid"] for w in server.workers()}
    broken = tmp_path / "here"
    broken.mkdir()
    moved = start_in(broken, models, tmp_path / "run-moved")
    try:
        moved_board = eventually(lambda: _ready_board(tmp_path / "run-moved", 2), within_s=60)
        before = {slot["pid"] for slot in moved_board.workers().values()}
        broken.rename(tmp_path / "gone")
        moved.process.send_signal(signal.SIGUSR2)
        eventually(lambda: "could not be started" in moved.log.read_text(), within_s=20)
        assert moved.process.poll() is None
        assert {slot["pid"] for slot in moved_board.workers().values()} == before
        assert ask(f"http://127.0.0.1:{moved.port}", "hello").status_code == 200
    finally:
        moved.process.terminate()
        moved.process.wait(30)
    assert {w["pid"] for w in server.workers()} == pids


class Started:
    """A gunicorn that was started in a way `Server` does not."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int) -> None:
        self.process, self.log, self.port = process, log, port


def start_in(directory: Path, models: Path, run_dir: Path) -> Started:
    run_dir.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = run_dir / "log"
    env = {
        **os.environ, "WARMSERVE_MODELS": str(models), "WARMSERVE_RUN_DIR": str(run_dir),
        "WARMSERVE_ADMIN_BIND": f"unix:{run_dir}/admin.sock", "WARMSERVE_BIND": f"127.0.0.1:{port}",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [str(GUNICORN), "-c", str(ROOT / "gunicorn.conf.py")]
    with log.open("wb") as output:
        return Started(
            subprocess.Popen(command, cwd=directory, env=env, stdout=output, stderr=output), log, port
        )


def _ready_board(run_dir: Path, count: int) -> Board | None:
    for path in live_boards(run_dir):
        board = Board.open(path)
        if sum(slot.get("phase") == "ready" for slot in board.workers().values()) == count:
            return board
    return None


def test_socket_activation_survives_an_upgrade(models: Path, tmp_path: Path) -> None:
    """Data stays data and admin stays admin, whatever descriptors the new master finds."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with socket.socket() as data:
        data.bind(("127.0.0.1", 0))
        data.listen(64)
        port = data.getsockname()[1]
        env = {
            **os.environ, "WARMSERVE_MODELS": str(models), "WARMSERVE_RUN_DIR": str(run_dir),
            "WARMSERVE_ADMIN_BIND": f"unix:{run_dir}/admin.sock", "LISTEN_FDS": "1",
        }  # fmt: skip
        activate = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = str(os.getpid());"
            "os.execv(sys.argv[2], sys.argv[2:])"
        )
        command = [sys.executable, "-c", activate, str(data.fileno()), str(GUNICORN)]
        with (run_dir / "log").open("wb") as log:
            first = subprocess.Popen(
                command, cwd=ROOT, env=env, pass_fds=[data.fileno()], stdout=log, stderr=log
            )
    eventually(lambda: _ready_board(run_dir, 2), within_s=60)
    first.send_signal(signal.SIGUSR2)

    def upgraded() -> int | None:
        for path in live_boards(run_dir):
            board = Board.open(path)
            ready = [s for s in board.workers().values() if s.get("phase") == "ready"]
            if board.arbiter_pid != first.pid and len(ready) == 2:
                return board.arbiter_pid
        return None

    second = eventually(upgraded, within_s=60)
    first.terminate()
    first.wait(40)
    try:
        assert ask(f"http://127.0.0.1:{port}", "hello").status_code == 200
        assert httpx.get(f"http://127.0.0.1:{port}/livez").status_code == 404
        admin = httpx.Client(transport=httpx.HTTPTransport(uds=f"{run_dir}/admin.sock"), base_url="http://a")
        assert admin.get("/livez").status_code == 200
        assert admin.get("/v1/models").status_code == 404
    finally:
        os.kill(second, signal.SIGTERM)
        eventually(lambda: not Path(f"/proc/{second}").exists())


def test_term_answers_what_is_queued(launch: Launch, models: Path) -> None:
    server = launch(models, workers=1).wait_ready()
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(ask, server.url, "sleep:1")
        eventually(lambda: server.workers()[0]["in_flight"] == 1)
        others = [threads.submit(ask, server.url, "hello") for _ in range(3)]
        eventually(lambda: _queued(server) == 3)
        server.signal(signal.SIGTERM)
        assert [future.result().status_code for future in [first, *others]] == [200] * 4
    assert server.process.wait(20) == 0


def _queued(server: Server) -> int:
    from server.listeners import TCP_INFO, TCP_INFO_BYTES, UNACKED

    raw = server.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    return int(TCP_INFO.unpack(raw)[UNACKED])


def test_a_socket_file_that_was_removed_does_not_spoil_the_stop(launch: Launch, models: Path) -> None:
    server = launch(models, workers=1).wait_ready()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, server.url, "sleep:1")
        eventually(lambda: server.workers()[0]["in_flight"] == 1)
        server.admin_path.unlink()
        server.signal(signal.SIGTERM)
        assert running.result().status_code == 200
    assert server.process.wait(20) == 0


def test_idle_connections_cost_neither_workers_nor_capacity(
    launch: Launch, models: Path, tmp_path: Path
) -> None:
    """Hundreds of them on a unix socket and on the admin address, under a low limit of descriptors."""
    path = tmp_path / "data.sock"
    limited = ("-b", f"unix:{path}")
    server = launch(models, workers=2, args=limited, env={"WARMSERVE_READ_TIMEOUT_S": "30"}).wait_ready()
    idle = []
    try:
        for target in [str(path)] * 400 + [str(server.admin_path)] * 80:
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            try:
                one.connect(target)
            except BlockingIOError:
                pass  # its queue is full: nobody is served worse for that
            idle.append(one)
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://d", timeout=30) as client:
            for _ in range(5):
                answer = client.post("/v1/audio/speech", json={**BODY, "input": "hello"})
                assert answer.status_code == 200
            with server.admin() as admin:
                assert admin.get("/livez").status_code == 200
    finally:
        for one in idle:
            one.close()
    assert not server.logged("worker_died")


def test_on_a_unix_socket_nobody_waits_behind_a_busy_worker(
    launch: Launch, models: Path, tmp_path: Path
) -> None:
    """Clients that write a moment after they connect: accepted in between, they keep their place."""
    path = tmp_path / "data.sock"
    server = launch(models, workers=2, args=("-b", f"unix:{path}")).wait_ready()
    request = (
        b"POST /v1/audio/speech HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s"
    )

    def late(_: int) -> bytes:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            time.sleep(0.01)  # the client's own slowness is what is tested
            body = b'{"model":"tone","voice":"sine","input":"hello","response_format":"wav"}'
            client.sendall(request % (len(body), body))
            return client.recv(15)

    with ThreadPoolExecutor(2) as threads:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://d", timeout=30) as client:
            busy = threads.submit(client.post, "/v1/audio/speech", json={**BODY, "input": "sleep:8"})
            eventually(lambda: any(w["in_flight"] for w in server.workers()))
            for number in range(20):
                assert late(number) == b"HTTP/1.1 200 OK"
            assert not busy.done(), "a request waited for the busy worker"
            assert busy.result().status_code == 200


def test_a_worker_told_to_stop_at_its_birth_stops(launch: Launch, models: Path) -> None:
    """TERM to the service while workers are being forked: none misses it, so the end comes at once."""
    for _ in range(5):
        server = launch(models, workers=4, env={"WARMSERVE_DRAIN_TIMEOUT_S": "60"})
        eventually(lambda server=server: server.workers("warming") or server.workers())
        server.process.terminate()
        assert server.process.wait(20) == 0
