"""What one worker holds of its device's memory, against what it held after warm-up."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from server.accelerators import Accelerator, read_accelerators
from server.placement import Place
from server.settings import Settings, bytes_of


def _allocated() -> int:
    """Return what torch holds on the device; the context comes on top, which it does not know."""
    return int(torch.cuda.memory_reserved()) if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]


class DeviceMemory:
    """The memory of this process on the device of *place*; on the main processor there is nothing to say.

    *drift_bytes* is the growth since warm-up worth a report, *limit_bytes* what may be held; 0 is no limit.
    """

    def __init__(
        self, place: Place, *, drift_bytes: int, limit_bytes: int,
        read: Callable[[], tuple[Accelerator, ...]] = read_accelerators,
        allocated: Callable[[], int] = _allocated,
    ) -> None:  # fmt: skip
        self._uuid, self._drift_bytes, self._limit_bytes = place.uuid, drift_bytes, limit_bytes
        self._read, self._allocated = read, allocated
        self._used, self._after_warmup, self._reported = 0, 0, False

    @classmethod
    def of(cls, place: Place, settings: Settings) -> DeviceMemory:
        """Return the memory on *place*, its limits being parts of that device."""
        whole_bytes = place.device.total_bytes if place.device else 0
        return cls(
            place,
            drift_bytes=bytes_of(settings.device_memory_drift, whole_bytes),
            limit_bytes=bytes_of(settings.device_memory_limit, whole_bytes),
        )

    def measure(self) -> dict[str, int]:
        """Return ``device_memory_bytes`` of this worker and ``device_others_bytes``; {} without a device.

        In a container NVML may not know this process's pid; then torch's own account has to do.
        """
        device = next((d for d in self._read() if d.uuid == self._uuid), None) if self._uuid else None
        if device is None:
            return {}
        self._used = device.used_by.get(os.getpid()) or self._allocated()
        taken = device.total_bytes - device.free_bytes
        return {"device_memory_bytes": self._used, "device_others_bytes": max(0, taken - self._used)}

    def note_warm(self) -> None:
        """Remember what was measured last as what the worker needs."""
        self._after_warmup = self._used

    def drift(self) -> str:
        """Return by how much the memory has grown since warm-up, once, when that is worth a report."""
        grown = self._used - self._after_warmup if self._after_warmup else 0
        if self._reported or not self._drift_bytes or grown <= self._drift_bytes:
            return ""
        self._reported = True
        return f"{grown} bytes more than after warm-up, DEVICE_MEMORY_DRIFT is {self._drift_bytes}"

    def excess(self) -> str:
        """Return by how much the memory is over its limit; empty while it is not."""
        if not self._limit_bytes or self._used <= self._limit_bytes:
            return ""
        return f"{self._used} bytes of the device, the limit is {self._limit_bytes}"
