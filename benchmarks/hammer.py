"""Requests, a connection each: from clients that ask again at once, or by the clock."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class Shot:
    """One request. ``first_s`` is its first byte, ``whole_s`` its last, both from when it was to begin."""

    status: int
    first_s: float
    whole_s: float


@dataclass(frozen=True)
class Target:
    """What is asked of whom."""

    port: int
    path: str
    body: bytes
    headers: Mapping[str, str]

    def ask(self, began: float | None = None) -> Shot:
        """Ask once; *began* is when that should have been, by the monotonic clock."""
        began = time.monotonic() if began is None else began
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", self.path, self.body, {**self.headers, "Connection": "close"})
            response = connection.getresponse()
            response.read(1)
            first = time.monotonic() - began
            response.read()
        except (OSError, http.client.HTTPException):
            return Shot(0, time.monotonic() - began, time.monotonic() - began)
        finally:
            connection.close()
        return Shot(response.status, first, time.monotonic() - began)


def closed(target: Target, *, clients: int, seconds: float) -> list[Shot]:
    """Let *clients* ask again as soon as they have been answered, for *seconds*."""
    end = time.monotonic() + seconds

    def run(_number: int) -> list[Shot]:
        shots = []
        while time.monotonic() < end:
            shots.append(target.ask())
        return shots

    with ThreadPoolExecutor(clients) as threads:
        return [shot for shots in threads.map(run, range(clients)) for shot in shots]


def by_the_clock(target: Target, *, rate: float, seconds: float) -> list[Shot]:
    """Ask *rate* times a second for *seconds*, however slowly answers come."""
    start = time.monotonic() + 0.2
    shots: list[Shot] = []
    threads = []
    for number in range(int(rate * seconds)):
        due = start + number / rate
        time.sleep(max(0.0, due - time.monotonic()))
        thread = threading.Thread(target=lambda due=due: shots.append(target.ask(due)))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return shots
