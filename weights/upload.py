"""A version's tensors copied to a device, once for all instances of a process.

From pageable memory the driver copies slowly; pinned slots, filled by threads while others are on their way,
come near the bus's rate (25 GB/s on PCIe 4, 53 on PCIe 5).
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

SLOTS = 3  # one being filled, one on its way, one that has just arrived
SLOT_BYTES = 64 << 20


class UploadedVersion:
    """The device's copy of *tensors*, and whether a tensor is part of it (as `MappedVersion.contains`)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._tensors = upload(tensors, device)
        self._storages = {t.untyped_storage().data_ptr() for t in self._tensors.values() if t.numel()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors on the device, by name."""
        return dict(self._tensors)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Tell whether *tensor*'s memory is this copy's."""
        return not tensor.numel() or tensor.untyped_storage().data_ptr() in self._storages


def upload(
    tensors: Mapping[str, torch.Tensor], device: torch.device, *, slot_bytes: int = SLOT_BYTES
) -> dict[str, torch.Tensor]:
    """Return *tensors* on *device*; their bytes are there when this returns."""
    copies = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
    free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
    for _ in range(SLOTS):
        free.put(_Slot(slot_bytes, device))

    def send(part: tuple[str, slice]) -> None:
        name, where = part
        slot = free.get()
        try:
            slot.send(_bytes(tensors[name])[where], _bytes(copies[name])[where])
        finally:
            free.put(slot)

    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    with ThreadPoolExecutor(SLOTS, "upload") as fillers:
        for _sent in fillers.map(send, parts(sizes, slot_bytes)):
            pass  # an error of any part is raised here
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return copies


def parts(sizes: Mapping[str, int], slot_bytes: int) -> Iterator[tuple[str, slice]]:
    """Yield slices of at most *slot_bytes* that together cover each of *sizes* once, in order."""
    for name, size in sizes.items():
        for start in range(0, size, slot_bytes):
            yield name, slice(start, min(start + slot_bytes, size))


class _Slot:
    """A piece of host memory that a copy to the device starts from; one copy at a time."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type != "cpu"
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._sent = torch.Event(device) if pinned else None

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy *source* here and start its copy to *target*, both ``(bytes,) uint8``."""
        if self._sent is not None:
            self._sent.synchronize()  # what was here before has arrived
        filled = self._buffer[: source.numel()]
        filled.copy_(source)
        target.copy_(filled, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
