"""How many inferences one worker has run and what they took, in the shape of Triton's statistics."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
KINDS = ("success", "fail", *PARTS, "cache_hit", "cache_miss")


class Statistics:
    """Counters of this worker since it became ready; several threads count at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {kind: {"count": 0, "ns": 0} for kind in KINDS}
        self._batches: dict[int, dict[str, int]] = {}  # of requests, by how many shared the pass
        self._last_ms = 0  # Unix time in milliseconds

    @contextmanager
    def inference(self) -> Iterator[dict[str, int]]:
        """Count the block as one inference; it fills in the nanoseconds of each of ``KINDS`` it reached.

        And as ``batch_size``, how many requests its pass computed.
        """
        began = time.monotonic_ns()
        parts: dict[str, int] = {}
        try:
            yield parts
        except Exception:
            self._count({"fail": time.monotonic_ns() - began})
            raise
        size = parts.pop("batch_size", 1)
        self._count({"success": time.monotonic_ns() - began, **parts})
        if "compute_infer" not in parts:  # kept, not computed
            return
        with self._lock:
            batch = self._batches.setdefault(size, {"count": 0, "ns": 0})
            batch["count"] += 1
            batch["ns"] += parts["compute_infer"]

    def _count(self, spans: Mapping[str, int]) -> None:
        with self._lock:
            for kind, ns in spans.items():
                self._counts[kind]["count"] += 1
                self._counts[kind]["ns"] += ns
            if "success" in spans:
                self._last_ms = int(time.time() * 1000)

    def snapshot(self, *, name: str, version: str) -> dict[str, Any]:
        """Return the counters as one entry of ``model_stats``."""
        with self._lock:
            counts = {kind: dict(row) for kind, row in self._counts.items()}
            batches = sorted(self._batches.items())
            rows = [_batch(size, **batch) for size, batch in batches]
            last_ms = self._last_ms
        done = counts["success"]["count"]
        passes = sum(row["compute_infer"]["count"] for row in rows)
        return {
            "name": name, "version": version, "last_inference": last_ms, "inference_count": done,
            "execution_count": passes, "inference_stats": counts, "batch_stats": rows,
        }  # fmt: skip


def _batch(size: int, count: int, ns: int) -> dict[str, Any]:
    """Return what *count* requests, of which *size* shared a pass each, took: a pass counts once."""
    return {"batch_size": size, "compute_infer": {"count": -(-count // size), "ns": ns // size}}
