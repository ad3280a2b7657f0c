"""The board as one JSON object for people and probes: the verdict first, ages in place of clock readings."""

from __future__ import annotations

import time
from typing import Any

from server.board import Board
from server.health import judge

AGES = {"beat": "beat_age_s", "born": "age_s", "ready_at": "ready_age_s"}


def snapshot(board: Board, min_ready: int) -> dict[str, Any]:
    """Return the state of the service and of each worker now."""
    now = time.monotonic()
    arbiter = board.arbiter.read() or {}
    slots = board.workers()
    verdict = judge(arbiter, slots.values(), now=now, min_ready=min_ready)
    rows = [{"slot": number, **_with_ages(slot, now)} for number, slot in slots.items()]
    return {
        "status": verdict.status,
        "ready": verdict.ready,
        "reason": verdict.reason,
        **arbiter,
        "workers": rows,
    }


def _with_ages(slot: dict[str, Any], now: float) -> dict[str, Any]:
    row = {key: value for key, value in slot.items() if key not in AGES}
    return row | {age: round(now - slot[clock], 3) for clock, age in AGES.items() if clock in slot}
