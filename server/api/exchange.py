"""One request's dealings with its worker, and what the worker serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from server.families.base import Family, Instance
from server.pool import InstancePool


def _ignore(_detail: str) -> None:
    """Stand in for the worker where there is none."""


@dataclass(frozen=True)
class Served:
    """What one worker serves. ``created`` is Unix seconds; ``threads`` compute, one for each instance.

    ``device_broke`` is told why nothing more can be computed on the worker's device.
    """

    name: str
    version: str
    family: Family
    pool: InstancePool[Instance]
    created: int
    generation: int = 0
    manifest_sha256: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_broke: Callable[[str], None] = _ignore
    threads: ThreadPoolExecutor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Kept, not made for each request: torch's own threads and device handles belong to a thread.
        object.__setattr__(self, "threads", ThreadPoolExecutor(self.pool.size, "computing"))


def _nothing() -> None:
    """Stand in for the worker where there is none."""


def _never() -> bool:
    """Stand in for the connection where there is none."""
    return False


@dataclass(frozen=True)
class Exchange:
    """What a worker wants to know of a request, and a request of its connection. In tests, nothing."""

    note_read: Callable[[], None] = _nothing  # the whole request is here: the client is not too slow
    keep_place: Callable[[], None] = _nothing  # the place outlives the connection, until free_place
    free_place: Callable[[], None] = _nothing  # the model has finished: the worker may take the next one
    client_left: Callable[[], bool] = _never  # nobody will read what is still to be sent

    KEY = "warmserve.exchange"

    @classmethod
    def of(cls, environ: Mapping[str, Any]) -> Exchange:
        """Return the exchange that the worker put into *environ*."""
        found = environ.get(cls.KEY)
        return found if isinstance(found, cls) else cls()
