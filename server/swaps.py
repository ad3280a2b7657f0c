"""One swap after the other: which version, is it good, which generation is the target, how did it end.

Owns the mapped generations and the way back; knows nothing of workers' processes. `server.arbiter` calls
it from its loop and tells it what the workers have reached.
"""

from __future__ import annotations

import functools
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server import events
from server.events import emit
from server.generation import Generation, MemoryUse, MemoryWouldNotFit, check_version
from server.preparation import Preparation, Refusal
from server.quarantine import Quarantine
from weights.store import Store, Version

LOG = logging.getLogger("warmserve")


class GaveUp(Exception):
    """Nothing can be served: no version is left that was not refused."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.reason}: {refusal.detail}")
        self.refusal = refusal


@dataclass
class Swap:
    """A swap under way. ``way_back`` 0 is the first boot; ``refusal`` set means it is going back.

    ``blamed`` is the version that is left because of the refusal, where it is not ``version`` itself.
    """

    way_back: int
    started: float
    covers: int  # the HUPs answered by this swap
    version: Version | None = None
    refusal: Refusal | None = None
    blamed: Version | None = None

    @property
    def about(self) -> str | None:
        """The version this swap is remembered for."""
        version = self.blamed or self.version
        return version.name if version else None


class Swaps:
    """The generations of one arbiter and the swap between two of them."""

    def __init__(self, store: Store, quarantine: Quarantine) -> None:
        self.store = store
        self.quarantine = quarantine
        self.generations: dict[int, Generation] = {}
        self.target = 0  # the generation served or moved to; 0 while nothing is prepared
        self.proven = False  # the target has served alone: a failure now is the worker's, not the version's
        self.swap: Swap | None = None
        self.preparation: Preparation | None = None
        self.serving: Version | None = None  # what the last finished swap reached
        self.previous: Version | None = None  # what was served before that
        self.last: dict[str, Any] | None = None
        self.ended: dict[str, tuple[int, float]] = {}  # by result: how many swaps, and their seconds
        self.degraded: str | None = None
        self.requests = 0  # HUPs so far
        self._wanted = True  # the first boot is a swap from nothing
        self._newest = 0
        self._refused_at_boot: dict[int, Refusal] = {}

    # ---- from start to end ----------------------------------------------------------------------

    def request(self) -> None:
        """Ask for a swap to the current version; during one, for one more after it."""
        self.requests += 1
        self._wanted = True

    def refuse_request(self, refusal: Refusal) -> None:
        """End a request that cannot even begin: nothing changed."""
        self.requests += 1
        self._note_end(Swap(self.target, time.monotonic(), self.requests, refusal=refusal), "refused")

    def begin(self, *, measure: Callable[[], MemoryUse], timeout_s: float, objection: Refusal | None) -> None:
        """Start the swap that was asked for, unless one is under way: choose and check a version.

        Raises:
            GaveUp: at the first boot, when there is nothing to serve.
        """
        if self._wanted and self.swap is not None and self._may_be_left(self.swap):
            self._finish(self.swap)
        if not self._wanted or self.swap is not None:
            return
        self._wanted = False
        swap = Swap(self.target, time.monotonic(), self.requests)
        try:
            swap.version = self._choose()
            known = self.quarantine.refusal_of(swap.version) if self.target else None
        except Exception as error:
            self._refuse(swap, Refusal.of(error, "no_version"))
            return
        if known is not None:
            why = f"{swap.version.name} failed before ({known.reason}: {known.detail})"
            objection = Refusal("quarantined", why)
        if self.target and objection is not None:
            self._refuse(swap, objection)
            return
        self._check(swap, measure, timeout_s)

    def _may_be_left(self, swap: Swap) -> bool:
        """Whether a new swap may begin before this one has reached all its workers.

        One that goes back, or a first boot that serves with fewer workers than wanted, may never reach them.
        """
        return self.preparation is None and (swap.refusal is not None or (not swap.way_back and self.proven))

    def retreat(self, refusal: Refusal, *, measure: Callable[[], MemoryUse], timeout_s: float) -> bool:
        """Go back to the previous version: the current one keeps dying under traffic.

        Returns False when there is no previous version that could do better.
        """
        current, previous = self.generations.get(self.target), self.previous
        if self.swap is not None or current is None or previous is None or previous == current.version:
            return False
        if self.quarantine.refusal_of(previous) is not None:
            return False  # it was left for the same reason: going to and fro helps nobody
        self.quarantine.add(current.version, refusal)
        emit(LOG, logging.ERROR, events.SWAP_ROLLED_BACK, version=current.version.name, current=previous.name,
             **refusal.__dict__)  # fmt: skip
        swap = Swap(self.target, time.monotonic(), self.requests, previous, refusal, current.version)
        self._check(swap, measure, timeout_s)
        return True

    def _check(self, swap: Swap, measure: Callable[[], MemoryUse], timeout_s: float) -> None:
        assert swap.version is not None
        emit(
            LOG,
            logging.INFO,
            events.SWAP_STARTED,
            version=swap.version.name,
            current=self.name_of(swap.way_back),
        )
        # A family that takes its process down must not take the one that serves; at boot nobody serves yet.
        check = functools.partial(check_version, swap.version, measure(), try_family=bool(swap.way_back))
        try:
            self.preparation = Preparation(swap.version.name, check, timeout_s=timeout_s)
        except OSError as error:  # no process or no pipe to be had, which is no version's fault
            if self.target:
                self._refuse(swap, Refusal("fork_failed", str(error)))
            else:
                self._wanted = True  # nobody is served worse by trying again at the next turn
                emit(LOG, logging.ERROR, events.SWAP_REFUSED, version=swap.version.name, reason="fork_failed",
                     detail=str(error))  # fmt: skip
            return
        self.swap = swap

    def checked(self, status: int) -> None:
        """The checking child ended with *status*: map the version and make it the target, or go back.

        Raises:
            GaveUp: as `abandon`.
        """
        preparation, swap = self.preparation, self.swap
        assert preparation is not None and swap is not None and swap.version is not None
        self.preparation = None
        refusal = preparation.outcome(status)
        if refusal is not None:
            self.abandon(refusal)
            return
        try:
            generation = Generation.load(self._newest + 1, swap.version)
        except Exception as error:
            self.abandon(Refusal.of(error, "load_failed"))
            return
        gc.collect(1)
        gc.freeze()  # what exists now is never written by a collection in a fork: it stays shared
        self._newest = generation.number
        self.generations[generation.number] = generation
        self.target, self.proven = generation.number, False
        emit(
            LOG, logging.INFO, events.VERSION_PREPARED, version=swap.version.name,
            generation=generation.number, mapped_bytes=generation.mapped.mapped_bytes,
            prepare_ms=(time.monotonic() - swap.started) * 1000,
        )  # fmt: skip

    def abandon(self, refusal: Refusal) -> None:
        """Leave the version of the running swap: back to the generation that serves, or an older version.

        Raises:
            GaveUp: nothing serves and no older version is left.
        """
        swap = self.swap
        assert swap is not None and swap.version is not None
        emit(LOG, logging.ERROR, events.VERSION_REFUSED, version=swap.version.name, **refusal.__dict__)
        self.quarantine.add(swap.version, refusal)
        if swap.way_back:
            swap.refusal, swap.blamed = refusal, swap.version
            self.target, self.proven = swap.way_back, True
            emit(
                LOG,
                logging.ERROR,
                events.SWAP_ROLLED_BACK,
                version=swap.version.name,
                current=self.name_of(self.target),
            )
            return
        self._refused_at_boot[swap.version.number] = refusal
        self.target, self.swap, self._wanted = 0, None, True
        if self._candidate_at_boot() is None:
            raise GaveUp(refusal)

    def settle(self, *, ready: int, size: int, alive: set[int]) -> None:
        """Note what the workers have reached.

        *ready*: ready workers of the target; *alive*: generations that still have a process.
        """
        swap = self.swap
        if ready and swap is not None and not swap.way_back:
            self.proven = True  # at the first boot there is no other generation to fall back on
        if swap is not None and self.preparation is None and ready >= size and alive == {self.target}:
            self._finish(swap)
        way_back = {self.swap.way_back} if self.swap is not None else set()
        for number in self.generations.keys() - alive - way_back - {self.target}:
            self._release(number)

    def _finish(self, swap: Swap) -> None:
        self.swap, self.proven = None, True
        reached = self.generations[self.target].version
        if self.serving is not None and self.serving != reached:
            self.previous = self.serving
        self.serving = reached
        self.degraded = self._why_degraded(reached)
        self._refused_at_boot = {}
        self._note_end(swap, "done" if swap.refusal is None else "rolled_back")

    def _why_degraded(self, reached: Version) -> str | None:
        if not self._refused_at_boot:
            return None
        newest = max(self._refused_at_boot)
        why = self._refused_at_boot[newest]
        return f"v{newest} could not be served ({why.reason}: {why.detail}); serving {reached.name}"

    def _refuse(self, swap: Swap, refusal: Refusal) -> None:
        swap.refusal = refusal
        emit(LOG, logging.ERROR, events.SWAP_REFUSED, version=swap.version.name if swap.version else None,
             **refusal.__dict__)  # fmt: skip
        if not self.target:
            raise GaveUp(refusal)
        self._note_end(swap, "refused")

    def _note_end(self, swap: Swap, result: str) -> None:
        seconds = time.monotonic() - swap.started
        count, total = self.ended.get(result, (0, 0.0))
        self.ended[result] = (count + 1, round(total + seconds, 6))
        self.last = {
            "to": swap.about,
            "serving": self.name_of(self.target),
            "result": result,
            "reason": swap.refusal.reason if swap.refusal else None,
            "detail": swap.refusal.detail if swap.refusal else None,
            "seconds": round(seconds, 3),
            "covers": swap.covers,
        }
        level = logging.INFO if result == "done" else logging.ERROR
        emit(LOG, level, events.SWAP_FINISHED, **{k: v for k, v in self.last.items() if k != "covers"})

    # ---- versions -------------------------------------------------------------------------------

    def _choose(self) -> Version:
        """Return the version to move to: the current one; at boot, if that one is no good, an older one.

        Raises:
            WeightsError: there is none, or the pinned one is not there.
        """
        current = self.store.current()
        if self.target:
            return current
        known = self._known_at_boot(current)
        if known is None:
            return current
        self._refused_at_boot.setdefault(current.number, known)
        candidate = self._candidate_at_boot()
        if candidate is None:  # the only one there is: try it all the same
            self._refused_at_boot.pop(current.number)
            return current
        return candidate

    def _candidate_at_boot(self) -> Version | None:
        """Return the newest version not refused at this boot: of those not quarantined, if there are any."""
        left = [v for v in self.store.versions() if v.number not in self._refused_at_boot]
        limit = max(self._refused_at_boot, default=0)
        current = self.store.current()
        older = [v for v in left if v.number < limit or v == current]
        good = [v for v in older if self._known_at_boot(v) is None]
        return max(good or older, key=lambda v: v.number, default=None)

    def _known_at_boot(self, version: Version) -> Refusal | None:
        known = self._refused_at_boot.get(version.number) or self.quarantine.refusal_of(version)
        # Two versions did not fit together; at boot there is one.
        return None if known is not None and known.reason == MemoryWouldNotFit.reason else known

    def name_of(self, number: int) -> str | None:
        """Return the version that generation *number* serves."""
        generation = self.generations.get(number)
        return generation.version.name if generation else None

    def _release(self, number: int) -> None:
        generation = self.generations.pop(number)
        generation.close()
        emit(
            LOG, logging.INFO, events.GENERATION_RELEASED, generation=number, version=generation.version.name
        )

    def facts(self) -> dict[str, Any]:
        """Return what the board says about versions and swaps."""
        swap = self.swap
        current = self.name_of(swap.way_back if swap and swap.way_back else self.target)
        return {
            "generation": self.target,
            "current": current,
            "target": swap.version.name if swap and swap.version and not swap.refusal else current,
            "previous": self.previous.name if self.previous else None,
            "swapping": swap is not None and bool(swap.way_back),
            "requests": self.requests,
            "last_swap": self.last,
            "swaps": self.ended,
            "mapped": {g.version.name: g.mapped.mapped_bytes for g in self.generations.values()},
            "degraded": self.degraded,
        }
