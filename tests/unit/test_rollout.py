"""Every row of the swap's table, one snapshot each."""

from __future__ import annotations

import pytest

from server.rollout import Drain, GiveUp, Phase, Rollback, Spawn, WorkerView, next_action

OLD, NEW = 1, 2


def old(pid: int, phase: Phase = Phase.READY) -> WorkerView:
    return WorkerView(pid, OLD, phase)


def warming(pid: int) -> WorkerView:
    return WorkerView(pid, NEW, Phase.WARMING)


def ready(pid: int) -> WorkerView:
    return WorkerView(pid, NEW, Phase.READY)


def draining(pid: int) -> WorkerView:
    return WorkerView(pid, NEW, Phase.DRAINING)


def worn(pid: int) -> WorkerView:
    return WorkerView(pid, NEW, Phase.READY, worn=True)


def defunct(pid: int) -> WorkerView:
    return WorkerView(pid, NEW, Phase.DEFUNCT)


def failed(pid: int) -> WorkerView:
    return WorkerView(pid, NEW, Phase.FAILED, "warmup_failed")


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        # first boot
        ([], Spawn(NEW)),
        ([warming(1)], Spawn(NEW)),
        ([warming(1), warming(2)], None),
        ([ready(1), ready(2)], None),
        ([failed(1), warming(2)], None),
        ([failed(1), failed(2)], GiveUp("warmup_failed")),
        # a swap
        ([old(1), old(2)], Spawn(NEW)),
        ([old(1), old(2), warming(3)], None),
        ([old(1), old(2), ready(3)], Drain(1)),
        ([old(1, Phase.DRAINING), old(2), ready(3)], None),
        ([old(2), ready(3)], Spawn(NEW)),
        ([old(2), ready(3), warming(4)], None),
        ([old(2), ready(3), ready(4)], Drain(2)),
        # a bad version
        ([old(1), old(2), failed(3)], Rollback("warmup_failed")),
        ([old(2), ready(3), failed(4)], Rollback("warmup_failed")),
        # a worker of a generation that is not wanted any more
        ([WorkerView(1, 3, Phase.WARMING), ready(2), ready(3)], Drain(1)),
        # scaling down
        ([ready(1), ready(2), ready(3)], Drain(1)),
        ([ready(1), ready(2), warming(3)], Drain(3)),
        ([ready(1), ready(2), draining(3)], None),
        # an old worker was lost during a swap
        ([old(1), warming(3)], Spawn(NEW)),
        # workers to be replaced: one at a time, and only once another is ready
        ([worn(1), worn(2)], Spawn(NEW)),
        ([worn(1), worn(2), warming(3)], None),
        ([worn(1), worn(2), ready(3)], Drain(1)),
        ([draining(1), worn(2), ready(3)], None),
        ([worn(2), ready(3)], Spawn(NEW)),
        ([worn(2), ready(3), ready(4)], Drain(2)),
        ([old(1), worn(2), ready(3)], Drain(1)),
        # one that failed while a worn one of the same version serves is no reason to give up
        ([worn(1), failed(2)], None),
        # a broken worker leaves at once, and another comes
        ([defunct(1), ready(2)], Drain(1)),
        ([defunct(1), old(2), ready(3)], Drain(1)),
        ([draining(1), ready(2)], Spawn(NEW)),
    ],
)
def test_next_action(workers: list[WorkerView], expected: object) -> None:
    assert next_action(workers, target=NEW, size=2, surge=1, proven=False) == expected


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([old(1), old(2)], Drain(1)),
        ([old(1, Phase.DRAINING), old(2)], None),
        ([old(2)], Spawn(NEW)),
        ([old(2), warming(3)], None),
        ([old(2), ready(3)], Drain(2)),
        ([ready(3)], Spawn(NEW)),
        ([old(2), failed(3)], Rollback("warmup_failed")),
        ([worn(1), ready(2)], Drain(1)),
        ([ready(2)], Spawn(NEW)),
        ([defunct(1), ready(2)], Drain(1)),
    ],
)
def test_next_action_without_surge_drains_one_before_one_comes(
    workers: list[WorkerView], expected: object
) -> None:
    assert next_action(workers, target=NEW, size=2, surge=0, proven=False) == expected


def test_next_action_waits_for_back_off_when_a_proven_generation_fails() -> None:
    assert next_action([failed(1)], target=NEW, size=1, surge=1, proven=True) is None
    assert next_action([ready(2), failed(1)], target=NEW, size=2, surge=1, proven=True) is None
