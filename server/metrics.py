"""What one worker counts and times, in prometheus_client's files of this process.

Made after the fork: a value bound before it would carry the arbiter's pid. State (phases, versions,
memory) is not kept here but read from the board at each scrape, where nothing of a dead worker stays.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, values

from server import events
from server.events import emit
from server.metric_files import reserve

LOG = logging.getLogger("warmserve")

PREFIX = "warmserve"
LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
START_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128)
REFUSALS = (429, 503)  # statuses that say "not now": nothing was wrong with the request
REASONS = ("queue_full", "overloaded", "draining", "rate_limited", "concurrency_limited")
TIERS = ("load", "inference", "keepalive")
# 2**-20 s is about a microsecond. Sums of multiples of it are exact in a double for 272 years of seconds,
# so they do not depend on the order of the files. Otherwise folding two of them could lower a sum by its
# last bit, and Prometheus takes any decrease for a restart at zero.
GRAIN = 2**20


def made_for(model: str, version: str, directory: Path) -> Instruments:
    """Return this worker's instruments, on files of its own in *directory*.

    Without room for the files the worker counts in its memory, where no scrape sees it, and serves: a
    write to a mapped page for which the disk has no block is SIGBUS.
    """
    try:
        reserve(directory, os.getpid())
    except OSError as error:
        emit(LOG, logging.WARNING, events.METRICS_UNAVAILABLE, version=version, detail=str(error))
        values.ValueClass = values.MutexValue
        return Instruments(model, version)
    # prometheus_client chooses when it is imported, which gunicorn has made the arbiter do long ago,
    # before there was a directory. So the choice is made here, for this process, and the pid is its own.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    values.ValueClass = values.MultiProcessValue()
    return Instruments(model, version)


class Instruments:
    """The counters and histograms of one worker, which serves one version of one model.

    Only ``requests_total`` has the version: each swap adds a few series that stay as long as the arbiter.
    """

    def __init__(self, model: str, version: str, registry: CollectorRegistry | None = None) -> None:
        self._labels = {"model": model, "version": version}
        # The scrape reads files, never this registry; it only has to be another one for each worker.
        self._registry = registry or CollectorRegistry()
        self._model = model
        self._add_counters()
        self._add_durations()
        self._batch = self._histogram("batch_size", "Requests computed together in one batch.", BATCH)
        self._begin_at_zero()

    def _add_counters(self) -> None:
        self._requests = self._counter(
            "requests_total", "Requests answered on the data address, by HTTP status.",
            "model", "version", "code",
        )  # fmt: skip
        self._rejected = self._counter(
            "rejected_total", "Requests and connections turned away because of load or a drain.", "reason"
        )
        self._cancelled = self._counter("cancelled_total", "Responses whose client left before the end.")
        self._audio = self._counter("audio_seconds_total", "Seconds of sound made.", "model")

    def _add_durations(self) -> None:
        whole = "Time from a request's first line to the end of its answer"
        self._durations = {
            "total_ms": self._histogram("request_duration_seconds", f"{whole}, if it reached the model."),
            "queue_ms": self._histogram("queue_duration_seconds", "Time a request waited for an instance."),
            "inference_ms": self._histogram("inference_duration_seconds", "Time in the model."),
            "first_byte_ms": self._histogram(
                "time_to_first_byte_seconds",
                "Time from a request's first line to the first byte of its answer.",
            ),
        }
        self._load = self._histogram(
            "load_duration_seconds", "Time to build a worker's instances and bind them.", START_S
        )
        self._warmup = self._histogram(
            "warmup_duration_seconds", "Time of a worker's warm-up, by tier.", START_S, "tier"
        )

    def _begin_at_zero(self) -> None:
        """Make the series that can be named now: a rate needs the zero before the first event."""
        self._requests.labels(**self._labels, code="200")
        self._audio.labels(model=self._model)
        for reason in REASONS:
            self._rejected.labels(reason=reason)
        for tier in TIERS:
            self._warmup.labels(model=self._model, tier=tier)
        for histogram in (*self._durations.values(), self._load):
            histogram.labels(model=self._model)

    def observe(self, fields: Mapping[str, Any]) -> None:
        """Count one request, from the fields of its ``request_served`` event."""
        status = fields["status"]
        model = fields.get("model", "")  # none was named, of several
        self._requests.labels(model=model, version=fields.get("version", ""), code=str(status)).inc()
        if status in REFUSALS:
            self.reject(str(fields.get("code", "other")))
        if fields.get("cancelled"):
            self._cancelled.inc()
        if audio_s := fields.get("audio_s"):
            self._audio.labels(model=model).inc(_exact(audio_s))
        if "batch_size" in fields:
            self._batch.labels(model=model).observe(fields["batch_size"])
        if "queue_ms" in fields:  # it got an instance; probes and refused requests would drown the others
            for name, histogram in self._durations.items():
                self._time(histogram, fields.get(name), model)

    def reject(self, reason: str, count: int = 1) -> None:
        """Count requests or connections that were turned away; *reason* is an error's code."""
        self._rejected.labels(reason=reason).inc(count)

    def warmed(self, tier: str, took_ms: float) -> None:
        """Note what one tier of warm-up took: ``load``, ``inference`` or ``keepalive``."""
        if tier == "load":
            self._time(self._load, took_ms, self._model)
        self._warmup.labels(model=self._model, tier=tier).observe(_exact(took_ms / 1000))

    def _time(self, histogram: Histogram, took_ms: float | None, model: str) -> None:
        if took_ms is not None:
            histogram.labels(model=model).observe(_exact(took_ms / 1000))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_S, *labels: str
    ) -> Histogram:
        return Histogram(
            f"{PREFIX}_{name}", text, ("model", *labels), buckets=buckets, registry=self._registry
        )


def _exact(seconds: float) -> float:
    return round(seconds * GRAIN) / GRAIN
