"""The rolling swap as data and one pure function: a snapshot of the workers in, one action out.

First boot, a crashed worker, scaling, a swap and its rollback are snapshots, not code of their own.
Knows nothing of processes, files or time; `server.arbiter` obeys it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What a worker is doing.

    DEFUNCT takes no new work and will not again; FAILED is the record of one that ended before it was ready.
    """

    WARMING = "warming"
    READY = "ready"
    DEFUNCT = "defunct"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True)
class WorkerView:
    """One worker as the arbiter sees it now. One that is *worn* serves until another has taken its place."""

    pid: int
    generation: int
    phase: Phase
    reason: str = ""
    worn: bool = False


@dataclass(frozen=True)
class Spawn:
    """Fork one worker of this generation."""

    generation: int


@dataclass(frozen=True)
class Drain:
    """Tell this worker to take no new work and leave."""

    pid: int


@dataclass(frozen=True)
class Rollback:
    """Set the target back to the generation that still serves."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """Nothing serves, and the target never did."""

    reason: str


Action = Spawn | Drain | Rollback | GiveUp


def next_action(
    workers: Sequence[WorkerView], *, target: int, size: int, surge: int, proven: bool
) -> Action | None:
    """Return the one next step towards *size* READY workers of *target*; None means wait.

    *proven*: the target has served alone before, so a failure now is the worker's, not the version's.

    Same snapshot, same answer. Obeying it never leaves fewer than *size* READY workers by our own doing
    (*size* - 1 when *surge* is 0), nor more than *size* + *surge* in memory.
    """
    fresh = [w for w in workers if w.generation == target and not w.worn]
    others = [w for w in workers if w.generation != target or w.worn]
    leaving = _in(others, Phase.READY)
    way_back = [w for w in leaving if w.generation != target]
    ready = len(_in(workers, Phase.READY))
    alive = sum(w.phase is not Phase.FAILED for w in workers)
    coming = len(_in(fresh, Phase.WARMING)) + len(_in(fresh, Phase.READY))
    failed = _in(fresh, Phase.FAILED)

    # Rolling back needs somewhere to go: once no old worker is READY, only forward is left.
    if failed and way_back and not proven:
        return Rollback(failed[0].reason)
    if failed and not coming and not leaving and not proven:
        return GiveUp(failed[0].reason)
    surplus = _surplus(fresh, others, ready=ready, coming=coming, size=size)
    if surplus is not None:
        return Drain(surplus.pid)
    if coming < size and not failed:  # a failure holds the place until the arbiter forgets it (back-off)
        if alive < size + surge:
            return Spawn(target)
        # No surge: one leaves before one comes, and never while another is on its way.
        if leaving and surge == 0 and alive == ready >= size:
            return Drain(_oldest(leaving).pid)
    return None


def _surplus(
    fresh: Sequence[WorkerView], others: Sequence[WorkerView], *, ready: int, coming: int, size: int
) -> WorkerView | None:
    """Return the worker that can go now without leaving fewer than *size* READY ones, if any."""
    # Those serve nobody: of a version that is no longer wanted, or broken.
    stray = _in(others, Phase.WARMING) + _in([*fresh, *others], Phase.DEFUNCT)
    if stray:
        return _oldest(stray)
    warming = _in(fresh, Phase.WARMING)
    if coming > size and warming:
        return warming[-1]
    if ready > size:
        return _oldest(_in(others, Phase.READY) or _in(fresh, Phase.READY))
    return None


def _in(workers: Sequence[WorkerView], phase: Phase) -> list[WorkerView]:
    return [w for w in workers if w.phase is phase]


def _oldest(workers: Sequence[WorkerView]) -> WorkerView:
    return min(workers, key=lambda w: (w.generation, w.pid))
