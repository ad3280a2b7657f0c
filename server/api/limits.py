"""How much one key may ask, counted over all workers: a file a key, and the kernel's locks on it.

The kernel gives a dead worker's locks back, so what it was computing is never counted on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.errors import RateLimited, TooManyAtOnce
from server.keys import ApiKey, Rate

ARRIVAL = struct.Struct("<d")  # the file's content: when the next request would be on time, monotonic seconds
FIRST_PLACE = 64  # bytes from here on are places: whoever has locked one may compute
LOCK = struct.Struct("hhqqi4x")  # struct flock of Linux on 64-bit machines


class KeyLimits:
    """The limits of all keys, kept in *directory*, which the workers of a service share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def enter(self, key: ApiKey) -> int:
        """Count one request of *key* and return the descriptor that holds its place: close it at its end.

        Raises:
            TooManyAtOnce: as many as it may have are being answered.
            RateLimited: it has asked too often; says when it may ask again.
        """
        held = os.open(self._directory / key.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            if key.concurrency is not None:
                _take_place(held, key.concurrency)
            if key.rate is not None:
                _count(held, key.rate)
        except BaseException:
            os.close(held)
            raise
        return held


def _take_place(descriptor: int, places: int) -> None:
    first = random.randrange(places)  # so that each does not try the taken ones before it
    for place in range(places):
        if _try_lock(descriptor, FIRST_PLACE + (first + place) % places):
            return
    raise TooManyAtOnce(f"this key may have {places} requests at once", retry_after_s=1)


def _try_lock(descriptor: int, start: int) -> bool:
    """Lock one byte for as long as *descriptor* is open: a lock of the open file, not of the process."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _count(descriptor: int, rate: Rate) -> None:
    """Let a request through if it is on time, by the generic cell rate algorithm (ITU-T I.371).

    Requests are due one by one at equal intervals; one that comes early is let through as long as no
    more than the rate's count of them are ahead of their time.
    """
    interval_s = rate.seconds / rate.count
    with _alone(descriptor):
        raw = os.pread(descriptor, ARRIVAL.size, 0)
        now = time.monotonic()
        due = ARRIVAL.unpack(raw)[0] if len(raw) == ARRIVAL.size else 0.0
        if due > now + rate.seconds:  # written before the machine started again, or under another limit
            due = 0.0
        due = max(due, now) + interval_s
        early_s = due - now - rate.seconds
        if early_s > 1e-9:
            message = f"this key may ask {rate.count} times in {rate.seconds} s"
            raise RateLimited(message, retry_after_s=early_s)
        os.pwrite(descriptor, ARRIVAL.pack(due), 0)


@contextmanager
def _alone(descriptor: int) -> Iterator[None]:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
