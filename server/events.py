"""Names of log events and how a line is written. An event is a name in the past tense and its fields.

Knows nothing of where lines go; `server.logs` owns handlers and formats.
"""

from __future__ import annotations

import logging
from typing import Any

ARBITER_STARTED = "arbiter_started"
ARBITER_GAVE_UP = "arbiter_gave_up"
DEVICE_FILLED = "device_filled"
DEVICE_MEMORY_DRIFTED = "device_memory_drifted"
GENERATION_RELEASED = "generation_released"
LOOP_FAILED = "loop_failed"
QUARANTINE_NOT_SAVED = "quarantine_not_saved"
METRICS_NOT_FOLDED = "metrics_not_folded"
METRICS_UNAVAILABLE = "metrics_unavailable"
REQUEST_FAILED = "request_failed"
BATCH_SPLIT = "batch_split"
CACHE_UNAVAILABLE = "cache_unavailable"
REQUEST_REFUSED = "request_refused"
REQUEST_SERVED = "request_served"
RESPONSE_ABORTED = "response_aborted"
SETTINGS_REFUSED = "settings_refused"
SETTING_NEEDS_RESTART = "setting_needs_restart"
SURGE_WITHHELD = "surge_withheld"
SWAP_FINISHED = "swap_finished"
SWAP_REFUSED = "swap_refused"
SWAP_ROLLED_BACK = "swap_rolled_back"
SWAP_STARTED = "swap_started"
VERSION_PREPARED = "version_prepared"
VERSION_REFUSED = "version_refused"
WARMED = "warmed"
WORKER_DEFUNCT = "worker_defunct"
WORKER_DIED = "worker_died"
WORKER_DRAINED = "worker_drained"
WORKER_DRAINING = "worker_draining"
WORKER_FAILED = "worker_failed"
WORKER_OVERDUE = "worker_overdue"
WORKER_READY = "worker_ready"
WORKER_SPAWNED = "worker_spawned"
WORKER_WORN = "worker_worn"


def emit(log: logging.Logger, level: int, event: str, *, exc_info: bool = False, **fields: Any) -> None:
    """Log *event* with its *fields*, those that are None left out; with *exc_info*, the trace after it."""
    kept = {key: value for key, value in fields.items() if value is not None}
    log.log(level, event, exc_info=exc_info, extra={"event": event, "fields": kept})


def render_pairs(pairs: dict[str, Any]) -> str:
    """Return ``key=value`` pairs on one line; values with spaces, quotes or line breaks are quoted."""
    return " ".join(f"{key}={_quote(value)}" for key, value in pairs.items())


def _quote(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and not any(c in text for c in ' "=\n\r\t'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'
