"""Files onto the disk so that a crash leaves nothing half: copy, fsync, rename without overwriting."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

from weights.confined import open_directory, open_file, system_errors
from weights.errors import FileMissing, NoSpace, VersionExists
from weights.manifest import FILE_NAME, Manifest

FILE_MODE = 0o644  # save_file writes 0600, which a worker that dropped its privileges cannot read
DIRECTORY_MODE = 0o755

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_libc = ctypes.CDLL(None, use_errno=True)


def copy_version(source: Path, target: Path, manifest: Manifest) -> None:
    """Copy the listed files and the manifest from *source* into the empty directory *target*, synced.

    Raises:
        NoSpace: the file system has no room. Otherwise what ``confined`` raises about a source file.
    """
    needed = manifest.total_bytes
    free = shutil.disk_usage(target).free
    if free < needed:
        raise NoSpace(target, needed, free)
    try:
        with open_directory(source) as fd:
            for path in [*(entry.path for entry in manifest.files), FILE_NAME]:
                (target / path).parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
                with open_file(fd, path, source / path) as file_fd:
                    _copy(file_fd, target / path)
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoSpace(target, needed, shutil.disk_usage(target).free) from exc


def _copy(source_fd: int, target: Path) -> None:
    with target.open("xb") as file:
        offset = 0
        # In the kernel: the bytes do not pass through this process.
        while sent := os.sendfile(file.fileno(), source_fd, offset, 1 << 26):
            offset += sent


def settle(directory: Path, manifest: Manifest) -> None:
    """Give the files and directories of a version their modes and bring them onto the disk."""
    parents = {directory}
    for path in [*(entry.path for entry in manifest.files), FILE_NAME]:
        _sync(directory / path, FILE_MODE)
        parents.update(directory / parent for parent in Path(path).parents)
    for parent in sorted(parents, reverse=True):  # children before their parents
        _sync(parent, DIRECTORY_MODE)


def _sync(path: Path, mode: int) -> None:
    with system_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(fd, mode)
            os.fsync(fd)
        finally:
            os.close(fd)


def sync_directory(directory: Path) -> None:
    """Bring the names in *directory* onto the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename_new(source: Path, target: Path) -> None:
    """Rename *source* to *target*, which must not exist, and bring the new name onto the disk.

    A plain rename replaces an empty directory without a word; this one never replaces anything.

    Raises:
        VersionExists: something is at *target*.
        FileMissing: nothing is at *source*.
        OSError: EXDEV between file systems, and what else the system says.
    """
    arguments = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    if _libc.renameat2(*arguments) != 0:
        error = ctypes.get_errno()
        if error == errno.EEXIST:
            raise VersionExists(target)
        if error == errno.ENOENT:
            raise FileMissing(source)
        if error not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(error, os.strerror(error), str(target))
        # This file system cannot (NFS for one): the store's lock is what is left against a race.
        if os.path.lexists(target):
            raise VersionExists(target)
        os.rename(source, target)
    sync_directory(target.parent)
