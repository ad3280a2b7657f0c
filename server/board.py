"""The shared record of what every worker is doing: a small fixed-size file mapped by all processes.

One record for the arbiter, one slot per worker, one writer per record. Readers never lock and never see
half a record: each record has two halves, and a counter that tells which half was finished last.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAGIC = b"WSBOARD1"
HEADER = struct.Struct("<8sIQQ")  # magic, number of records, pid of the arbiter, when made (Unix ns)
SEQUENCE = struct.Struct("<Q")
LENGTH = struct.Struct("<I")
HALF_BYTES = 4096
ROOM_BYTES = HALF_BYTES - LENGTH.size
RECORD_BYTES = SEQUENCE.size + 2 * HALF_BYTES
FIRST_RECORD = 64
READ_TRIES = 1000  # a writer would have to write as fast as this reads, each time
SLOTS = 320  # workers alive at one moment, WORKERS and SURGE at their limits; 2.6 MB of file
SHORT_CHARS = 200  # of a text in a record that would be too long otherwise


class BoardFull(Exception):
    """Every slot belongs to a live worker."""


class Record:
    """One JSON object that one process writes and everybody reads."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._counters = memoryview(memory).cast("Q")
        self._offset = offset
        self._fields: dict[str, Any] = {}
        self._lock = threading.Lock()

    def update(self, **fields: Any) -> None:
        """Set *fields* beside those already set, and publish all of them at once."""
        with self._lock:
            self._fields.update(fields)
            payload = _encode(self._fields)
            if len(payload) > ROOM_BYTES:
                payload = _encode(_shortened(self._fields))
            self._write(payload)

    def note(self, **fields: Any) -> None:
        """Set *fields*, to be published with the next update: for what changes often and can wait."""
        with self._lock:
            self._fields.update(fields)

    def clear(self) -> None:
        """Empty the record; the next worker in this slot starts from nothing."""
        with self._lock:
            self._fields = {}
            self._write(b"")

    def _write(self, payload: bytes) -> None:
        if len(payload) > ROOM_BYTES:
            raise ValueError(f"board record of {len(payload)} bytes exceeds {ROOM_BYTES}")
        sequence = self._sequence() + 1
        start = self._half(sequence)
        end = start + LENGTH.size + len(payload)
        self._memory[start:end] = LENGTH.pack(len(payload)) + payload
        self._counters[self._offset // SEQUENCE.size] = sequence  # one aligned store: whole or not at all

    def read(self) -> dict[str, Any] | None:
        """Return the last finished object; None when the record was never written or was cleared."""
        for _ in range(READ_TRIES):
            sequence = self._sequence()
            start = self._half(sequence)
            (length,) = LENGTH.unpack_from(self._memory, start)
            body = start + LENGTH.size
            payload = self._memory[body : body + min(length, HALF_BYTES - LENGTH.size)]
            # Once the next write has been published, the one after it may be in this half already.
            if self._sequence() == sequence:
                return json.loads(payload) if payload else None
        raise TimeoutError("a board record changed each time it was read")

    def _sequence(self) -> int:
        return self._counters[self._offset // SEQUENCE.size]

    def _half(self, sequence: int) -> int:
        return self._offset + SEQUENCE.size + (sequence % 2) * HALF_BYTES


class Board:
    """The file ``board.<pid of the arbiter>`` in the run directory.

    The arbiter holds a lock on its board for as long as it lives, however it dies; that, not the pid,
    tells a reader whether the board is live.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        self._lock: int | None = None
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._memory = mmap.mmap(descriptor, 0, access=access)
        finally:
            os.close(descriptor)
        magic, records, self.arbiter_pid, _ = HEADER.unpack_from(self._memory, 0)
        if magic != MAGIC:
            raise ValueError(f"{path} is not a board of this version of the server")
        self.arbiter = self._record(0)
        self.slots = tuple(self._record(1 + number) for number in range(records - 1))

    @classmethod
    def create(cls, run_dir: Path) -> Board:
        """Make this process's board and remove those that dead arbiters left."""
        run_dir.mkdir(parents=True, exist_ok=True)
        for stale in dead_boards(run_dir):
            stale.unlink(missing_ok=True)
        path = run_dir / f"board.{os.getpid()}"
        path.unlink(missing_ok=True)
        fresh = path.with_name(f".{path.name}")
        # A descriptor for the lock alone: a mapping keeps a copy of its own, and forks map too.
        lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Reserved and not sparse: on a full disk a write to a missing page would be SIGBUS.
        os.posix_fallocate(lock, 0, FIRST_RECORD + (1 + SLOTS) * RECORD_BYTES)
        os.pwrite(lock, HEADER.pack(MAGIC, 1 + SLOTS, os.getpid(), time.time_ns()), 0)
        os.rename(fresh, path)
        board = cls(path, writable=True)
        board._lock = lock
        return board

    @classmethod
    def open(cls, path: Path) -> Board:
        """Map an existing board for reading its records."""
        return cls(path, writable=False)

    def is_live(self) -> bool:
        """Tell whether the arbiter of this board still runs."""
        return _is_locked(self.path)

    def release_lock(self) -> None:
        """Close a fork's copy of the lock: the arbiter's own says whether the arbiter lives."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def workers(self) -> dict[int, dict[str, Any]]:
        """Return the written slots by slot number."""
        read = ((number, slot.read()) for number, slot in enumerate(self.slots))
        return {number: fields for number, fields in read if fields is not None}

    def free_slot(self, taken: set[int]) -> int:
        """Return the lowest slot number not in *taken*, cleared.

        Raises:
            BoardFull: all of them are taken.
        """
        for number, slot in enumerate(self.slots):
            if number not in taken:
                slot.clear()
                return number
        raise BoardFull(f"{len(self.slots)} workers")

    def _record(self, number: int) -> Record:
        return Record(self._memory, FIRST_RECORD + number * RECORD_BYTES)


def live_boards(run_dir: Path) -> list[Path]:
    """Return the boards of running arbiters, newest first (two during a binary upgrade)."""
    return [path for path in _boards(run_dir) if _is_locked(path)]


def is_live_arbiter(run_dir: Path, pid: str) -> bool:
    """Tell whether *pid* is an arbiter with a board here that still runs."""
    return _is_locked(run_dir / f"board.{pid}")


def dead_boards(run_dir: Path) -> list[Path]:
    """Return the boards that ended arbiters left behind, newest first."""
    return [path for path in _boards(run_dir) if not _is_locked(path)]


def _boards(run_dir: Path) -> Iterator[Path]:
    return iter(sorted(run_dir.glob("board.*"), key=_created, reverse=True))


def _created(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return int(HEADER.unpack(file.read(HEADER.size))[3])
    except (OSError, struct.error):
        return 0


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def _shortened(value: Any) -> Any:
    """Return *value* with its long texts cut: a record has to fit, whatever an error has to say."""
    if isinstance(value, dict):
        return {key: _shortened(inner) for key, inner in value.items()}
    if isinstance(value, str) and len(value) > SHORT_CHARS:
        return value[:SHORT_CHARS] + "..."
    return value
