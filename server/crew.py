"""The workers of an arbiter: who they are, what the board says of them, and who failed lately.

Keeps records only; `server.arbiter` forks, signals and reaps.
"""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field

from server.board import Record
from server.rollout import Phase, WorkerView

BACKOFF_FIRST_S = 0.5
BACKOFF_LIMIT_S = 30.0
RESTART_REASONS = 16  # a family may name its own; the board and the metrics have room for so many
REASON_CHARS = 40


@dataclass
class Member:
    """One live worker. ``deadline`` is when it is killed unless it is ready (or, draining, gone).

    ``device`` is its uuid; empty for the main processor.
    """

    pid: int
    generation: int
    version: str
    slot_number: int
    slot: Record
    deadline: float
    device: str = ""
    draining: bool = False
    overdue: bool = False
    was_ready: bool = False
    ready_since: float | None = None

    def phase(self) -> Phase:
        """Return what the worker last reported, unless the arbiter told it to leave."""
        reported = self.reported().get("phase")
        if self.draining or reported == Phase.DRAINING.value:  # also one that somebody else sent TERM
            return Phase.DRAINING
        if reported == Phase.DEFUNCT.value:
            return Phase.DEFUNCT
        self.was_ready = self.was_ready or reported == Phase.READY.value
        return Phase.READY if self.was_ready else Phase.WARMING

    def worn(self) -> str:
        """Return why the worker asks to be replaced; empty while it does not."""
        return str(self.reported().get("worn") or "")

    def reported(self) -> dict[str, object]:
        """Return the worker's own record."""
        return self.slot.read() or {}


@dataclass
class Failure:
    """A worker that ended before it was ready, remembered until ``until`` so that retries back off."""

    pid: int
    generation: int
    reason: str
    detail: str
    until: float


@dataclass
class Crew:
    """Live members by pid, failures not yet forgotten, and recent deaths under traffic."""

    members: dict[int, Member] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    deaths: deque[tuple[float, int]] = field(default_factory=deque)  # when, and of which generation
    hold_until: float = 0.0  # no worker is forked before: the machine had no room for one
    restarts: dict[str, int] = field(default_factory=dict)
    _failed_in_a_row: int = 0

    def views(self, *, replace_worn: bool) -> list[WorkerView]:
        """Return the snapshot that `server.rollout.next_action` decides on.

        Without *replace_worn*, what asks to be replaced serves on: there is no room for its successor.
        """
        live = [
            WorkerView(m.pid, m.generation, m.phase(), worn=replace_worn and bool(m.worn()))
            for m in self.members.values()
        ]
        gone = [WorkerView(f.pid, f.generation, Phase.FAILED, f.reason) for f in self.failures]
        return live + gone

    def add_failure(self, pid: int, generation: int, reason: str, detail: str) -> Failure:
        """Remember a failure; the next try waits twice as long as the one before, within limits."""
        wait = min(BACKOFF_LIMIT_S, BACKOFF_FIRST_S * 2**self._failed_in_a_row)
        self._failed_in_a_row += 1
        failure = Failure(pid, generation, reason, detail, time.monotonic() + wait)
        self.failures.append(failure)
        return failure

    def forget_failures(self, now: float) -> None:
        """Drop the failures whose back-off is over."""
        self.failures = [f for f in self.failures if f.until > now]

    def forget_generation(self, generation: int) -> None:
        """Drop every failure of *generation*: it is not wanted any more."""
        self.failures = [f for f in self.failures if f.generation != generation]
        self._failed_in_a_row = 0

    def note_stable(self) -> None:
        """A worker has been ready for a while: the next failure starts its back-off from the beginning."""
        self._failed_in_a_row = 0

    def hold(self, now: float) -> None:
        """Fork nobody for a moment: it just failed for want of room, which is no version's fault."""
        self.hold_until = now + BACKOFF_FIRST_S

    def note_death(self, generation: int, now: float, window_s: float) -> int:
        """Count a worker that died after it was ready; return its generation's deaths within the window."""
        self.deaths.append((now, generation))
        while self.deaths and now - self.deaths[0][0] > window_s:
            self.deaths.popleft()
        return sum(of == generation for _, of in self.deaths)

    def count_restart(self, reason: str) -> None:
        """Count a worker that ended unasked or had to be replaced; reasons beyond a limit are ``other``."""
        word = re.sub(r"\W", "_", reason, flags=re.ASCII)[:REASON_CHARS]
        if word not in self.restarts and len(self.restarts) >= RESTART_REASONS:
            word = "other"
        self.restarts[word] = self.restarts.get(word, 0) + 1

    def of(self, generation: int) -> list[Member]:
        """Return the live members of *generation*."""
        return [m for m in self.members.values() if m.generation == generation]

    def slots(self) -> set[int]:
        """Return the slot numbers in use."""
        return {m.slot_number for m in self.members.values()}

    def ready_count(self, generation: int) -> int:
        """Return how many members of *generation* take requests."""
        return sum(m.phase() is Phase.READY for m in self.of(generation))
