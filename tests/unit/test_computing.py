"""The computing thread by itself: places, cancelling, and every way to end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from server.api.computing import Computing, run_leased
from server.api.exchange import Exchange, Served
from server.api.record import Record
from server.errors import (
    DeadlineExceeded,
    DeviceFailed,
    DeviceOutOfMemory,
    Draining,
    InstanceFailed,
    Overloaded,
)
from tests.unit.served import app_for_tone


class Place:
    """Stands in for the worker: whether the request's place was kept, and given back."""

    def __init__(self) -> None:
        self.kept, self.freed = threading.Event(), threading.Event()
        self.exchange = Exchange(keep_place=self.kept.set, free_place=self.freed.set)


@pytest.fixture
def served() -> Served:
    found: Served = app_for_tone().config["SERVED"]
    return found


@pytest.fixture
def blocked(served: Served) -> Iterator[Callable[[], None]]:
    """Keep the only computing thread and instance busy until the returned function is called."""
    hold, busy = threading.Event(), threading.Event()

    def run(_instance: Any) -> Iterator[int]:
        busy.set()
        yield int(hold.wait(20))

    computing = Computing(served, Exchange(), Record(), 30, run).start()
    assert busy.wait(10)
    yield hold.set
    hold.set()
    assert computing.ended.wait(10)


def test_run_leased_returns_what_was_computed_and_gives_the_place_back(served: Served) -> None:
    place, record = Place(), Record()
    assert run_leased(served, place.exchange, record, 5, lambda instance: instance.number) == 0
    assert place.kept.is_set()
    assert place.freed.is_set()
    assert {"queue_ms", "inference_ms"} <= record.fields.keys()


def test_a_request_that_got_no_instance_in_time_was_refused_not_slow(
    served: Served, blocked: Callable[[], None]
) -> None:
    place = Place()
    with pytest.raises(Overloaded):
        run_leased(served, place.exchange, Record(), 0.05, lambda _: None)
    assert place.freed.is_set(), "nothing computes for it, so its place is free at once"


def test_a_stuck_instance_keeps_the_place_until_it_is_back(served: Served) -> None:
    hold, place = threading.Event(), Place()
    with pytest.raises(DeadlineExceeded):
        run_leased(served, place.exchange, Record(), 0.05, lambda _: hold.wait(20))
    assert not place.freed.is_set()
    hold.set()
    assert place.freed.wait(10)
    assert served.pool.lent == 0


def test_a_family_that_exits_never_passes_for_a_whole_answer(served: Served) -> None:
    def run(_instance: Any) -> Iterator[int]:
        yield 1
        raise SystemExit

    pieces = Computing(served, Exchange(), Record(), 5, run).start().pieces()
    assert next(pieces) == 1
    with pytest.raises(InstanceFailed):
        next(pieces)
    assert served.pool.lent == 0


def test_a_closed_pool_is_draining(served: Served) -> None:
    served.pool.drain(timeout_s=0)
    with pytest.raises(Draining):
        run_leased(served, Exchange(), Record(), 5, lambda _: None)


def test_what_was_cancelled_in_the_queue_is_never_computed(
    served: Served, blocked: Callable[[], None]
) -> None:
    ran: list[Any] = []
    place = Place()
    Computing(
        served, place.exchange, Record(), 5, lambda instance: ran.append(instance) or ()
    ).start().cancel()
    assert place.freed.is_set()
    blocked()
    run_leased(served, Exchange(), Record(), 5, lambda _: None)
    assert ran == []


class Full:
    """Finds the device's memory full *times* times, after *pieces* pieces each."""

    def __init__(self, times: int, pieces: int = 0) -> None:
        self.left, self.pieces, self.runs = times, pieces, 0

    def __call__(self, _instance: Any) -> Iterator[int]:
        self.runs += 1
        yield from range(self.pieces)
        if self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        yield 7


def test_a_request_that_found_the_device_full_runs_once_more(served: Served) -> None:
    full, record = Full(1), Record()
    assert list(Computing(served, Exchange(), record, 5, full).start().pieces()) == [7]
    assert full.runs == 2 and record.fields["retried"] is True


def test_a_request_that_finds_the_device_full_again_is_refused_alone(served: Served) -> None:
    full = Full(3)
    with pytest.raises(DeviceOutOfMemory) as caught:
        list(Computing(served, Exchange(), Record(), 5, full).start().pieces())
    assert full.runs == 2 and caught.value.retry_after_s
    assert run_leased(served, Exchange(), Record(), 5, lambda _: 1) == 1


def test_what_has_been_sent_is_not_computed_again(served: Served) -> None:
    full = Full(1, pieces=2)
    pieces = Computing(served, Exchange(), Record(), 5, full).start().pieces()
    assert [next(pieces), next(pieces)] == [0, 1]
    with pytest.raises(DeviceOutOfMemory):
        next(pieces)
    assert full.runs == 1


def test_nothing_is_computed_on_a_device_that_broke(served: Served) -> None:
    told: list[str] = []
    object.__setattr__(served, "device_broke", told.append)

    def run(_instance: Any) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    with pytest.raises(DeviceFailed):
        run_leased(served, Exchange(), Record(), 5, run)
    assert told == ["AcceleratorError: CUDA error: device-side assert triggered"]
    with pytest.raises(Draining):
        run_leased(served, Exchange(), Record(), 5, lambda _: 1)
