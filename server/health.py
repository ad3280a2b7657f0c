"""What the workers' own reports add up to, as one word and whether a request would be served now.

Pure: the board's records in, a verdict out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STALE_AFTER_S = 2.0  # workers beat every half second; three missed beats and a worker is not counted


@dataclass(frozen=True)
class Health:
    """``status`` is STARTING, READY, BUSY, DEGRADED, SWAPPING or FAILED; ``reason`` says why not READY."""

    status: str
    ready: bool
    ready_workers: int
    reason: str = ""


def takes_requests(worker: Mapping[str, Any], now: float) -> bool:
    """Tell whether *worker* is ready by its own report, and that report is not old."""
    return worker.get("phase") == "ready" and bool(now - worker.get("beat", 0.0) <= STALE_AFTER_S)


def others(workers: Iterable[Mapping[str, Any]], own_pid: int, now: float) -> list[Mapping[str, Any]]:
    """Return the workers besides *own_pid* that take requests."""
    return [w for w in workers if w.get("pid") != own_pid and takes_requests(w, now)]


def is_idle(worker: Mapping[str, Any]) -> bool:
    """Tell whether *worker* has an instance that nothing is to be computed on."""
    return bool(worker.get("in_flight", 0) < worker.get("pool_size", 1))


def judge(
    arbiter: Mapping[str, Any], workers: Iterable[Mapping[str, Any]], *, now: float, min_ready: int
) -> Health:
    """Return the verdict over one snapshot of the board.

    *now* is the monotonic clock in seconds, which all processes of a machine share.
    """
    workers = list(workers)
    fresh = [w for w in workers if takes_requests(w, now)]
    size = int(arbiter.get("size", 0))
    count = len(fresh)
    if arbiter.get("failure"):
        return Health("FAILED", False, count, str(arbiter["failure"]))
    if count < max(1, min_ready):
        began = bool(arbiter.get("started"))
        reason = f"{count} of {max(1, min_ready)} needed workers are ready"
        return Health(
            "FAILED" if began and not count else "STARTING" if not began else "DEGRADED", False, count, reason
        )
    if arbiter.get("swapping"):
        return Health("SWAPPING", True, count, f"moving to {arbiter.get('target')}")
    if count < size:
        return Health("DEGRADED", True, count, f"{count} of {size} workers are ready")
    if arbiter.get("degraded"):
        return Health("DEGRADED", True, count, str(arbiter["degraded"]))
    if not any(is_idle(worker) for worker in fresh):
        return Health("BUSY", True, count, "every instance is busy")
    return Health("READY", True, count)
