"""Tensor inference, of one request or of several together where the family can.

Each request puts an entry into the line and buys one turn of a computing thread; a turn computes whatever
stands at the head of the line, together with those behind it that may share its pass. So there is never an
entry without a turn to come, and while every instance is busy the line grows into batches by itself.
"""

from __future__ import annotations

import bisect
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from server import device_faults, events
from server.api import tensors
from server.api.computing import Computing, leased, run_leased
from server.api.exchange import Exchange, Served
from server.api.record import Record
from server.errors import ClientLeft, InvalidField, ServingError
from server.events import emit
from server.families.base import Family, InputError, Instance, Value, go_on
from server.families.batching import BatchingFamily, Prepared
from server.settings import Settings

LOG = logging.getLogger("warmserve")
Outputs: TypeAlias = Mapping[str, Value]
# The exchange, the record, seconds, inputs and parameters of one request -> its outputs, in main memory.
# Raises as `Computing.pieces`.
Infer: TypeAlias = Callable[[Exchange, Record, float, Mapping[str, Value], Mapping[str, Any]], Outputs]


def batch_limit(family: Family, settings: Settings) -> int:
    """Return how many requests of *family* one pass may hold; 1 where it computes them one by one."""
    return settings.max_batch if isinstance(family, BatchingFamily) and family.batches else 1


def create_inference(settings: Settings, served: Served) -> Infer:
    """Return what runs one request's tensors through *served*."""
    family = served.family
    limit = batch_limit(family, settings)
    if isinstance(family, BatchingFamily) and limit > 1:
        return Batcher(served, family, limit, settings.max_batch_delay_ms / 1000).infer

    def infer(
        exchange: Exchange, record: Record, timeout_s: float,
        inputs: Mapping[str, Value], parameters: Mapping[str, Any],
    ) -> Outputs:  # fmt: skip
        def run(instance: Instance) -> Outputs:
            return tensors.on_host(family.outputs, family.infer(instance, inputs, parameters))

        return run_leased(served, exchange, record, timeout_s, run)

    return infer


class Batcher:
    """The line of one served model. *delay_s* is how long its head waits for others to share its pass."""

    def __init__(self, served: Served, family: BatchingFamily, limit: int, delay_s: float) -> None:
        self._served, self._family, self._limit, self._delay_s = served, family, limit, delay_s
        self._line: list[_Entry] = []
        self._changed = threading.Condition()

    def infer(
        self, exchange: Exchange, record: Record, timeout_s: float,
        inputs: Mapping[str, Value], parameters: Mapping[str, Any],
    ) -> Outputs:  # fmt: skip
        """Return the outputs of one request, computed alone or with others."""
        try:
            prepared = self._family.prepare(inputs, parameters)
        except InputError as error:
            raise InvalidField(str(error), param=error.field) from None

        def alone(instance: Instance) -> Sequence[Outputs]:
            record.fields["batch_size"] = 1
            return self._run(instance, [prepared.content])

        entry = _Entry(self._served, exchange, record, timeout_s, alone)
        entry.prepared = prepared
        with self._changed:
            bisect.insort(self._line, entry, key=_rank)  # behind those of its own rank
            self._changed.notify_all()
        self._served.threads.submit(self._turn)
        exchange.keep_place()
        try:
            (outputs,) = entry.pieces()
            return outputs
        finally:
            self._leave(entry)

    def _leave(self, entry: _Entry) -> None:
        """Take *entry* out of the line, if nobody has begun it."""
        entry.cancel()
        with self._changed:
            unbegun = entry in self._line
            if unbegun:
                self._line.remove(entry)
        if unbegun:
            entry.exchange.free_place()

    def _turn(self) -> None:
        """Compute what stands at the head of the line (a computing thread)."""
        batch = self._gather()
        if len(batch) == 1:
            batch[0].compute()
        elif batch:
            done = False
            try:
                done = self._compute_together(batch)
            finally:  # also where the family exits: each of them has to come to an end
                for entry in () if done else batch:
                    self._served.threads.submit(entry.compute)

    def _gather(self) -> list[_Entry]:
        """Take the head and those that may share its pass, once the pass is full or the head has waited."""
        with self._changed:
            while self._line:
                head = self._line[0]
                batch = [e for e in self._line if e.prepared.key == head.prepared.key][: self._limit]
                left_s = head.began + self._delay_s - time.monotonic()
                if len(batch) == self._limit or left_s <= 0:
                    self._line = [entry for entry in self._line if entry not in batch]
                    return batch
                self._changed.wait(left_s)
            return []

    def _compute_together(self, batch: Sequence[_Entry]) -> bool:
        """Compute *batch* in one pass; False when that failed, and each has to be computed alone.

        Alone each finds out for itself: the one that made the pass fail fails, the others do not.
        """
        head = batch[0]
        wait_s = max(0.0, min(entry.deadline for entry in batch) - time.monotonic())
        try:
            lease = self._served.pool.lease(timeout_s=wait_s)
            with leased(self._served, head.record, lease) as instance:
                return self._try(instance, batch)
        except ServingError:
            return False

    def _try(self, instance: Instance, batch: Sequence[_Entry]) -> bool:
        def check_wanted() -> None:
            if not any(entry.is_wanted for entry in batch):
                raise ClientLeft("nobody waits for any of them")

        for entry in batch:
            entry.begin()
        instance.checkpoint = check_wanted
        began = time.monotonic()
        try:
            results = self._run(instance, [entry.prepared.content for entry in batch])
        except Exception as error:
            if device_faults.is_broken(instance.device, error):
                raise
            emit(LOG, logging.WARNING, events.BATCH_SPLIT, version=self._served.version, count=len(batch),
                 reason=type(error).__name__)  # fmt: skip
            return False
        finally:
            instance.checkpoint = go_on
        for entry, outputs in zip(batch, results, strict=True):
            entry.give(outputs, began, len(batch))
        return True

    def _run(self, instance: Instance, contents: Sequence[Any]) -> Sequence[Outputs]:
        results = self._family.infer_batch(instance, contents)
        if len(results) != len(contents):
            raise TypeError(f"{len(results)} results of a batch of {len(contents)}")
        return [tensors.on_host(self._family.outputs, outputs) for outputs in results]


def _rank(entry: _Entry) -> float:
    return entry.record.priority or math.inf


class _Entry(Computing[Outputs]):
    """One request in the line."""

    prepared: Prepared

    def give(self, outputs: Outputs, began: float, size: int) -> None:
        """End it with *outputs*, which a pass of *size* requests that *began* then has computed."""
        self.record.fields["batch_size"] = size
        self._note_inference(began)
        self._spool.put(outputs)
        self._end(None)
