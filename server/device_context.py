"""Whether this process has a device context: no fork can use one, so whoever forks must have none."""

from __future__ import annotations

import os
from pathlib import Path

import torch

DESCRIPTORS = Path("/proc/self/fd")
DRIVER = "/dev/nvidia-uvm"  # opened by the driver when it is initialised for computing; NVML does not


class DeviceContextMade(Exception):
    """The family used a device while it was only to read its configuration and assets."""

    reason = "device_context"

    def __init__(self) -> None:
        super().__init__("there is a device context before the fork; devices are for workers, in build()")


def has_device_context(descriptors: Path = DESCRIPTORS, driver: str = DRIVER) -> bool:
    """Tell whether torch or the driver has been initialised in this process."""
    return torch.cuda.is_initialized() or any(  # type: ignore[no-untyped-call]
        _target(link).startswith(driver) for link in descriptors.iterdir()
    )


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile: the descriptor of the listing itself is one
        return ""
