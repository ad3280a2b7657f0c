"""How long a request may take: the server's limit, and the client's own, counted from when it was sent.

``X-Request-Start`` is when the proxy took the request (nginx: ``t=$msec``); ``X-Request-Timeout`` is how
many seconds from then its client waits. Knows nothing of models.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import TypeVar

from server.api.record import Record
from server.errors import DeadlineExceeded, InvalidField, Overloaded

START = "X-Request-Start"
TIMEOUT = "X-Request-Timeout"
LONGEST_WAIT_S = 3600  # a start longer ago than that is another clock, not a queue
LONGEST_TIMEOUT_S = 86400
STARTED = re.compile(r"(?:t=)?(\d{1,20}(?:\.\d{1,9})?)", re.ASCII)
NUMBER = re.compile(r"\d{1,400}(?:\.\d{1,400})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
T = TypeVar("T")


def waited_s(header: str | None, now: float) -> float:
    """Return the seconds since *header*, at the Unix time *now*; 0 where it tells nothing usable.

    Proxies write seconds, milliseconds (Heroku) or microseconds (Apache); their size tells which.
    """
    found = STARTED.fullmatch(header.strip()) if header else None
    if found is None:
        return 0.0
    start = float(found[1])
    for limit, unit in ((1e14, 1e6), (1e11, 1e3)):
        if start >= limit:
            start /= unit
            break
    waited = now - start
    return waited if 0 <= waited <= LONGEST_WAIT_S else 0.0


def timeout_of(header: str | None) -> float:
    """Return the seconds that *header* asks for, endless without one.

    Raises:
        InvalidField: it is no number of seconds above 0.
    """
    if header is None:
        return math.inf
    timeout_s = float(header) if NUMBER.fullmatch(header.strip()) else 0.0
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise InvalidField(f"{TIMEOUT}: seconds, above 0 and at most {LONGEST_TIMEOUT_S}", param=TIMEOUT)
    return timeout_s


def within(record: Record, timeout_s: float, run: Callable[[float], T]) -> T:
    """Return what *run* gives within the seconds it is handed: *timeout_s*, or what its client's time leaves.

    Raises:
        DeadlineExceeded: the client's time is over before the request has begun to be computed.
    """
    left_s = record.asked + record.own_timeout_s - time.monotonic()
    if left_s >= timeout_s:
        return run(timeout_s)
    late = DeadlineExceeded(f"not begun within the request's own timeout of {record.own_timeout_s:g} s")
    if left_s <= 0:
        raise late
    try:
        return run(left_s)
    except Overloaded:
        raise late from None
