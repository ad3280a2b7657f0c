"""Warm-up: what a worker does before its first request, and the checks a version has to pass in it.

Tier 1 builds and binds; tier 2 runs real inference over the declared inputs on every instance; tier 3,
`server.keepalive`, rehearses on instances that nobody has used for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import torch

from server.families.base import Family, Instance

SILENCE = 1e-4  # of full scale, -80 dB: no voice is that quiet, a network of zeros is
LONGER = 2  # a text with so many times the characters of another may not give less sound


class WarmupFailed(Exception):
    """An output no client should get. ``reason`` is one word for logs and status."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def warm_up(
    family: Family, instances: Sequence[Instance], inputs: Sequence[Mapping[str, Any]], threads: Executor
) -> float:
    """Run every input on every instance, check what comes out; return the first input's longest seconds.

    On *threads*, one for each instance, which are those that will compute: what torch and its libraries
    prepare at a first call, they prepare for a thread.

    Raises:
        WarmupFailed: an output is empty, not finite, silent, or shorter than that of a much shorter text;
            or the sample rate is not the declared one.
        Exception: whatever the family raises.
    """
    _check_sample_rate(family)
    together = threading.Barrier(len(instances))  # no thread takes a second instance
    alone = threading.Lock()

    def warm(instance: Instance) -> float:
        together.wait()
        with alone:
            return _warm_up_one(family, instance, inputs)

    return max(future.result() for future in [threads.submit(warm, instance) for instance in instances])


def _warm_up_one(family: Family, instance: Instance, inputs: Sequence[Mapping[str, Any]]) -> float:
    sizes, spans = [], []
    for number, declared in enumerate(inputs):
        began = time.monotonic()
        sizes.append(rehearse(family, instance, declared, f"warm-up input {number}"))
        spans.append(time.monotonic() - began)
    _check_lengths(inputs, sizes)
    return spans[0]


def rehearse(family: Family, instance: Instance, declared: Mapping[str, Any], what: str) -> dict[str, int]:
    """Run *declared* once and check the outputs; return their numbers of elements.

    Raises: as `warm_up`.
    """
    with instance.computing():
        # On the host: reading a value waits for the device, so what was timed has been computed.
        outputs = {name: out.cpu() for name, out in family.rehearse(instance, declared).items()}
        for name, tensor in outputs.items():
            _check(tensor, f"output {name!r} of {what}")
    return {name: tensor.numel() for name, tensor in outputs.items()}


def _check(tensor: torch.Tensor, what: str) -> None:
    if tensor.numel() == 0:
        raise WarmupFailed("warmup_empty", f"{what} is empty")
    if not tensor.dtype.is_floating_point:
        return
    if not bool(torch.isfinite(tensor).all()):
        raise WarmupFailed("warmup_not_finite", f"{what} holds NaN or infinity")
    if float(tensor.abs().max()) < SILENCE:
        raise WarmupFailed("warmup_silent", f"{what} never exceeds {SILENCE:g}")


def _check_lengths(inputs: Sequence[Mapping[str, Any]], sizes: Sequence[Mapping[str, int]]) -> None:
    """Compare inputs that differ in their text alone: more text is not less sound."""
    spoken = [(str(declared["text"]), _without_text(declared), size["audio"], number)
              for number, (declared, size) in enumerate(zip(inputs, sizes, strict=True))
              if "text" in declared and "audio" in size]  # fmt: skip
    for short, rest, short_size, first in spoken:
        for long, same, long_size, second in spoken:
            if rest == same and len(long) >= LONGER * len(short) and long_size < short_size:
                detail = f"warm-up input {second} has more text than {first}, but {long_size} samples"
                raise WarmupFailed("warmup_length", f"{detail} where {first} has {short_size}")


def _without_text(declared: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in declared.items() if key != "text"}


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
