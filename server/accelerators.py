"""The machine's accelerators as NVML tells them: no device call, so no context comes to be in the arbiter.

Opened for each reading: forks inherit nothing of it. That NVML is not there is the normal case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml


@dataclass(frozen=True)
class Accelerator:
    """One device that CUDA takes by its ``uuid``: a GPU, or a MIG part of one. ``index`` is the GPU's.

    ``used_by`` is bytes by pid; in a container NVML may know other pids than this process does.
    """

    index: int
    uuid: str
    total_bytes: int
    free_bytes: int
    used_by: Mapping[int, int] = field(default_factory=dict)


def read_accelerators() -> tuple[Accelerator, ...]:
    """Return every device there is now, in PCI order; none where there is no driver.

    Raises:
        pynvml.NVMLError: the driver is there and fails.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_read())
    finally:
        pynvml.nvmlShutdown()


def _read() -> Iterator[Accelerator]:
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        for part in _mig_parts(handle) or [handle]:
            memory = pynvml.nvmlDeviceGetMemoryInfo(part)
            yield Accelerator(index, _text(pynvml.nvmlDeviceGetUUID(part)), int(memory.total),
                              int(memory.free), _used_by(part))  # fmt: skip


def _mig_parts(handle: Any) -> list[Any]:
    """Return the MIG devices of a GPU; with MIG on, CUDA takes those and not the GPU itself."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # a GPU that knows no MIG
        return []
    if not current:
        return []
    found = []
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        except pynvml.NVMLError:  # numbers are not dense: this one is not in use
            continue
    return found


def _used_by(handle: Any) -> dict[int, int]:
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:  # not told to everybody
        return {}
    return {int(p.pid): int(p.usedGpuMemory or 0) for p in processes}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
