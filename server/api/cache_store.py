"""The store of finished responses: diskcache, reading and writing plain bytes only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diskcache import Cache, Disk, Timeout


class BytesDisk(Disk):  # type: ignore[misc]
    """Refuses what would be pickled, in whatever file lies there."""

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes:
        """Return the bytes that were stored."""
        found = super().fetch(mode, filename, value, read) if mode in (1, 2) else None  # raw, or in a file
        if type(found) is not bytes:
            raise ValueError("the store holds something that is not bytes")
        return found


class Store:
    """Bytes by key, the least recently used driven out when it grows over its size; for several processes."""

    def __init__(self, directory: Path, *, size_bytes: int, busy_s: float) -> None:
        self._cache = Cache(
            str(directory), disk=BytesDisk, timeout=busy_s, size_limit=size_bytes, cull_limit=100,
            eviction_policy="least-recently-used", sqlite_cache_size=256, sqlite_mmap_size=0,
        )  # fmt: skip

    def get(self, key: bytes) -> bytes | None:
        """Return what is stored under *key*."""
        try:
            found: bytes | None = self._cache.get(key)
        except Timeout:  # noting the use of what was found is a write
            return None
        return found

    def set(self, key: bytes, value: bytes) -> None:
        """Store *value*.

        Raises:
            TimeoutError: others were writing all the time.
        """
        try:
            self._cache.set(key, value)
        except Timeout:
            raise TimeoutError("the store is busy") from None

    @property
    def volume_bytes(self) -> int:
        """Bytes on disk, the index included."""
        return int(self._cache.volume())


def open_store(directory: Path, *, size_bytes: int, busy_s: float) -> Store:
    """Return the store in *directory*, made if need be."""
    return Store(directory, size_bytes=size_bytes, busy_s=busy_s)
