"""Start real gunicorn on a loopback port of its own, watch its board, and end only what was started here.

Shared by the benchmarks and the process tests.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

from server.board import Board, live_boards
from server.status import snapshot

GUNICORN = Path(sys.executable).with_name("gunicorn")
ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")


def eventually(read: Callable[[], T], *, within_s: float = 30.0, what: str = "the expected state") -> T:
    """Return the first true value of *read*; fail when none came within *within_s* seconds."""
    deadline = time.monotonic() + within_s
    while True:
        value = read()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}; last seen: {value!r}")
        time.sleep(0.01)


class Server:
    """One gunicorn master started the way a user starts it, plus a port that the test chose."""

    def __init__(
        self,
        models: Path,
        run_dir: Path,
        *,
        workers: int = 2,
        env: Mapping[str, str] | None = None,
        args: tuple[str, ...] = (),
    ) -> None:
        self.models, self.run_dir = models, run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin_path = run_dir / "admin.sock"
        self.log_path = run_dir / "log"
        self.env = {
            **os.environ,
            "WARMSERVE_MODELS": str(models),
            "WARMSERVE_RUN_DIR": str(run_dir),
            "WARMSERVE_ADMIN_BIND": f"unix:{self.admin_path}",
            "WARMSERVE_WORKERS": str(workers),
            "WARMSERVE_TORCH_THREADS": "1",
            **(env or {}),
        }
        self.log = self.log_path.open("ab")
        self.process = subprocess.Popen(
            [str(GUNICORN), *(args if "-b" in args else ("--bind", f"fd://{self.socket.fileno()}", *args))],
            cwd=ROOT, env=self.env, pass_fds=[self.socket.fileno()], stdout=self.log, stderr=self.log,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def status(self) -> dict[str, Any]:
        """Return the board of this server's arbiter; empty before there is one."""
        for path in live_boards(self.run_dir):
            if path.name == f"board.{self.pid}":
                return snapshot(Board.open(path), 1)
        return {}

    def workers(self, phase: str = "ready") -> list[dict[str, Any]]:
        """Return the workers in *phase*."""
        return [w for w in self.status().get("workers", []) if w.get("phase") == phase]

    def wait_ready(self, count: int | None = None, *, within_s: float = 60.0) -> Server:
        """Return once *count* workers (default: all wanted) are ready."""

        def ready() -> bool:
            assert self.process.poll() is None, f"gunicorn ended with {self.process.returncode}"
            status = self.status()
            wanted = count if count is not None else status.get("size")
            return wanted is not None and len(self.workers()) >= wanted

        eventually(ready, within_s=within_s, what="ready workers")
        return self

    def signal(self, sig: signal.Signals) -> None:
        """Send *sig* to the master."""
        self.process.send_signal(sig)

    def admin(self) -> httpx.Client:
        """Return a client on the admin socket."""
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.admin_path)), base_url="http://admin", timeout=10
        )

    def client(self, **options: Any) -> httpx.Client:
        """Return a client on the data address."""
        return httpx.Client(base_url=self.url, timeout=options.pop("timeout", 60), **options)

    def log_text(self) -> str:
        """Return everything the server has logged."""
        return self.log_path.read_text(errors="replace")

    def logged(self, event: str) -> list[str]:
        """Return the log's lines of one event."""
        return [line for line in self.log_text().splitlines() if f"event={event} " in line + " "]

    def stop(self) -> int:
        """Stop gracefully, or by force; return the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self.socket.close()
        self.log.close()
        return self.process.returncode


def warmserve(server: Server, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the operator command with the server's settings."""
    env = {**server.env, "WARMSERVE_BIND": f"127.0.0.1:{server.port}"}
    command = [str(Path(sys.executable).with_name("warmserve")), *arguments]
    return subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
