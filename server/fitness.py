"""Whether a worker should go on: its limits, and the marks it makes on the board once it should not.

A worn worker serves until another has taken its place; a defunct one takes nothing new and leaves. What
follows from the marks is `server.rollout`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from server import events
from server.board import Record
from server.device_memory import DeviceMemory
from server.events import emit
from server.memory import own_memory
from server.rollout import Phase
from server.warmup import WarmupFailed

LOG = logging.getLogger("warmserve")

# After its deadline a request is given up at its next piece; an instance that is not back by then is stuck.
STUCK_GRACE_S = 5.0


class Fitness:
    """The marks of one worker. *wake* makes the arbiter look at the board now.

    *recycle_after* is a number of requests, *memory_limit_bytes* of memory of its own; 0 is no limit.
    """

    def __init__(
        self, slot: Record, wake: Callable[[], None], *, generation: int, recycle_after: int,
        memory_limit_bytes: int, device: DeviceMemory,
    ) -> None:  # fmt: skip
        self._slot, self._wake, self._generation = slot, wake, generation
        self._recycle_after, self._memory_limit_bytes = recycle_after, memory_limit_bytes
        self._device = device
        self.worn = ""

    def wear(self, reason: str, detail: str) -> None:
        """Ask to be replaced, once. *reason* is a word, the metric's label."""
        if not self.worn:
            self._mark(events.WORKER_WORN, logging.WARNING, reason, detail)

    def break_down(self, reason: str, detail: str) -> None:
        """Say that nothing more can be computed here."""
        self._mark(events.WORKER_DEFUNCT, logging.ERROR, reason, detail, phase=Phase.DEFUNCT.value)

    def note_served(self, count: int) -> None:
        """Wear out once *count* requests reach the limit."""
        if self._recycle_after and count >= self._recycle_after:
            self.wear("max_requests", f"{count} requests served")

    def report_memory(self) -> None:
        """Put this process's memory on the board; wear out once it is over a limit."""
        reason, excess = self._measured_excess()
        if excess:
            self.wear(reason, excess)
        if grown := self._device.drift():
            emit(LOG, logging.WARNING, events.DEVICE_MEMORY_DRIFTED, generation=self._generation,
                 detail=grown)  # fmt: skip

    def accept_memory(self) -> None:
        """Take the memory after warm-up for what this worker needs.

        Raises:
            WarmupFailed: it is over a limit before the first request.
        """
        reason, excess = self._measured_excess()
        if excess:
            raise WarmupFailed(reason, excess)
        self._device.note_warm()

    def _measured_excess(self) -> tuple[str, str]:
        sizes = own_memory()
        self._slot.update(**sizes, **self._device.measure())
        own, limit = sizes["unique_bytes"], self._memory_limit_bytes
        if limit and own > limit:
            return "memory_limit", f"{own} bytes of its own, the limit is {limit}"
        return "device_memory_limit", self._device.excess()

    def _mark(self, event: str, level: int, reason: str, detail: str, **fields: str) -> None:
        self.worn = reason
        self._slot.update(worn=reason, detail=detail, **fields)
        emit(LOG, level, event, generation=self._generation, reason=reason, detail=detail)
        self._wake()
