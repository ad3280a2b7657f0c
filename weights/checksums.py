"""Reading every byte of a version once: sha256 against the manifest, and the page cache warm after it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

from weights.confined import check_size, open_directory, open_file, system_errors
from weights.errors import ChecksumWrong
from weights.manifest import FileEntry, Manifest

WINDOW_BYTES = 4 << 20

Progress = Callable[[int], None]
"""Called with the bytes read so far, of all files together."""


def verify_checksums(
    directory: Path, manifest: Manifest, *, on_progress: Progress | None = None, threads: int = 1
) -> None:
    """Read all listed files and compare their sha256; what was read is in the page cache afterwards.

    hashlib releases the GIL, so *threads* files are read at a time; all threads have ended on return.
    The largest file bounds the time (1.2 GB/s a thread here). In a process that forks later, keep
    ``threads=1``: none is started.

    Raises:
        ChecksumWrong: the bytes of a file are not the manifest's.
        FileSizeWrong, FileMissing, FileUnreadable, NotRegular, PathEscapes: as in ``verify_layout``.
    """
    counter = _Counter(on_progress)
    with open_directory(directory) as fd:
        largest_first = sorted(manifest.files, key=lambda entry: -entry.size_bytes)
        if threads < 2 or len(largest_first) < 2:
            for entry in largest_first:
                _check(fd, directory, entry, counter)
            return
        with ThreadPoolExecutor(threads) as executor:
            tasks = [executor.submit(_check, fd, directory, entry, counter) for entry in largest_first]
            try:
                for task in tasks:
                    task.result()
            except BaseException:
                counter.stopped.set()  # the first refusal decides; the others need not read on
                raise


def file_sha256(fd: int, shown: Path, on_window: Progress = lambda count: None) -> str:
    """Return the sha256 of the open file in hexadecimal digits, read in windows of some MiB."""
    digest = hashlib.sha256()
    window = memoryview(bytearray(WINDOW_BYTES))
    offset = 0
    with system_errors(shown):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := os.preadv(fd, [window], offset):
            digest.update(window[:count])
            offset += count
            on_window(count)
    return digest.hexdigest()


class _Stopped(Exception):
    """Another file was refused already."""


class _Counter:
    """Bytes read by all threads; one call of the callback at a time."""

    def __init__(self, on_progress: Progress | None) -> None:
        self.stopped = Event()
        self._lock = Lock()
        self._total = 0
        self._on_progress = on_progress

    def add(self, count: int) -> None:
        if self.stopped.is_set():
            raise _Stopped
        if self._on_progress is not None:
            with self._lock:
                self._total += count
                self._on_progress(self._total)


def _check(directory_fd: int, directory: Path, entry: FileEntry, counter: _Counter) -> None:
    shown = directory / entry.path
    with open_file(directory_fd, entry.path, shown) as fd:
        check_size(fd, entry.size_bytes, shown)
        actual = file_sha256(fd, shown, counter.add)
    if actual != entry.sha256:
        raise ChecksumWrong(shown, entry.sha256, actual)
