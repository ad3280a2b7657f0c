"""What a device's errors mean: for the one request, or for everything else on that device too."""

from __future__ import annotations

import torch


def is_broken(device: torch.device, error: Exception) -> bool:
    """Tell whether *error* left the context on *device* unusable: nothing computed there is right any more.

    An accelerator's errors stick: after an illegal access or a failed launch every later call fails too
    (CUDA's programming guide on error handling), also where the first one came as another exception.
    """
    if isinstance(error, torch.AcceleratorError):
        return True
    if device.type == "cpu":
        return False
    try:
        torch.accelerator.synchronize(device)
    except Exception:
        return True
    return False


def free_memory() -> None:
    """Give the allocator's unused blocks back to the device; nothing where there is no device."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
