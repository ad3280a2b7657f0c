"""Where an arbiter's workers keep their counters: one directory, made and removed with its board.

Knows names, locks, room and leftovers, not what is in a file.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.board import Board, is_live_arbiter

LOCK = "lock"
KINDS = ("counter", "histogram")
FILE_BYTES = 1 << 16  # what prometheus_client starts a file with; a worker uses about half
RETIRED = "retired"  # in the place of a pid: what the files of dead workers added up to


def directory_of(run_dir: Path, arbiter_pid: int) -> Path:
    """Return the metrics directory of an arbiter, absolute: gunicorn may change the working directory."""
    return run_dir.absolute() / f"metrics.{arbiter_pid}"


def metrics_directory(board: Board) -> Path:
    """Return the directory that belongs to *board*."""
    return directory_of(board.path.parent, board.arbiter_pid)


def create(run_dir: Path) -> Path:
    """Make this arbiter's directory, empty, and remove those that dead arbiters left.

    Called once the arbiter's board is there: a directory belongs to a live arbiter or to nobody. Its own
    pid may have been another's, in a container the same one at each start.
    """
    for path in run_dir.glob("metrics.*"):
        pid = path.name.partition(".")[2]
        if pid == str(os.getpid()) or not is_live_arbiter(run_dir, pid):
            shutil.rmtree(path, ignore_errors=True)
    directory = directory_of(run_dir, os.getpid())
    directory.mkdir()
    (directory / LOCK).touch()
    return directory


def reserve(directory: Path, pid: int) -> None:
    """Make the files of worker *pid* with room for what it is going to count.

    Raises:
        OSError: there is no room, or no directory.
    """
    for kind in KINDS:
        allocate(directory / f"{kind}_{pid}.db", FILE_BYTES)


def allocate(path: Path, size_bytes: int) -> None:
    """Make *path* with *size_bytes* of real blocks: a hole in it would be SIGBUS on a full disk.

    Raises:
        OSError: there is no room.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)


def readable(directory: Path) -> list[Path]:
    """Return the files that hold something; one that is being born has no bytes yet."""
    return [path for path in sorted(directory.glob("*.db")) if path.stat().st_size]


def owner_of(path: Path) -> str:
    """Return the pid of the worker that writes *path*, or RETIRED."""
    return path.stem.rpartition("_")[2]


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Hold the files as they are for the block: no fold takes place; waits for one that does."""
    with _locked(directory, fcntl.LOCK_SH):
        yield


@contextmanager
def folding(directory: Path) -> Iterator[None]:
    """Keep readers out for the block.

    Raises:
        BlockingIOError: somebody reads now. The arbiter never waits for a worker.
    """
    with _locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
        yield


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    # A descriptor of its own for each holder: threads of one process exclude each other too.
    descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
