"""Which connections a worker holds, and which of them may compute: its places, and the limits of all others.

Runs in the event loop's thread only. Knows nothing of requests: it hands a connection that may begin to
*start* and is told when its place is free again.
"""

from __future__ import annotations

import functools
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from server.board import Record
from server.connections import NEVER, Connection, NoRoom, accept, hang_up, has_data, say_overloaded
from server.listeners import queued
from server.settings import Settings

GRACE_S = 0.05  # a unix socket's client is accepted before it writes; so long its silence counts as speech
ADMIN_READ_S = 2.0  # a probe says what it wants at once
LINGER_S = 1.0  # after a refusal: closing with unread bytes would be a reset, and the 503 lost
PAUSE_S = 0.2  # without a descriptor for one more connection
SILENT_LIMIT = 256  # connections that have sent nothing; the oldest makes room
SEND_TOTAL = 10  # times SEND_TIMEOUT_S, for a whole response


class Intake:
    """The connections of one worker. ``places`` are taken by those whose request is not computed yet.

    *batch* is how many of them may share one pass of an instance. Those beyond the instances are not taken
    as they come but gathered when the worker says so.
    """

    def __init__(
        self, *, cfg: Any, settings: Settings, poller: selectors.BaseSelector, slot: Record,
        start: Callable[[Connection], None], batch: int,
    ) -> None:  # fmt: skip
        self._cfg, self._settings, self._poller, self._slot, self._start = cfg, settings, poller, slot, start
        self.instances = settings.pool_size
        self.size = settings.pool_size * batch
        self.places = 0
        self.open: set[Connection] = set()  # in the hands of a thread
        self.silent: dict[Connection, None] = {}  # accepted, nothing sent yet; oldest first
        self.waiting: deque[Connection] = deque()  # spoke up while no place was free
        self.leaving: deque[Connection] = deque()  # refused; they are given time to read why
        self.refused = 0
        self._paused_until = 0.0

    # ---- what the loop asks ---------------------------------------------------------------------

    @property
    def is_free(self) -> bool:
        """Whether one more data connection could be computed now."""
        return self._has_room(self.instances)

    @property
    def may_gather(self) -> bool:
        """Whether one more could share the next pass of an instance that is computing now."""
        return self._has_room(self.size)

    def _has_room(self, places: int) -> bool:
        in_work = sum(not conn.admin for conn in self.open)
        return (
            self.places < places
            and not self.waiting
            and in_work < self._cfg.threads
            and time.monotonic() >= self._paused_until
        )

    @property
    def has_data_work(self) -> bool:
        """Whether a data connection is still to be answered."""
        return bool(self.waiting or self.silent or any(not conn.admin for conn in self.open))

    def hurry(self, deadline: float) -> None:
        """Let nobody who has not spoken wait beyond *deadline*."""
        for conn in self.silent:
            conn.expires = min(conn.expires, deadline)

    @property
    def patience_s(self) -> float:
        """How long the loop may sleep without missing a grace that ends."""
        return GRACE_S if any(conn.holds_place for conn in self.silent) or self.leaving else NEVER

    # ---- arrivals -------------------------------------------------------------------------------

    def accept_admin(self, listener: Any) -> None:
        """Take one admin connection; it needs no place."""
        conn = self._accept(listener, admin=True)
        if conn is not None:
            self._begin_or_listen(conn, ADMIN_READ_S)

    def accept_data(self, listener: Any) -> None:
        """Take one data connection, if a place is free: another one of this turn may have taken it."""
        if self.is_free:
            self._accept_data(listener)

    def gather(self, listeners: Sequence[Any]) -> None:
        """Take what waits in the queue, as much as can share the passes of this worker."""
        for listener in listeners:
            while self.may_gather and queued(listener) and self._accept_data(listener):
                pass

    def _accept_data(self, listener: Any) -> bool:
        conn = self._accept(listener, admin=False)
        if conn is None:
            return False
        self._take_place(conn)
        self._begin_or_listen(conn, self._settings.read_timeout_s)
        return True

    def _accept(self, listener: Any, *, admin: bool) -> Connection | None:
        try:
            return accept(listener, self._cfg, admin=admin, stall_s=self._settings.send_timeout_s)
        except NoRoom:
            self._paused_until = time.monotonic() + PAUSE_S
            return None

    def _begin_or_listen(self, conn: Connection, patience_s: float) -> None:
        if has_data(conn.sock):
            self._begin(conn, patience_s)
            return
        now = time.monotonic()
        conn.expires, conn.grace = now + patience_s, now + GRACE_S
        self.silent[conn] = None
        self._poller.register(conn.sock, selectors.EVENT_READ, functools.partial(self._spoke, conn))
        if len(self.silent) > SILENT_LIMIT:
            self._drop_silent(next(iter(self.silent)))

    def _spoke(self, conn: Connection, _sock: Any) -> None:
        self._forget_silent(conn)
        if conn.admin:
            self._begin(conn, ADMIN_READ_S)
        elif conn.holds_place or self.places < self.size:
            self._take_place(conn)
            self._begin(conn, self._settings.read_timeout_s)
        else:
            conn.expires = time.monotonic() + self._settings.request_timeout_s
            self.waiting.append(conn)

    def _begin(self, conn: Connection, read_s: float) -> None:
        conn.expires = conn.grace = NEVER
        conn.read_deadline = time.monotonic() + read_s
        self.open.add(conn)
        self._start(conn)

    # ---- places ---------------------------------------------------------------------------------

    def take_place(self) -> None:
        """Take a place for work of the worker's own."""
        self.places += 1
        self._slot.update(in_flight=self.places)

    def return_place(self) -> None:
        """Give back a place that has been taken."""
        self.places -= 1
        self._slot.update(in_flight=self.places)

    def _take_place(self, conn: Connection) -> None:
        if not conn.holds_place:
            conn.holds_place = True
            self.take_place()

    def vacate(self, conn: Connection) -> None:
        """The model has finished with the request of *conn*: its place is free, the rest is sending."""
        conn.send_deadline = time.monotonic() + SEND_TOTAL * self._settings.send_timeout_s
        self._free_place(conn)

    def _free_place(self, conn: Connection) -> None:
        if conn.holds_place:
            conn.holds_place = False
            self.return_place()

    def admit_waiting(self) -> None:
        """Give free places to those who waited longest."""
        while self.waiting and self.places < self.size:
            conn = self.waiting.popleft()
            self._take_place(conn)
            self._begin(conn, self._settings.read_timeout_s)

    # ---- limits ---------------------------------------------------------------------------------

    def enforce(self, now: float) -> None:
        """End what is over its time."""
        for conn in [c for c in self.silent if now > c.grace]:
            conn.grace = NEVER
            self._free_place(conn)
        for conn in [c for c in self.silent if now > c.expires]:
            self._drop_silent(conn)
        while self.waiting and now > self.waiting[0].expires:
            self._refuse(self.waiting.popleft())
        while self.leaving and now > self.leaving[0].expires:
            self.leaving.popleft().close()
        for conn in self.open:
            if now > conn.read_deadline:
                conn.read_deadline = NEVER
                hang_up(conn.sock, socket.SHUT_RD)
            if now > conn.send_deadline:
                conn.send_deadline = NEVER
                hang_up(conn.sock, socket.SHUT_RDWR)

    def shed(self, listeners: Sequence[Any]) -> int:
        """Answer 503 to connections beyond the queue's limit: waiting longer would not help them."""
        before = self.refused
        for listener in listeners:
            if queued(listener) > self._settings.max_queue:
                conn = self._accept(listener, admin=False)
                if conn is not None:
                    self._refuse(conn)
        return self.refused - before

    def refuse_waiting(self) -> None:
        """Answer 503 to all who spoke up and have no place: none of theirs has begun, so they may retry."""
        while self.waiting:
            self._refuse(self.waiting.popleft())

    def _refuse(self, conn: Connection) -> None:
        self.refused += 1
        say_overloaded(conn.sock)
        conn.expires = time.monotonic() + LINGER_S
        self.leaving.append(conn)
        if len(self.leaving) > SILENT_LIMIT:
            self.leaving.popleft().close()

    def _drop_silent(self, conn: Connection) -> None:
        self._forget_silent(conn)
        self._free_place(conn)
        conn.close()

    def _forget_silent(self, conn: Connection) -> None:
        del self.silent[conn]
        self._poller.unregister(conn.sock)
