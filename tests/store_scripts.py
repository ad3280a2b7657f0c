"""Processes for test_store_processes: ``python store_scripts.py WORD ARGUMENT...``. Imports no torch."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from weights.checksums import verify_checksums
from weights.errors import FileMissing
from weights.lease import Lease
from weights.store import Store
from weights.verify import verify_layout


def publish_killed(root: str, source: str, move: str) -> None:
    """Publish again and again, killed one step later each time, until one gets through; print the kills.

    After each kill every version that the store lists must be whole.
    """
    step = 0
    while True:
        step += 1
        pid = os.fork()
        if pid == 0:
            _die_at(step)
            with suppress(FileMissing):  # the kill came after the rename, and the source has moved
                Store(Path(root)).publish(Path(source), move=move == "move")
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        for version in Store(Path(root)).versions():
            verify_checksums(version.path, verify_layout(version.path).manifest)
        if os.WIFEXITED(status):
            break
    print(step - 1)


def _die_at(step: int) -> None:
    left = step

    def count(event: str, _: object) -> None:
        nonlocal left
        if event == "open" or event.startswith(("os.", "shutil.", "fcntl.", "ctypes.")):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def publish_many(root: str, source: str, count: str) -> None:
    """Publish *count* times and print the numbers."""
    print(*(Store(Path(root)).publish(Path(source)).number for _ in range(int(count))))


def lease_and_fork(directory: str) -> None:
    """Take a lease, fork, print the child's pid, and wait in both for the end of standard input."""
    lease = Lease(Path(directory))
    pid = os.fork()
    if pid != 0:
        print(pid, flush=True)
    sys.stdin.read()
    assert not lease.closed


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
