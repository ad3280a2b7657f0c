"""Figures as rows of one Markdown table, with the machine they were taken on."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Figure:
    """One measured figure. ``target`` is empty where none was set."""

    what: str
    value: str
    target: str = ""


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a Markdown table."""
    rows = [f"| {f.what} | {f.value} | {f.target} |" for f in figures]
    return "\n".join(["| what | measured | target |", "|---|---|---|", *rows])


def machine() -> str:
    """Name the machine in one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
    return (
        f"{os.cpu_count()} cores ({model}), Linux {platform.release()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that *share* (0 to 1) of *values* do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
