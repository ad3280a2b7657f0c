"""The lock of a store, held for renames only, and the highest version number it ever gave out."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weights.errors import StoreBusy

_POLL_S = 0.01


@dataclass(frozen=True)
class StoreLock:
    """The right to change names in a store; valid inside the `locked` block that made it."""

    fd: int

    def next_number(self, present: Iterable[int]) -> int:
        """Return a number above all *present* ones and all given out before, and remember it.

        A number is never used twice, even if its version was deleted: logs and clients tell them apart
        by it. A crash after this skips a number.
        """
        number = max([self._remembered(), *present]) + 1
        self.remember(number)
        return number

    def remember(self, number: int) -> None:
        """Keep *number* from being given out again."""
        os.pwrite(self.fd, b"%-20d\n" % max(number, self._remembered()), 0)
        os.fsync(self.fd)

    def _remembered(self) -> int:
        text = os.pread(self.fd, 32, 0).strip()
        return int(text) if text.isdigit() else 0


@contextmanager
def locked(path: Path, *, timeout_s: float) -> Iterator[StoreLock]:
    """Hold the lock file *path* for the block, waiting at most *timeout_s* for it.

    Raises:
        StoreBusy: another process held it all that time.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + timeout_s
        # flock has no timeout, and an alarm signal belongs to the process, not to a library.
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                raise StoreBusy(path, timeout_s)
            time.sleep(_POLL_S)
        yield StoreLock(fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
