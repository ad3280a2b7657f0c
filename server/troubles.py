"""What an operator should look at, from one snapshot of the service, the worst first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from server.health import STALE_AFTER_S

FINE = ("READY", "BUSY")
# Phases in the order an operator looks for them: what is wrong, what moves, what works.
ORDER = ("defunct", "warming", "draining", "ready")


def troubles(status: Mapping[str, Any]) -> list[str]:
    """Return one line for each thing that is not as it should be; none when all is well."""
    return [*_of_the_service(status), *(line for worker in status["workers"] for line in _of_worker(worker))]


def by_urgency(worker: Mapping[str, Any]) -> tuple[bool, int, int]:
    """Return a sort key for workers: those with troubles first, then by phase, then by slot."""
    phase = worker.get("phase")
    return (
        not any(_of_worker(worker)),
        ORDER.index(phase) if phase in ORDER else 0,
        int(worker.get("slot", 0)),
    )


def _of_the_service(status: Mapping[str, Any]) -> Iterator[str]:
    if status["status"] not in FINE and status["reason"]:
        yield f"{status['status']}: {status['reason']}"
    last = status.get("last_swap") or {}
    if last.get("result") not in (None, "done"):
        why = ": ".join(str(last[key]) for key in ("reason", "detail") if last.get(key))
        yield f"the last swap, to {last.get('to')}, was {last['result'].replace('_', ' ')} ({why})"
    if restarts := status.get("restarts"):
        counted = ", ".join(f"{count} x {reason}" for reason, count in restarts.items())
        yield f"workers replaced since the start: {counted}"


def _of_worker(worker: Mapping[str, Any]) -> Iterator[str]:
    who = f"worker {worker.get('pid')}"
    if worker.get("beat_age_s", 0.0) > STALE_AFTER_S:
        yield f"{who} has not been heard of for {worker['beat_age_s']:.0f} s"
    if worker.get("worn"):
        yield f"{who} is to be replaced: {worker['worn']} ({worker.get('detail')})"
    if private := worker.get("weights_private_bytes"):
        yield f"{who} holds {private / 1e6:.0f} MB of weights outside the shared mapping"
