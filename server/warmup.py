"""Warm-up: what a worker does before its first request, and the checks a version has to pass in it.

Tier 1 builds and binds, tier 2 runs real inference over the declared inputs on every instance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from server.families.base import Family, Instance

SILENCE = 1e-4  # of full scale, -80 dB: no voice is that quiet, a network of zeros is


class WarmupFailed(Exception):
    """An output no client should get. ``reason`` is one word for logs and status."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def warm_up(family: Family, instances: Sequence[Instance], inputs: Sequence[Mapping[str, Any]]) -> None:
    """Run every input on every instance and check what comes out.

    Raises:
        WarmupFailed: an output is empty, not finite, silent, or the sample rate is not the declared one.
        Exception: whatever the family raises.
    """
    _check_sample_rate(family)
    with torch.inference_mode():
        for instance in instances:
            for number, declared in enumerate(inputs):
                outputs = family.rehearse(instance, declared)
                for name, tensor in outputs.items():
                    _check(tensor, f"output {name!r} of warm-up input {number}")


def _check(tensor: torch.Tensor, what: str) -> None:
    if tensor.numel() == 0:
        raise WarmupFailed("warmup_empty", f"{what} is empty")
    if not tensor.dtype.is_floating_point:
        return
    if not bool(torch.isfinite(tensor).all()):
        raise WarmupFailed("warmup_not_finite", f"{what} holds NaN or infinity")
    if float(tensor.abs().max()) < SILENCE:
        raise WarmupFailed("warmup_silent", f"{what} never exceeds {SILENCE:g}")


def _check_sample_rate(family: Family) -> None:
    declared = family.config.get("sample_rate")
    actual = getattr(family, "sample_rate", None)
    if declared is not None and actual is not None and declared != actual:
        raise WarmupFailed(
            "warmup_sample_rate", f"config.sample_rate is {declared}, the family gives {actual}"
        )


@contextmanager
def timed(report: Callable[[float], None]) -> Iterator[None]:
    """Hand *report* the milliseconds the block took, if it ends well."""
    started = time.monotonic()
    yield
    report((time.monotonic() - started) * 1000)
