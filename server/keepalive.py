"""Keep-alive, the third tier of warm-up: rehearse on instances nobody has used for a while.

One worker of a service at a time, and only while another could take the next request. Knows nothing of
connections: its worker gives it a place first, as to a request.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.device_faults import is_broken
from server.health import is_idle, others
from server.pool import InstancePool
from server.warmup import rehearse

JITTER = 0.1  # of the interval, either way: workers that started together do not stay in step
SLOW_FACTOR = 10  # times what the input took at warm-up, and a second more: a busy machine is not a fault
SLOW_S = 1.0


@dataclass(frozen=True)
class Kept:
    """How a keep-alive went: its seconds, what is wrong with the instance, and whether its device broke."""

    took_s: float
    fault: str = ""
    device_broke: bool = False


class KeepAlive:
    """The keep-alive of one worker.

    *usual_s* is what the input took at warm-up; *interval_s* the idle time after which an instance is
    rehearsed, 0 for never; *turn* a file of the service whose lock is the right to do so.
    """

    def __init__(
        self, family: Any, pool: InstancePool[Any], declared: Mapping[str, Any], *,
        usual_s: float, interval_s: float, turn: Path,
    ) -> None:  # fmt: skip
        self._family, self._pool, self._declared = family, pool, declared
        self._slow_s = SLOW_FACTOR * usual_s + SLOW_S
        self._interval_s = interval_s
        self._turn = turn
        self._draw()

    def _draw(self) -> None:
        self._patience_s = self._interval_s * random.uniform(1 - JITTER, 1 + JITTER)

    @property
    def is_due(self) -> bool:
        """Whether some instance has been idle for long enough."""
        return bool(self._interval_s) and self._pool.longest_idle_s >= self._patience_s

    def run(self) -> Kept | None:
        """Rehearse on the idlest instance; None when it is another worker's turn or none is idle."""
        with _turn(self._turn) as mine, self._pool.lease_idlest() as instance:
            if not mine or instance is None:
                return None
            self._draw()
            began = time.monotonic()
            try:
                rehearse(self._family, instance, self._declared, "keep-alive")
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
                return Kept(time.monotonic() - began, fault, is_broken(instance.device, error))
            took_s = time.monotonic() - began
            slow = f"took {took_s:.3f} s, the limit is {self._slow_s:.3f}" if took_s > self._slow_s else ""
            return Kept(took_s, slow)


def is_spare(workers: Iterable[Mapping[str, Any]], own_pid: int, now: float) -> bool:
    """Tell whether the worker *own_pid* can be busy for a moment without making a request wait.

    True while another worker is idle, and where there is no other one. *now* is the monotonic clock.
    """
    found = others(workers, own_pid, now)
    return not found or any(is_idle(worker) for worker in found)


@contextmanager
def _turn(path: Path) -> Iterator[bool]:
    """Hold the lock on *path* if nobody does. It ends with the process, however that dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)
