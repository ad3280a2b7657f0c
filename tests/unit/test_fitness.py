"""The marks a worker makes when it should not go on."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from server.board import Board, Record
from server.device_memory import DeviceMemory
from server.fitness import Fitness
from server.memory import own_memory
from server.placement import Place
from server.warmup import WarmupFailed


@pytest.fixture
def slot(tmp_path: Path) -> Record:
    return Board.create(tmp_path).slots[0]


def made(slot: Record, woken: list[int], *, recycle_after: int = 0, limit: int = 0) -> Fitness:
    return Fitness(
        slot, lambda: woken.append(1), generation=1, recycle_after=recycle_after, memory_limit_bytes=limit,
        device=DeviceMemory(Place(), drift_bytes=1, limit_bytes=1),
    )  # fmt: skip


def read(slot: Record) -> dict[str, object]:
    return slot.read() or {}


def test_limits_of_zero_are_no_limits(slot: Record) -> None:
    woken: list[int] = []
    fitness = made(slot, woken)
    fitness.note_served(10**6)
    fitness.report_memory()
    fitness.accept_memory()
    assert not fitness.worn and not woken
    assert "worn" not in read(slot)


def test_a_worker_wears_out_once_and_the_first_reason_stays(slot: Record) -> None:
    woken: list[int] = []
    fitness = made(slot, woken, recycle_after=3, limit=mmap.PAGESIZE)
    fitness.note_served(2)
    assert not fitness.worn
    fitness.note_served(3)
    fitness.note_served(4)
    fitness.report_memory()
    assert read(slot)["worn"] == "max_requests"
    assert woken == [1]


def test_memory_over_the_limit_wears_out(slot: Record) -> None:
    fitness = made(slot, [], limit=mmap.PAGESIZE)
    fitness.report_memory()
    assert read(slot)["worn"] == "memory_limit"
    assert int(str(read(slot)["unique_bytes"])) > mmap.PAGESIZE


def test_memory_over_the_limit_before_the_first_request_fails_the_warm_up(slot: Record) -> None:
    with pytest.raises(WarmupFailed) as caught:
        made(slot, [], limit=own_memory()["unique_bytes"] // 2).accept_memory()
    assert caught.value.reason == "memory_limit"


def test_a_broken_worker_says_so_whatever_it_was_before(slot: Record) -> None:
    woken: list[int] = []
    fitness = made(slot, woken)
    fitness.wear("max_requests", "x")
    fitness.break_down("instance_stuck", "y")
    assert read(slot)["phase"] == "defunct"
    assert read(slot)["worn"] == "instance_stuck"
    assert woken == [1, 1]
