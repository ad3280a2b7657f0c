"""One request's record: what its event says, written once, when the response has ended however it ended.

A WSGI middleware, because only the outermost iterator sees the last byte go, the client leave and a late
error alike. Knows nothing of models or protocols.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from server import events
from server.errors import ClientLeft, InstanceFailed, ResponseAborted, ServingError
from server.events import emit

LOG = logging.getLogger("warmserve")
Observer = Callable[[Mapping[str, Any]], None]
Tracer = Callable[[Mapping[str, Any], "Record", Mapping[str, Any]], str]
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass
class Record:
    """What is known of one request. Threads of the request add to ``fields``; the event has them all.

    ``asked`` is when its proxy took it, if that said so; ``own_timeout_s`` is for how long from then its
    client waits; ``priority`` 1 comes first, 0 last. ``parts`` is when each part of its work began and
    ended, on the monotonic clock; ``route`` is the pattern of its path.
    """

    began: float = field(default_factory=time.monotonic)
    asked: float = math.nan
    own_timeout_s: float = math.inf
    priority: int = 0
    request_id: str = ""
    route: str = ""
    status: int = 0
    sent_bytes: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)

    KEY = "warmserve.record"

    def __post_init__(self) -> None:
        if math.isnan(self.asked):
            self.asked = self.began

    @property
    def waited_ms(self) -> float:
        """Milliseconds it waited between its proxy and its worker: in the accept queue."""
        return (self.began - self.asked) * 1000

    @classmethod
    def of(cls, environ: Mapping[str, Any]) -> Record:
        """Return the record that `Recorder` put into *environ*."""
        found: Record = environ[cls.KEY]
        return found

    def note(self, data: bytes) -> None:
        """Count *data*, which goes out now."""
        if data and not self.sent_bytes:
            self.fields["first_byte_ms"] = self.age_ms
        self.sent_bytes += len(data)

    def part(self, name: str, began: float) -> float:
        """Note that the part *name* has run since *began*, and return that in milliseconds."""
        now = time.monotonic()
        self.parts[name] = (began, now)
        return (now - began) * 1000

    @property
    def age_ms(self) -> float:
        """Milliseconds since the request came in."""
        return (time.monotonic() - self.began) * 1000


class Recorder:
    """Wraps an application: a record for each request, and its event at the end of its response.

    *observe* gets the event's fields too, for the metrics; *trace* makes spans of it and names their trace.
    """

    def __init__(
        self, application: Application, observe: Observer, trace: Tracer | None = None, **constant: Any
    ) -> None:
        self._application = application
        self._observe = observe
        self._trace = trace
        self._constant = constant

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        record = environ[Record.KEY] = Record()

        def start(status: str, *rest: Any) -> Any:
            record.status = int(status.split(" ", 1)[0])
            return start_response(status, *rest)

        def finish() -> None:
            event = {
                "request_id": record.request_id, "method": environ.get("REQUEST_METHOD"),
                "path": environ.get("PATH_INFO"), "status": record.status, **self._constant,
                "total_ms": record.age_ms, "bytes": record.sent_bytes, **record.fields,
            }  # fmt: skip
            self._observe(event)
            if self._trace is not None:
                event["trace_id"] = self._trace(environ, record, event)
            emit(LOG, logging.INFO, events.REQUEST_SERVED, **event)

        return _Recorded(self._application(environ, start), record, finish)


class _Recorded:
    """The response's iterator: counts what goes out, and turns a late error into an abort."""

    def __init__(self, response: Iterable[bytes], record: Record, finish: Callable[[], None]) -> None:
        self._response = response
        self._items = iter(response)
        self._record = record
        self._finish: Callable[[], None] | None = finish

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            item = next(self._items)
        except StopIteration:
            self._end()
            raise
        except Exception as error:
            self._abort(error)
        self._record.note(item)
        return item

    def close(self) -> None:
        """End the response; if it had not ended yet, its client has gone."""
        if self._finish is not None:
            self._record.fields["cancelled"] = True
        try:
            if (close := getattr(self._response, "close", None)) is not None:
                close()
        finally:
            self._end()

    def _abort(self, error: Exception) -> None:
        """Log *error* and make the connection end: a begun response cannot say that it failed."""
        told = error if isinstance(error, ServingError) else InstanceFailed("the response failed")
        self._record.fields["code"] = told.code
        if not isinstance(error, ClientLeft):
            emit(LOG, logging.ERROR, events.RESPONSE_ABORTED, request_id=self._record.request_id,
                 code=told.code, reason=type(error).__name__, bytes=self._record.sent_bytes)  # fmt: skip
        if told is not error:
            LOG.error("response failed", exc_info=error)
        self._end()
        raise ResponseAborted(told.code) from error

    def _end(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
