"""The computing of one request, in a thread of its own: leased for computing, not for sending.

The thread that sends takes the pieces at its client's pace. Knows nothing of HTTP or of what a piece is.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from server import device_faults, events
from server.api.exchange import Exchange, Served
from server.api.record import Record
from server.errors import (
    ClientLeft,
    DeadlineExceeded,
    DeviceFailed,
    DeviceOutOfMemory,
    Draining,
    InstanceFailed,
    InvalidField,
    Overloaded,
    ServingError,
)
from server.events import emit
from server.families.base import InputError, Instance, go_on
from server.pool import PoolClosed, PoolTimeout

LOG = logging.getLogger("warmserve")
LOOK_S = 0.25  # who waits for a piece looks this often whether its client is still there
T = TypeVar("T")
Lend = Callable[..., AbstractContextManager[Instance]]


@dataclass(frozen=True)
class _End:
    """What the spool holds after the last piece."""

    error: ServingError | None


class Computing(Generic[T]):
    """Runs *run* on a leased instance, from `start` on; give it an end with `cancel`.

    The spool between the two threads has no limit of its own: a limit would make a slow reader hold the
    instance. What one request can put there is bounded by the text's limit (`MAX_INPUT_CHARS`).

    The request has *timeout_s* seconds to be computed, waiting for an instance included. The worker's
    place comes back with the instance, also when that is long after the response was given up.
    """

    def __init__(
        self,
        served: Served,
        exchange: Exchange,
        record: Record,
        timeout_s: float,
        run: Callable[[Instance], Iterable[T]],
    ) -> None:
        self._served, self.exchange, self.record, self._run = served, exchange, record, run
        self._timeout_s = timeout_s
        self.began = time.monotonic()
        self.deadline = self.began + timeout_s
        self._spool: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._leased = False
        self._spooled = False
        self._cancelled = False
        self.ended = threading.Event()
        self._future: Future[None] | None = None

    def start(self) -> Computing[T]:
        """Compute in a computing thread."""
        self._future = self._served.threads.submit(self.compute)
        self.exchange.keep_place()  # after it: what was not submitted will not free the place either
        return self

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it, within its time."""
        return not self._cancelled and time.monotonic() <= self.deadline

    def pieces(self) -> Iterator[T]:
        """Yield the pieces as they come.

        Raises:
            Overloaded: no instance became free in time.
            Draining: this worker is leaving.
            InvalidField: the family does not accept the request.
            InstanceFailed: the family raised anything else; logged with its trace.
            DeadlineExceeded: the computing took too long.
            ClientLeft: the client hung up while nothing could be sent to it.
        """
        while True:
            item = self._next()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                return

    def cancel(self) -> None:
        """Stop at the next piece; does nothing once all is computed."""
        self._cancelled = True
        if (
            self._future is not None and self._future.cancel()
        ):  # it never started, so its own end will not come
            self.exchange.free_place()

    def _next(self) -> T | _End:
        while True:
            left_s = self.deadline - time.monotonic()
            try:
                return self._spool.get(timeout=max(0.0, min(left_s, LOOK_S)))
            except queue.Empty:
                if left_s <= 0:
                    raise self._overdue() from None
                if self.exchange.client_left():
                    self.record.fields["cancelled"] = True
                    raise ClientLeft("the client hung up") from None

    def _overdue(self) -> ServingError:
        if not self._leased:
            return Overloaded("no instance became free in time", retry_after_s=1)
        return DeadlineExceeded(f"not computed within {self._timeout_s:g} s")

    def compute(self) -> None:
        """Fill the spool (the computing thread)."""
        # Unless it ends well it failed, also where a family exits: half an answer never passes for a whole.
        error: ServingError | None = InstanceFailed("the model failed on this request")
        try:
            self._spool_pieces()
            error = None
        except ServingError as raised:
            error = raised
        finally:
            self._end(error)

    def begin(self) -> None:
        """Note that an instance has been found."""
        self._leased = True
        self.record.fields["queue_ms"] = self.record.waited_ms + self.record.part("queue", self.began)

    def _end(self, error: ServingError | None) -> None:
        self.exchange.free_place()
        self._spool.put(_End(error))
        self.ended.set()

    def _spool_pieces(self) -> None:
        """Compute; when the device's memory is full, once more alone, unless a piece is out already."""
        try:
            return self._compute_on_lease(self._served.pool.lease)
        except DeviceOutOfMemory:
            if self._spooled:
                raise
        # Here and not in the block above: there the error holds the frames, and they hold its tensors.
        device_faults.free_memory()
        self.record.fields["retried"] = True
        self._compute_on_lease(self._served.pool.lease_alone)

    def _compute_on_lease(self, lend: Lend) -> None:
        wait_s = max(0.0, self.deadline - time.monotonic())
        with leased(self._served, self.record, lend(timeout_s=wait_s)) as instance:
            self.begin()
            instance.checkpoint = self._check_wanted
            began = time.monotonic()
            pieces = iter(() if self._cancelled else self._run(instance))
            try:
                for piece in pieces:
                    self._note_inference(began)  # each time: a cancelled request's event comes before the end
                    self._spool.put(piece)
                    self._spooled = True
                    if self._cancelled:
                        return
                    self._check_wanted()
            finally:
                self._note_inference(began)
                instance.checkpoint = go_on
                # Its own finally blocks belong to the lease, not to whenever the iterator is collected.
                if (close := getattr(pieces, "close", None)) is not None:
                    close()

    def _check_wanted(self) -> None:
        if self._cancelled:
            raise ClientLeft("nobody waits for it")
        if time.monotonic() > self.deadline:
            raise self._overdue()

    def _note_inference(self, began: float) -> None:
        self.record.fields["inference_ms"] = self.record.part("inference", began)


@contextmanager
def leased(served: Served, record: Record, lease: AbstractContextManager[Instance]) -> Iterator[Instance]:
    """Enter *lease*, ready for inference; what pool and family raise becomes what clients are told.

    Raises: as `Computing.pieces`, but for ClientLeft.
    """
    try:
        with lease as instance, instance.computing():
            yield instance
    except PoolTimeout as error:
        raise Overloaded(str(error), retry_after_s=1) from None
    except PoolClosed as error:
        raise Draining(str(error), retry_after_s=1) from None
    except InputError as error:
        raise InvalidField(str(error), param=error.field) from None
    except ServingError:
        raise
    except torch.OutOfMemoryError as error:
        emit(LOG, logging.WARNING, events.DEVICE_FILLED, request_id=record.request_id,
             version=served.version, detail=str(error))  # fmt: skip
        raise DeviceOutOfMemory("the device has no memory for this request", retry_after_s=1) from None
    except Exception as error:
        emit(LOG, logging.ERROR, events.REQUEST_FAILED, request_id=record.request_id,
             version=served.version, reason=type(error).__name__)  # fmt: skip
        LOG.error("inference failed", exc_info=True)
        if device_faults.is_broken(served.device, error):
            served.pool.close()  # at once, for those that wait: nothing more is to be computed here
            served.device_broke(f"{type(error).__name__}: {error}")
            raise DeviceFailed("the device failed", retry_after_s=1) from None
        raise InstanceFailed("the model failed on this request") from None


def run_leased(
    served: Served, exchange: Exchange, record: Record, timeout_s: float, run: Callable[[Instance], T]
) -> T:
    """Return what *run* computes on a leased instance; raises as `Computing.pieces`."""
    computing = Computing(served, exchange, record, timeout_s, lambda instance: (run(instance),)).start()
    try:
        (result,) = computing.pieces()
        return result
    finally:
        computing.cancel()
