"""Finished responses, kept for those who ask for exactly the same again: one store for all workers.

Kept on disk in the run directory (its pages are shared, and it outlives a worker) by diskcache, which
holds it to its size. A store that fails costs nobody an answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

from flask import Response, g

from server import events
from server.api.exchange import Served
from server.api.record import Record
from server.events import emit
from server.settings import Settings

LOG = logging.getLogger("warmserve")
HEADER = "X-Cache"
LARGEST_PART = 16  # of the whole, for one response: a single one must not drive all others out
BUSY_S = 0.1  # other workers write too; longer than that and the response is not kept
KEPT_HEADERS = ("Content-Type", "Inference-Header-Content-Length")
Make = Callable[[], Response]


class ResponseCache:
    """The responses of one version, in the store that all workers share."""

    def __init__(self, settings: Settings, served: Served) -> None:
        # Its manifest names every file by checksum: a version is never taken for another one of its name.
        self._of = f"{served.name}\0{served.version}\0{served.manifest_sha256}".encode()
        self._limit_bytes = settings.cache_bytes // LARGEST_PART
        self._store = _open(settings) if settings.cache_bytes else None

    def respond(self, what: str, request: bytes | None, make: Make) -> Response:
        """Return the response kept for *request*, or what *make* gives, and keep that.

        Args:
            what: the route, which may read the same bytes in another way.
            request: everything the response depends on; None where it depends on more than the request.
        """
        if self._store is None:
            return make()
        if request is None:
            return _told(make(), "BYPASS")
        key = hashlib.sha256(b"\0".join((self._of, what.encode(), request))).digest()
        kept = self._get(key)
        if kept is not None:
            return _told(_unpack(kept), "HIT")
        response = make()
        if response.is_streamed:
            response.response = self._kept_at_end(key, response, response.response)
        else:
            self._put(key, response, response.get_data())
        return _told(response, "MISS")

    def _kept_at_end(self, key: bytes, response: Response, chunks: Any) -> Iterator[bytes]:
        taken: list[bytes] = []
        size = 0
        for chunk in chunks:
            size += len(chunk)
            if size <= self._limit_bytes:
                taken.append(chunk)
            else:
                taken.clear()
            yield chunk
        if size <= self._limit_bytes:
            self._put(key, response, b"".join(taken))

    def _get(self, key: bytes) -> bytes | None:
        try:
            found: bytes | None = self._store.get(key) if self._store is not None else None
        except (sqlite3.Error, OSError, ValueError) as error:
            self._give_up(error)
            return None
        return found

    def _put(self, key: bytes, response: Response, body: bytes) -> None:
        if self._store is None or len(body) > self._limit_bytes or response.status_code != 200:
            return
        headers = {name: response.headers[name] for name in KEPT_HEADERS if name in response.headers}
        try:
            self._store.set(key, json.dumps(headers).encode() + b"\n" + body)
        except TimeoutError:
            pass  # the others are writing
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Do without the store from now on: a full or broken disk fails each time."""
        self._store = None
        emit(LOG, logging.WARNING, events.CACHE_UNAVAILABLE, reason=type(error).__name__, detail=str(error))


def _open(settings: Settings) -> Any:
    from server.api.cache_store import open_store  # needs an optional extra

    return open_store(settings.run_dir / "cache", size_bytes=settings.cache_bytes, busy_s=BUSY_S)


def _unpack(kept: bytes) -> Response:
    head, _, body = kept.partition(b"\n")
    return Response(body, headers=json.loads(head))


def _told(response: Response, how: str) -> Response:
    record: Record = g.record
    record.fields["cache"] = how.lower()
    response.headers[HEADER] = how
    return response
