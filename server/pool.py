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
        self._idle = list(instances)
        self._waiting: deque[object] = deque()  # tickets in order of arrival
        self._draining = False
        self._changed = threading.Condition()

    @property
    def lent(self) -> int:
        """How many instances are in use now."""
        with self._changed:
            return self.size - len(self._idle)

    @contextmanager
    def lease(self, *, timeout_s: float) -> Iterator[T]:
        """Lend one instance; it comes back however the block ends.

        Raises:
            PoolClosed: this version is draining and takes no new work.
            PoolTimeout: every instance stayed busy for *timeout_s* seconds.
        """
        instance = self._take(timeout_s)
        try:
            yield instance  # without the lock: the others lease while this one computes
        finally:
            with self._changed:
                self._idle.append(instance)
                self._changed.notify_all()

    def _take(self, timeout_s: float) -> T:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                first = self._changed.wait_for(
                    lambda: self._draining or (self._idle and self._waiting[0] is ticket), timeout_s
                )
                if self._draining:
                    raise PoolClosed(self.version)
                if not first:
                    raise PoolTimeout(self.version, timeout_s)
                return self._idle.pop()
            finally:
                # Also for one that gave up: those behind it move up.
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def drain(self, *, timeout_s: float) -> bool:
        """Lend no more and wait for what is lent; tell whether all came back within *timeout_s*."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: len(self._idle) == self.size, max(0.0, deadline - time.monotonic())
            )
