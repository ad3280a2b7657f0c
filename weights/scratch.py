"""Directories that a publish or a delete is working in, and finding those that a crash left behind.

Whoever works holds an flock on the directory itself, so an unlocked one belongs to nobody any more.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weights.errors import VersionInUse

PUBLISH = ".publish-"
DELETE = ".delete-"
PIN = ".pin-"  # a file; written under the store's lock only
_PREFIXES = (PUBLISH, DELETE, PIN)


def new_name(root: Path, prefix: str) -> Path:
    """Return a path below *root* that nothing has yet."""
    return root / f"{prefix}{secrets.token_hex(8)}"


def try_hold(directory: Path) -> int | None:
    """Lock *directory* and return the descriptor that holds the lock; None if another holds it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Lock *directory* for the block; the lock follows it when it is renamed.

    Raises:
        VersionInUse: another process holds it.
    """
    fd = try_hold(directory)
    if fd is None:
        raise VersionInUse(directory)
    try:
        yield
    finally:
        os.close(fd)


def leftovers(root: Path) -> list[Path]:
    """List the names of interrupted work below *root*, those still being worked in among them."""
    try:
        with os.scandir(root) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.name.startswith(_PREFIXES))
    except OSError:
        return []


def seize(root: Path) -> Iterator[tuple[Path, int | None]]:
    """Yield the leftovers that nobody works in, each with the descriptor that now holds it.

    Call under the store's lock: a publisher creates and locks its directory under it, in one step.
    """
    for path in leftovers(root):
        with suppress(OSError):  # gone, or not a directory of ours
            if path.name.startswith(PIN):
                yield path, None
            elif (fd := try_hold(path)) is not None:
                yield path, fd
