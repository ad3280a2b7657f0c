"""One line an event, as text or JSON, for gunicorn, Flask, torch and our own code alike.

Owns handlers and formats; names of events are in `server.events`.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from gunicorn.glogging import Logger

from server.events import render_pairs

TEXT, JSON = "text", "json"


class LineFormatter(logging.Formatter):
    """Render a record as ``time level pid event=... key=value`` or as one JSON object."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self._json = style == JSON

    def format(self, record: logging.LogRecord) -> str:
        pairs: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "pid": record.process,
        }
        event = getattr(record, "event", None)
        pairs |= {"event": event, **record.fields} if event else {"message": record.getMessage()}  # type: ignore[attr-defined]
        if record.exc_info:
            pairs["trace"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(pairs, default=str, ensure_ascii=False)
        head = f"{pairs.pop('time')} {pairs.pop('level')} pid={pairs.pop('pid')} "
        trace = pairs.pop("trace", None)
        line = head + (pairs["message"] if "message" in pairs else render_pairs(pairs))
        return f"{line}\n{trace}" if trace else line


class LineLogger(Logger):  # type: ignore[misc]
    """gunicorn's logger with our line format on its error log; access lines are events of our own."""

    style: str

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        formatter = LineFormatter(self.style)
        for handler in self.error_log.handlers:
            handler.setFormatter(formatter)
        logging.captureWarnings(True)
        # Libraries log below the root logger; one handler there keeps their lines in the same format.
        root = logging.getLogger()
        root.handlers = list(self.error_log.handlers)
        root.setLevel(logging.WARNING)
        logging.getLogger("warmserve").setLevel(self.error_log.level)


class TextLogger(LineLogger):
    """Lines for people: ``time level pid=... event=... key=value``."""

    style = TEXT


class JsonLogger(LineLogger):
    """One JSON object a line."""

    style = JSON


def _timestamp(created: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created)) + f".{int(created % 1 * 1000):03d}Z"
