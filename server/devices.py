"""The devices of one arbiter: chosen once, asked through NVML what is free whenever a worker is to come."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from server import events
from server.accelerators import Accelerator, read_accelerators
from server.crew import Member
from server.events import emit
from server.placement import Place, choose, fitting_surge, memory_share, place

LOG = logging.getLogger("warmserve")
READ_EVERY_S = 1.0  # a reading opens NVML, which costs milliseconds; the arbiter's loop may turn often


class Devices:
    """What `server.placement` decides, for the live workers of this arbiter.

    Raises:
        NoSuchDevice: *setting* names a device that is not there.
    """

    def __init__(self, setting: str) -> None:
        self._found = read_accelerators() if setting != "cpu" else ()
        self._read_at = time.monotonic()
        self._uuids = {device.uuid for device in choose(setting, self._found)}
        self._withheld = False

    def place(self, members: Collection[Member], *, target: int, workers: int) -> Place:
        """Return the place of the next worker of generation *target*, one of *workers*."""
        devices = self._devices()
        if not devices:
            return Place()
        staying = [m.device for m in members if m.generation == target and not m.worn()]
        leaving = [m.device for m in members if m.generation != target or m.worn()]
        return Place(place(devices, staying, leaving), memory_share(workers, len(devices)))

    def surge(self, wanted: int, members: Collection[Member], *, target: int, workers: int) -> int:
        """Return how many workers beyond *workers* there may be now; what does not fit is said in the log."""
        footprint = max((int(str(m.reported().get("device_memory_bytes", 0))) for m in members), default=0)
        device = self.place(members, target=target, workers=workers).device
        if device is None or len(members) < workers:
            return wanted
        fits = fitting_surge(wanted, device.free_bytes, footprint)
        # Those that are there beyond *workers* have their memory already.
        fits = min(wanted, fits + len(members) - workers)
        if fits < wanted and not self._withheld:
            emit(LOG, logging.WARNING, events.SURGE_WITHHELD, device=f"cuda:{device.index}",
                 free_bytes=device.free_bytes, needed_bytes=footprint)  # fmt: skip
        self._withheld = fits < wanted
        return fits

    def _devices(self) -> list[Accelerator]:
        if self._uuids and time.monotonic() - self._read_at > READ_EVERY_S:
            self._found, self._read_at = read_accelerators() or self._found, time.monotonic()
        return [device for device in self._found if device.uuid in self._uuids]
