"""The accept queue of the data addresses as one worker sees it: whose turn it is, what a busy worker does.

The queue is the kernel's and shared by all workers. Runs in the event loop's thread only.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from server import events
from server.board import Board, Record
from server.events import emit
from server.health import is_idle, others
from server.intake import Intake
from server.listeners import queued

LOG = logging.getLogger("warmserve")
LOG_S = 1.0  # of refusals, one line in so many seconds


class DataQueue:
    """The queues of *listeners*, those of the first address first. *refused* is told how many got 503."""

    def __init__(
        self, listeners: Sequence[Any], intake: Intake, *, board: Board, slot: Record,
        refused: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._listeners, self._intake, self._board, self._slot = listeners, intake, board, slot
        self._refused = refused
        self._logged, self._log_at = 0, 0.0

    @property
    def length(self) -> int:
        """How many connections wait to be accepted."""
        return sum(queued(listener) for listener in self._listeners)

    def first(self, listener: Any) -> Any:
        """Return the address to take from when *listener* has something: an earlier one goes first."""
        before = self._listeners[: self._listeners.index(listener)]
        return next((other for other in before if queued(other)), listener)

    def gather(self) -> None:
        """Take connections into the next pass, unless a worker is idle, which would compute them sooner."""
        if self.length:
            rivals = others(self._board.workers().values(), os.getpid(), time.monotonic())
            if not any(is_idle(worker) for worker in rivals):
                self._intake.gather(self._listeners)

    def shed(self) -> None:
        """Refuse what is beyond the queue's limit."""
        if count := self._intake.shed(self._listeners):
            self._refused(count)
        now, total = time.monotonic(), self._intake.refused
        if total > self._logged and now >= self._log_at + LOG_S:
            count = total - self._logged
            emit(LOG, logging.WARNING, events.REQUEST_REFUSED, count=count, code="overloaded")
            self._logged, self._log_at = total, now
            self._slot.update(shed=total)
