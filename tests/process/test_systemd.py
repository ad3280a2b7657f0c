"""The notify protocol, against a notify socket of our own: what is said, and in which order."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.service import Server, eventually
from benchmarks.tones import publish_tone
from tests.process.test_swap_fails_nobody import finish_swap

Launch = Callable[..., Server]


class Manager:
    """Stands in for systemd: a datagram socket that keeps every message."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self.messages: list[str] = []

    def heard(self) -> list[str]:
        """Return all messages so far but the repeated ones that only say it is alive."""
        while True:
            try:
                self.messages.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                break
        return [m for m in self.messages if not m.startswith(("EXTEND_TIMEOUT_USEC=", "WATCHDOG="))]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    found = Manager(tmp_path / "notify")
    yield found
    found.socket.close()


def test_messages_come_in_the_order_that_systemd_expects(
    launch: Launch, tmp_path: Path, manager: Manager
) -> None:
    models = tmp_path / "models"
    publish_tone(models, warmup_delay_s=1.5)
    env = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "2000000"}
    server = launch(models, env=env)
    eventually(lambda: server.workers("warming"))
    assert manager.heard() == [], "nothing is ready before it is warm"
    server.wait_ready()
    eventually(lambda: len(manager.heard()) == 1)
    assert manager.heard()[0].startswith("READY=1\n")
    assert any(m.startswith("EXTEND_TIMEOUT_USEC=") for m in manager.messages)

    publish_tone(models)
    finish_swap(server)
    eventually(lambda: len(manager.heard()) == 3)
    reloading, ready = manager.heard()[1:]
    assert reloading.startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert int(reloading.rpartition("=")[2]) > 0
    assert ready.startswith("READY=1\nSTATUS=serving v2")

    publish_tone(models, fail="nan")
    assert finish_swap(server)["result"] == "rolled_back"
    eventually(lambda: len(manager.heard()) == 5)
    assert [m.partition("\n")[0] for m in manager.heard()[3:]] == ["RELOADING=1", "READY=1"]

    eventually(lambda: any(m == "WATCHDOG=1" for m in (manager.heard(), manager.messages)[1]))
    server.signal(signal.SIGTERM)
    server.process.wait(30)
    assert manager.heard()[-1] == "STOPPING=1"
    assert len(manager.heard()) == 6


def test_a_refused_reload_is_answered_too(
    launch: Launch, models: Path, tmp_path: Path, manager: Manager
) -> None:
    file = tmp_path / "warmserve.env"
    file.write_text("")
    server = launch(
        models, env={"NOTIFY_SOCKET": str(manager.path), "WARMSERVE_ENV_FILE": str(file)}
    ).wait_ready()
    eventually(lambda: len(manager.heard()) == 1)
    file.write_text("WARMSERVE_NO_SUCH=1\n")
    finish_swap(server)
    eventually(lambda: len(manager.heard()) == 3)
    assert manager.heard()[2].startswith("READY=1\n")
