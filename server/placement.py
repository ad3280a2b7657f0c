"""Which device each worker gets, and whether one worker more fits there: pure, over NVML's figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.accelerators import Accelerator

HEADROOM = 1.1  # of a running worker's footprint: warm-up peaks above what stays


@dataclass(frozen=True)
class Place:
    """Where one worker computes, and the part of that device's memory it may take."""

    device: Accelerator | None = None
    share: float = 1.0

    @property
    def name(self) -> str:
        """``cpu``, or ``cuda:`` and NVML's index."""
        return f"cuda:{self.device.index}" if self.device else "cpu"

    @property
    def uuid(self) -> str:
        """What CUDA calls the device; empty for the main processor."""
        return self.device.uuid if self.device else ""


class NoSuchDevice(Exception):
    """WARMSERVE_DEVICE asks for what the machine does not have."""

    reason = "no_such_device"


def choose(setting: str, found: Sequence[Accelerator]) -> tuple[Accelerator, ...]:
    """Return the devices that workers are spread over; none is the main processor.

    *setting* is ``auto`` (all there are, if any), ``cpu``, ``cuda`` (all, at least one) or ``cuda:0,1``
    (GPUs by NVML's index; each brings its MIG parts, if it has any).

    Raises:
        NoSuchDevice: it names a device that is not there.
    """
    name, _, listed = setting.partition(":")
    if name == "cpu":
        return ()
    if name == "auto":
        return tuple(found)
    if not found:
        raise NoSuchDevice(f"DEVICE={setting}: NVML finds no GPU on this machine")
    if not listed:
        return tuple(found)
    wanted = [int(index) for index in listed.split(",")]
    known = {device.index for device in found}
    if missing := [index for index in wanted if index not in known]:
        raise NoSuchDevice(f"DEVICE={setting}: there is no GPU {missing[0]}; NVML finds {sorted(known)}")
    return tuple(device for device in found if device.index in wanted)


def place(devices: Sequence[Accelerator], staying: Iterable[str], leaving: Iterable[str]) -> Accelerator:
    """Return the device for the next worker: where fewest stay, then where fewest are at all.

    *staying* and *leaving* are the uuids of live workers' devices; those of a former generation leave.
    """
    stay, leave = list(staying), list(leaving)
    return min(devices, key=lambda d: (stay.count(d.uuid), stay.count(d.uuid) + leave.count(d.uuid)))


def memory_share(workers: int, devices: int) -> float:
    """Return the part of its device that one of *workers* may take, when they are spread over *devices*."""
    return 1 / math.ceil(workers / devices)


def fitting_surge(surge: int, free_bytes: int, footprint_bytes: int) -> int:
    """Return how many of *surge* workers more the device has room for.

    *footprint_bytes* is what a running worker holds there; 0, before any is warm, tells nothing.
    """
    if not footprint_bytes:
        return surge
    return min(surge, int(free_bytes / (footprint_bytes * HEADROOM)))
