"""Requests that share a pass: who with whom, whose answer is whose, and who fails when the pass does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.batching import Batcher, batch_limit, create_inference
from server.api.exchange import Exchange, Served
from server.api.record import Record
from server.errors import DeadlineExceeded, DeviceFailed, Draining, InstanceFailed, InvalidField, Overloaded
from server.families.base import InputError, Instance, TensorSpec, Value
from server.families.batching import BatchingFamily, Prepared
from server.pool import InstancePool
from server.settings import Settings
from tests.apps.affine.affine import Affine

NEGATIVE = -1.0
BROKEN = -2.0
SLOW = 0.5
EXIT = -3.0
FOREVER_S = 20


class Doubler(BatchingFamily):
    """Doubles a number; refuses some, fails on others, and keeps account of its passes."""

    name = "doubler"
    inputs = (TensorSpec("x", "FP32", (1,)),)
    outputs = (TensorSpec("y", "FP32", (1,)),)

    def __init__(self) -> None:
        super().__init__(Path(), {})
        self.passes: list[list[float]] = []
        self.hold, self.held = threading.Event(), threading.Event()
        self.go, self.stuck = threading.Event(), threading.Event()

    def build(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def warmup_inputs(self) -> tuple[Mapping[str, Any], ...]:
        return ({},)

    def rehearse(self, instance: Instance, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        return {"y": torch.ones(1)}

    def prepare(self, inputs: Mapping[str, Value], parameters: Mapping[str, Any]) -> Prepared:
        number = float(inputs["x"].item())
        if number > 1e6:
            raise InputError("x", "at most 1e6")
        return Prepared(parameters.get("kind"), number)

    def infer_batch(self, instance: Instance, contents: Sequence[float]) -> Sequence[Mapping[str, Value]]:
        self.passes.append(list(contents))
        if contents == [0.0]:  # keeps the instance until it is told to go on
            self.held.set()
            assert self.hold.wait(FOREVER_S)
        if SLOW in contents:
            self.stuck.set()
            assert self.go.wait(FOREVER_S)
        if BROKEN in contents:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        if EXIT in contents:
            raise SystemExit
        if any(number == NEGATIVE for number in contents):
            raise RuntimeError("asked to fail")
        instance.checkpoint()
        return [{"y": torch.tensor([2 * number])} for number in contents]


class Line:
    """A served doubler with one instance, and clients of it in threads of their own."""

    def __init__(self, limit: int = 4, delay_s: float = 0.0, instances: int = 1) -> None:
        self.family = Doubler()
        made = [Instance(torch.nn.Identity(), torch.device("cpu"), n) for n in range(instances)]
        pool = InstancePool(made, version="v1")
        self.served = Served("doubler", "v1", self.family, pool, 1)
        self.batcher = Batcher(self.served, self.family, limit, delay_s)
        self.clients = ThreadPoolExecutor(32)
        self.arrived = 0

    def ask(
        self, number: float, kind: str | None = None, *, timeout_s: float = FOREVER_S, priority: int = 0,
        **exchange: Any,
    ) -> tuple[Record, Future[Any]]:  # fmt: skip
        """Send one request, and return once it stands in the line."""
        record, inside = Record(priority=priority), threading.Event()
        exchange.setdefault("keep_place", lambda: None)
        keep = exchange.pop("keep_place")

        def kept() -> None:
            inside.set()
            keep()

        future = self.clients.submit(
            self.batcher.infer, Exchange(keep_place=kept, **exchange), record, timeout_s,
            {"x": torch.tensor([number])}, {"kind": kind} if kind else {},
        )  # fmt: skip
        assert inside.wait(FOREVER_S) or future.done()
        return record, future

    def block(self) -> Callable[[], None]:
        """Keep the instance busy until the returned function is called."""
        _, future = self.ask(0.0)
        assert self.family.held.wait(FOREVER_S)

        def release() -> None:
            self.family.hold.set()
            assert future.result(FOREVER_S)["y"].tolist() == [0.0]

        return release

    def close(self) -> None:
        self.family.hold.set()
        self.clients.shutdown()
        self.served.threads.shutdown()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


def answer(future: Future[Any]) -> float:
    return float(future.result(FOREVER_S)["y"].item())


def test_what_waits_for_a_busy_instance_shares_the_next_pass(line: Line) -> None:
    release = line.block()
    asked = [line.ask(float(n)) for n in range(1, 4)]
    release()
    assert [answer(future) for _, future in asked] == [2.0, 4.0, 6.0]
    assert line.family.passes == [[0.0], [1.0, 2.0, 3.0]]
    for record, _ in asked:
        assert record.fields["batch_size"] == 3
        assert {"queue_ms", "inference_ms"} <= record.fields.keys()


def test_a_pass_holds_no_more_than_its_limit(line: Line) -> None:
    release = line.block()
    asked = [line.ask(float(n)) for n in range(1, 7)]
    release()
    assert [answer(future) for _, future in asked] == [2.0 * n for n in range(1, 7)]
    assert [len(numbers) for numbers in line.family.passes] == [1, 4, 2]


def test_a_batch_never_mixes_parameters(line: Line) -> None:
    release = line.block()
    asked = [line.ask(float(n), "odd" if n % 2 else "even") for n in range(1, 7)]
    release()
    assert [answer(future) for _, future in asked] == [2.0 * n for n in range(1, 7)]
    assert line.family.passes[1:] == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]


def test_what_has_priority_is_computed_first(line: Line) -> None:
    release = line.block()
    asked = [
        line.ask(float(n), str(n), priority=priority) for n, priority in ((1, 0), (2, 7), (3, 1), (4, 1))
    ]
    release()
    assert [answer(future) for _, future in asked] == [2.0, 4.0, 6.0, 8.0]
    assert line.family.passes == [[0.0], [3.0], [4.0], [2.0], [1.0]]


def test_one_bad_item_fails_alone(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    release = line.block()
    asked = [line.ask(number) for number in (1.0, NEGATIVE, 2.0)]
    release()
    assert answer(asked[0][1]) == 2.0 and answer(asked[2][1]) == 4.0
    with pytest.raises(InstanceFailed):
        asked[1][1].result(FOREVER_S)
    assert line.family.passes[1:] == [[1.0, NEGATIVE, 2.0], [1.0], [NEGATIVE], [2.0]]
    assert "batch_split" in [getattr(entry, "event", "") for entry in caplog.records]


def test_a_family_that_exits_ends_only_the_request_that_made_it(line: Line) -> None:
    release = line.block()
    freed: list[float] = []
    numbers = (1.0, EXIT, 2.0)
    asked = [line.ask(number, free_place=lambda n=number: freed.append(n)) for number in numbers]
    release()
    assert answer(asked[0][1]) == 2.0 and answer(asked[2][1]) == 4.0
    with pytest.raises(InstanceFailed):
        asked[1][1].result(FOREVER_S)
    assert sorted(freed) == sorted(numbers)
    assert line.served.pool.lent == 0


def test_what_the_family_refuses_never_gets_into_line(line: Line) -> None:
    with pytest.raises(InvalidField) as error:
        line.batcher.infer(Exchange(), Record(), 5, {"x": torch.tensor([1e9])}, {})
    assert error.value.param == "x"
    assert line.family.passes == []


def test_what_was_given_up_in_line_is_never_computed(line: Line) -> None:
    release = line.block()
    freed: list[int] = []
    _, late = line.ask(1.0, timeout_s=0.05, free_place=lambda: freed.append(1))
    with pytest.raises(Overloaded):
        late.result(FOREVER_S)
    assert freed == [1], "nothing computes for it, so its place is free at once"
    _, next_one = line.ask(2.0)
    release()
    assert answer(next_one) == 4.0
    assert line.family.passes == [[0.0], [2.0]]
    assert freed == [1]


def test_every_place_comes_back_once(line: Line) -> None:
    release = line.block()
    freed: list[float] = []
    numbers = (1.0, NEGATIVE, 3.0, 4.0, 5.0)
    asked = [line.ask(n, free_place=lambda n=n: freed.append(n)) for n in numbers]
    release()
    for _, future in asked:
        future.exception(FOREVER_S)
    assert sorted(freed) == sorted(numbers)


def test_the_head_waits_for_others_to_share_its_pass() -> None:
    line = Line(limit=2, delay_s=FOREVER_S)  # so long that only a full pass can end the wait
    _, first = line.ask(1.0)
    _, second = line.ask(2.0)
    assert (answer(first), answer(second)) == (2.0, 4.0)
    assert line.family.passes == [[1.0, 2.0]]
    line.close()


def test_a_pass_that_nobody_waits_for_ends_at_its_checkpoint(line: Line) -> None:
    release = line.block()
    asked = [line.ask(number, timeout_s=0.5) for number in (SLOW, 1.0)]
    release()
    assert line.family.stuck.wait(FOREVER_S)
    for _, future in asked:
        with pytest.raises(DeadlineExceeded):
            future.result(FOREVER_S)
    line.family.go.set()
    assert answer(line.ask(3.0)[1]) == 6.0, "the instance is free again"
    assert line.family.passes == [[0.0], [SLOW, 1.0], [3.0]], "and none was computed alone"


def test_a_broken_device_ends_every_request_of_the_pass_and_takes_no_other(line: Line) -> None:
    told: list[str] = []
    object.__setattr__(line.served, "device_broke", told.append)
    release = line.block()
    asked = [line.ask(number) for number in (1.0, BROKEN)]
    release()
    for _, future in asked:
        with pytest.raises((DeviceFailed, Draining)):
            future.result(FOREVER_S)
    assert len(told) == 1 and len(line.family.passes) == 2, "nothing is computed there any more"


def test_a_closed_pool_is_draining_for_all_that_wait(line: Line) -> None:
    release = line.block()
    asked = [line.ask(float(n)) for n in (1, 2)]
    line.served.pool.close()
    release()
    for _, future in asked:
        with pytest.raises(Draining):
            future.result(FOREVER_S)


def test_families_that_declare_nothing_compute_one_by_one() -> None:
    assert batch_limit(Affine(Path(), {}), Settings(max_batch=8)) == 1
    assert batch_limit(Doubler(), Settings(max_batch=8)) == 8
    alone = Doubler()
    alone.batches = False
    assert batch_limit(alone, Settings(max_batch=8)) == 1
    line = Line()
    infer = create_inference(Settings(max_batch=1), line.served)
    given = infer(Exchange(), Record(), 5, {"x": torch.tensor([3.0])}, {})
    assert given["y"].tolist() == [6.0]
    line.close()


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.sampled_from([NEGATIVE, 1.0, 2.0, 3.0, 4.0]), min_size=1, max_size=12),
    kinds=st.lists(st.sampled_from(["a", "b"]), min_size=12, max_size=12),
    limit=st.integers(2, 5),
    instances=st.integers(1, 3),
)
def test_everyone_gets_the_own_answer(
    numbers: list[float], kinds: list[str], limit: int, instances: int
) -> None:
    line = Line(limit=limit, instances=instances)
    try:
        asked = [line.ask(n, kind)[1] for n, kind in zip(numbers, kinds, strict=False)]
        for number, future in zip(numbers, asked, strict=True):
            if number == NEGATIVE:
                with pytest.raises(InstanceFailed):
                    future.result(FOREVER_S)
            else:
                assert answer(future) == 2 * number
        assert line.served.pool.lent == 0
        assert max(map(len, line.family.passes)) <= limit
    finally:
        line.close()
