"""Names of log events and how a line is written. An event is a name in the past tense and its fields.

Knows nothing of where lines go; `server.logs` owns handlers and formats.
"""

from __future__ import annotations

import logging
from typing import Any

VERSION_PREPARED = "version_prepared"
VERSION_REFUSED = "version_refused"
WORKER_SPAWNED = "worker_spawned"
WORKER_WARMED = "worker_warmed"
WORKER_READY = "worker_ready"
WORKER_DRAINED = "worker_drained"
WORKER_LOST = "worker_lost"
WORKER_FAILED = "worker_failed"
REQUEST_SERVED = "request_served"
REQUEST_FAILED = "request_failed"
REQUEST_REFUSED = "request_refused"


def emit(log: logging.Logger | Any, level: int, event: str, **fields: Any) -> None:
    """Log *event* with its *fields*; fields that are None are left out."""
    kept = {key: value for key, value in fields.items() if value is not None}
    log.log(level, event, extra={"event": event, "fields": kept})


def render_pairs(pairs: dict[str, Any]) -> str:
    """Return ``key=value`` pairs on one line; values with spaces, quotes or line breaks are quoted."""
    return " ".join(f"{key}={_quote(value)}" for key, value in pairs.items())


def _quote(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and not any(c in text for c in ' "=\n\r\t'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'
