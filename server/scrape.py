"""The answer to a scrape: what workers counted, from their files, and what is true now, from the board."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from server.board import Board
from server.metric_files import metrics_directory, readable, reading
from server.metrics import PREFIX
from server.rollout import Phase

MEDIA_TYPE = CONTENT_TYPE_PLAIN_0_0_4
PHASES = (Phase.WARMING, Phase.READY, Phase.DRAINING)  # a failed worker has no slot
RESULTS = ("done", "rolled_back", "refused")
REASONS = ("SIGKILL", "SIGSEGV", "boot_timeout", "warmup_failed")  # known beforehand, so they begin at zero


def expose(board: Board) -> bytes:
    """Return every metric of *board*'s arbiter in the Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FilesCollector(board))
    registry.register(BoardCollector(board))
    return generate_latest(registry)


class FilesCollector(Collector):
    """Counters and histograms of all workers that ever were, summed."""

    def __init__(self, board: Board) -> None:
        self._directory = metrics_directory(board)

    def collect(self) -> Iterable[Metric]:
        """Read one consistent set of files. prometheus_client's own collector knows no lock."""
        with reading(self._directory):
            paths = [str(path) for path in readable(self._directory)]
            metrics: Iterable[Metric] = MultiProcessCollector.merge(paths)
        return metrics


class BoardCollector(Collector):
    """State, derived at each scrape: a dead worker's slot is clear, so nothing of it can stay."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one reading of the board."""
        workers = self._board.workers()
        arbiter = self._board.arbiter.read() or {}
        yield _phases(workers.values())
        yield _versions(workers.values())
        yield from _swaps(arbiter.get("swaps", {}))
        restarts = CounterMetricFamily(
            f"{PREFIX}_worker_restarts", "Workers that ended without being told to.", labels=["reason"]
        )
        for reason, count in (dict.fromkeys(REASONS, 0) | arbiter.get("restarts", {})).items():
            restarts.add_metric([reason], count)
        yield restarts
        yield _mapped(arbiter.get("mapped", {}))
        yield from _memory(workers)


def _phases(workers: Iterable[Mapping[str, Any]]) -> Metric:
    counts = Counter(worker.get("phase") for worker in workers)
    family = GaugeMetricFamily(f"{PREFIX}_workers", "Live workers by what they do.", labels=["phase"])
    for phase in PHASES:
        family.add_metric([phase.value], counts[phase.value])
    return family


def _versions(workers: Iterable[Mapping[str, Any]]) -> Metric:
    served = {(w["model"], w["version"]) for w in workers if w.get("phase") == Phase.READY.value}
    family = GaugeMetricFamily(
        f"{PREFIX}_model_version_info", "1 for each version that ready workers serve.",
        labels=["model", "version"],
    )  # fmt: skip
    for labels in sorted(served):
        family.add_metric(labels, 1)
    return family


def _swaps(swaps: Mapping[str, Any]) -> Iterator[Metric]:
    total = CounterMetricFamily(
        f"{PREFIX}_swaps", "Swaps that have ended; the first boot is one.", labels=["result"]
    )
    duration = SummaryMetricFamily(
        f"{PREFIX}_swap_duration_seconds", "Time from the request for a swap to its end.", labels=["result"]
    )
    for result in RESULTS:
        count, seconds = swaps.get(result, (0, 0.0))
        total.add_metric([result], count)
        duration.add_metric([result], count, seconds)
    yield total
    yield duration


def _mapped(mapped: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(
        f"{PREFIX}_weights_mapped_bytes", "Weights mapped once for all workers of a version.",
        labels=["version"],
    )  # fmt: skip
    for version, size in mapped.items():
        family.add_metric([version], size)
    return family


def _memory(workers: Mapping[int, Mapping[str, Any]]) -> Iterator[Metric]:
    private = GaugeMetricFamily(
        f"{PREFIX}_weights_private_bytes", "Weights a worker holds outside the shared mapping; 0 is right.",
        labels=["slot"],
    )  # fmt: skip
    device = GaugeMetricFamily(
        f"{PREFIX}_device_memory_bytes", "Device memory a worker holds.", labels=["slot"]
    )
    memory = GaugeMetricFamily(
        f"{PREFIX}_worker_memory_bytes", "Memory of a worker: resident, and unique to it.",
        labels=["slot", "kind"],
    )  # fmt: skip
    for number, worker in workers.items():
        slot = str(number)
        if "weights_private_bytes" in worker:
            private.add_metric([slot], worker["weights_private_bytes"])
        if "device_memory_bytes" in worker:
            device.add_metric([slot], worker["device_memory_bytes"])
        for kind in ("resident", "unique"):
            if f"{kind}_bytes" in worker:
                memory.add_metric([slot, kind], worker[f"{kind}_bytes"])
    yield private
    yield device
    yield memory
