"""Who still maps a version: a shared flock on its manifest, held by every process that inherited it.

The kernel drops it when the last of them is gone, however it died. Deleting needs the exclusive lock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from weights.confined import open_directory, open_file
from weights.errors import FileMissing, VersionInUse, VersionNotFound
from weights.manifest import FILE_NAME


class Lease:
    """A version that stays on disk until `close` in this process and in every fork of it.

    Take it before mapping and before forking. ``close`` closes the descriptor and never unlocks: an
    unlock on any copy of the descriptor would free the version for all of them.

    Args:
        directory: the version directory.

    Raises:
        VersionNotFound: not there, or deleted while the lease was taken.
        VersionInUse: somebody is deleting it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._fd: int | None = _locked(directory, fcntl.LOCK_SH)

    @property
    def closed(self) -> bool:
        """Whether this process gave the lease up."""
        return self._fd is None

    def close(self) -> None:
        """Give up this process's part of the lease; again is nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold *directory* against every lease for the block; used to delete it.

    Raises:
        VersionNotFound: no such version.
        VersionInUse: a live process leases it.
    """
    fd = _locked(directory, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def leased_by(directory: Path) -> list[int]:
    """List the pids that hold a lease on the version, as far as /proc shows them; for display only.

    Other users' processes and other pid namespaces are not seen: ask `exclusive` before deleting.
    """
    try:
        target = os.stat(directory / FILE_NAME)
    except OSError:
        return []
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return sorted(pid for pid in pids if _holds(pid, target))


def _holds(pid: int, target: os.stat_result) -> bool:
    try:
        return any(_locks(pid, fd, target) for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False  # ended, or not ours to look at


def _locks(pid: int, fd: str, target: os.stat_result) -> bool:
    try:
        # By inode: the path that the link shows may have been renamed since.
        if not os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), target):
            return False
        with open(f"/proc/{pid}/fdinfo/{fd}") as lines:
            return any(line.startswith("lock:") and "FLOCK" in line for line in lines)
    except OSError:
        return False  # closed meanwhile


def _locked(directory: Path, operation: int) -> int:
    try:
        with open_directory(directory) as at, open_file(at, FILE_NAME, directory / FILE_NAME) as found:
            fd = os.dup(found)  # shares the open file, and so the lock
    except FileMissing:
        raise VersionNotFound(directory) from None
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
        # Between open and lock somebody may have renamed the version away and deleted it.
        if not os.path.samestat(os.fstat(fd), os.stat(directory / FILE_NAME)):
            raise VersionNotFound(directory)
    except BlockingIOError:
        os.close(fd)
        raise VersionInUse(directory) from None
    except FileNotFoundError:
        os.close(fd)
        raise VersionNotFound(directory) from None
    except BaseException:
        os.close(fd)
        raise
    return fd
