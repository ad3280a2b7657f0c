"""The fixed set of instances in one worker: lend one at a time to each caller, first come first served.

Standard library only; knows nothing of models or requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class PoolTimeout(Exception):
    """Every instance stayed busy for ``timeout_s`` seconds."""

    def __init__(self, version: str, timeout_s: float) -> None:
        super().__init__(f"no instance of {version} became free within {timeout_s:g} s")
        self.version, self.timeout_s = version, timeout_s


class PoolClosed(Exception):
    """This version is draining and takes no new work."""

    def __init__(self, version: str) -> None:
        super().__init__(f"{version} is draining")
        self.version = version


class InstancePool(Generic[T]):
    """Instances of one version. ``size`` is fixed; what is not idle is lent."""

    def __init__(self, instances: Sequence[T], *, version: str) -> None:
        self.version = version
        self.size = len(instances)
        now = time.monotonic()
        self._idle = [(instance, now) for instance in instances]  # since when; the last used is last
        self._lent: dict[int, float] = {}  # when each was lent, by a number of its own
        self._waiting: deque[object] = deque()  # tickets in order of arrival
        self._alone = False  # what is lent is lent alone
        self._draining = False
        self._changed = threading.Condition()

    @property
    def lent(self) -> int:
        """How many instances are in use now."""
        with self._changed:
            return self.size - len(self._idle)

    @property
    def longest_lent_s(self) -> float:
        """For how long the instance that has been out longest has been so; 0 while all are idle."""
        with self._changed:
            return time.monotonic() - min(self._lent.values()) if self._lent else 0.0

    @property
    def longest_idle_s(self) -> float:
        """For how long the instance that was used least lately has been idle; 0 while none is."""
        with self._changed:
            return time.monotonic() - self._idle[0][1] if self._idle else 0.0

    @contextmanager
    def lease(self, *, timeout_s: float) -> Iterator[T]:
        """Lend one instance; it comes back however the block ends.

        Raises:
            PoolClosed: this version is draining and takes no new work.
            PoolTimeout: every instance stayed busy for *timeout_s* seconds.
        """
        with self._lend(self._take(timeout_s)) as instance:
            yield instance

    @contextmanager
    def lease_alone(self, *, timeout_s: float) -> Iterator[T]:
        """Lend one instance while no other is lent; it is not for a caller that holds one already.

        Raises: as `lease`.
        """
        with self._lend(self._take(timeout_s, alone=True)) as instance:
            yield instance

    @contextmanager
    def lease_idlest(self) -> Iterator[T | None]:
        """Lend the instance that was used least lately; None, at once, while a request could want it."""
        with self._changed:
            free = self._idle and not (self._waiting or self._alone or self._draining)
            taken = self._idle.pop(0)[0] if free else None
        if taken is None:
            yield None
        else:
            with self._lend(taken):
                yield taken

    @contextmanager
    def _lend(self, instance: T) -> Iterator[T]:
        with self._changed:
            self._lent[id(instance)] = time.monotonic()
        try:
            yield instance  # without the lock: the others lease while this one computes
        finally:
            with self._changed:
                del self._lent[id(instance)]
                self._alone = False
                self._idle.append((instance, time.monotonic()))
                self._changed.notify_all()

    def _take(self, timeout_s: float, *, alone: bool = False) -> T:
        ticket = object()
        needed = self.size if alone else 1

        def is_next() -> bool:
            return self._waiting[0] is ticket and len(self._idle) >= needed and not self._alone

        with self._changed:
            self._waiting.append(ticket)
            try:
                first = self._changed.wait_for(lambda: self._draining or is_next(), timeout_s)
                if self._draining:
                    raise PoolClosed(self.version)
                if not first:
                    raise PoolTimeout(self.version, timeout_s)
                self._alone = alone
                return self._idle.pop()[0]
            finally:
                # Also for one that gave up: those behind it move up.
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def close(self) -> None:
        """Lend no more, also to those that wait already."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    def drain(self, *, timeout_s: float) -> bool:
        """Lend no more and wait for what is lent; tell whether all came back within *timeout_s*."""
        deadline = time.monotonic() + timeout_s
        self.close()
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._idle) == self.size, max(0.0, deadline - time.monotonic())
            )
