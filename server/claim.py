"""A worker's hold on its device: pinned before any context is there, so that none comes to be elsewhere."""

from __future__ import annotations

import os

import torch

from server.placement import Place


def pin(place: Place) -> None:
    """Let this process see the device of *place* alone; without one, none."""
    os.environ["CUDA_VISIBLE_DEVICES"] = place.uuid


def claim(place: Place) -> torch.device:
    """Make the context on the pinned device, within its share of the memory, and return the device."""
    if place.device is None:
        return torch.device("cpu")
    torch.cuda.set_per_process_memory_fraction(place.share, 0)  # all that is visible is number 0
    return torch.device("cuda", 0)
