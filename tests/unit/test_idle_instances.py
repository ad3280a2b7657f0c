"""When a keep-alive may run, and what it says of an instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from server import keepalive
from server.families.base import Instance
from server.keepalive import KeepAlive, is_spare
from server.pool import InstancePool
from tests.unit.test_warmup import Scripted

NOW = 100.0


def worker(pid: int, *, in_flight: int = 0, phase: str = "ready", beat: float = NOW) -> dict[str, Any]:
    return {"pid": pid, "in_flight": in_flight, "pool_size": 1, "phase": phase, "beat": beat}


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], True),
        ([worker(2)], True),
        ([worker(2, in_flight=1)], False),
        ([worker(2, in_flight=1), worker(3)], True),
        ([worker(2, in_flight=1), worker(3, beat=NOW - 5)], False),  # says nothing: it may be stuck
        ([worker(2, phase="warming")], True),  # no other takes requests: this one is alone
        ([worker(2, in_flight=1), worker(3, phase="draining")], False),
    ],
)
def test_a_worker_is_spare_while_another_is_idle(others: list[dict[str, Any]], expected: bool) -> None:
    assert is_spare([worker(1), *others], 1, NOW) is expected


def made(tmp_path: Path, output: object, *, interval_s: float = 60, usual_s: float = 0.1) -> KeepAlive:
    instances = [Instance(torch.nn.Identity(), torch.device("cpu"), 0)]
    pool = InstancePool(instances, version="v1")
    family = Scripted({"one": output})
    turn = tmp_path / "turn"
    return KeepAlive(family, pool, {"text": "one"}, usual_s=usual_s, interval_s=interval_s, turn=turn)


def test_a_good_one_has_no_fault_and_gives_the_instance_back(tmp_path: Path) -> None:
    keep_alive = made(tmp_path, [0.5])
    for _ in range(2):
        kept = keep_alive.run()
        assert kept is not None and kept.fault == ""


def test_a_bad_output_is_a_fault(tmp_path: Path) -> None:
    kept = made(tmp_path, [0.0]).run()
    assert kept is not None and "WarmupFailed" in kept.fault


def test_one_far_slower_than_warm_up_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "SLOW_S", -0.1)
    kept = made(tmp_path, [0.5], usual_s=0.01 / keepalive.SLOW_FACTOR).run()
    assert kept is not None and "the limit is -0.090" in kept.fault


def test_only_one_worker_has_the_turn(tmp_path: Path) -> None:
    with keepalive._turn(tmp_path / "turn") as mine:
        assert mine
        assert made(tmp_path, [0.5]).run() is None
    assert made(tmp_path, [0.5]).run() is not None


def test_a_lent_instance_is_left_alone(tmp_path: Path) -> None:
    keep_alive = made(tmp_path, [0.5])
    with keep_alive._pool.lease(timeout_s=0):
        assert keep_alive.run() is None
        assert not keep_alive.is_due


def test_zero_is_never_due(tmp_path: Path) -> None:
    assert not made(tmp_path, [0.5], interval_s=0).is_due
    assert made(tmp_path, [0.5], interval_s=1e-9).is_due
