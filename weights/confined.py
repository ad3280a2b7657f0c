"""Opening the files of one directory so that no name leads out of it and no open can block.

Knows nothing of manifests: a relative path in, a descriptor of a regular file out.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weights.errors import FileMissing, FileSizeWrong, FileUnreadable, NotRegular, PathEscapes

# O_NONBLOCK: a FIFO put in a file's place would otherwise block the open until someone writes.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_DIRECTORY = _OPEN | os.O_DIRECTORY


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Turn what the system says about *path* into a refusal that names it."""
    try:
        yield
    except FileNotFoundError:
        raise FileMissing(path) from None
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise PathEscapes(path, "a symbolic link") from None
        raise FileUnreadable(path, os.strerror(exc.errno or 0)) from exc


@contextmanager
def open_directory(directory: Path, *, follow: bool = False) -> Iterator[int]:
    """Open *directory* itself, a symbolic link only with *follow*, and close it after the block.

    Raises:
        FileMissing, PathEscapes, NotRegular, FileUnreadable: it is not there or no real directory.
    """
    with system_errors(directory):
        name = os.path.realpath(directory) if follow else str(directory)
        fd = _open_checked(None, name, directory, want_directory=True)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_file(directory_fd: int, relative: str, shown: Path) -> Iterator[int]:
    """Open the regular file *relative* below *directory_fd*; *shown* names it in errors.

    Raises:
        FileMissing, PathEscapes, NotRegular, FileUnreadable: it is not there or not a regular file.
    """
    *parents, name = relative.split("/")
    if not name or {"", ".", ".."} & {*parents, name}:
        raise PathEscapes(shown, "not a plain relative path")
    with system_errors(shown):
        fd = os.dup(directory_fd)
        try:
            for parent in parents:
                below = _open_checked(fd, parent, shown, want_directory=True)
                os.close(fd)
                fd = below
            found = _open_checked(fd, name, shown, want_directory=False)
        finally:
            os.close(fd)
    try:
        yield found
    finally:
        os.close(found)


def _open_checked(at: int | None, name: str, shown: Path, *, want_directory: bool) -> int:
    # Looked at before it is opened (opening a device can do things), and again after (it may have changed).
    _check_kind(os.stat(name, dir_fd=at, follow_symlinks=False), shown, want_directory)
    fd = os.open(name, _OPEN_DIRECTORY if want_directory else _OPEN, dir_fd=at)
    try:
        _check_kind(os.fstat(fd), shown, want_directory)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_kind(found: os.stat_result, shown: Path, want_directory: bool) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise PathEscapes(shown, "a symbolic link")
    if not (stat.S_ISDIR if want_directory else stat.S_ISREG)(found.st_mode):
        raise NotRegular(shown)


def check_size(fd: int, expected_bytes: int, shown: Path) -> None:
    """Refuse a file of another size: a mapping that reaches past its end would be SIGBUS.

    Raises:
        FileSizeWrong: as it says.
    """
    actual = os.fstat(fd).st_size
    if actual != expected_bytes:
        raise FileSizeWrong(shown, expected_bytes, actual)


def read_exactly(fd: int, count: int, offset: int, shown: Path) -> bytes:
    """Return *count* bytes from *offset*, or fewer where the file ends."""
    with system_errors(shown):
        parts = []
        while count:
            part = os.pread(fd, min(count, 1 << 24), offset)
            if not part:
                break
            parts.append(part)
            count -= len(part)
            offset += len(part)
        return b"".join(parts)
