"""A family whose pieces come when the test says so, behind the data application."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flask import Flask

PIECE = 2400


class Script:
    """A family's `speak` under the test's control: each piece, and the end, come when told to."""

    def __init__(self, app: Flask, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app, self.pool = app, app.config["SERVED"].pool
        self.told: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        self.begun = 0
        self.closed = threading.Event()
        monkeypatch.setattr(app.config["SERVED"].family, "speak", self._speak)

    def say(self, *pieces: int | Exception) -> None:
        """Let each piece out: a length in samples, 0 for the end, or what to raise."""
        for piece in pieces:
            self.told.put(piece)

    def _speak(self, _instance: Any, _request: Any) -> Iterator[torch.Tensor]:
        buffer = torch.empty(PIECE)  # used again for each piece, as a family may
        try:
            while piece := self.told.get(timeout=20):
                if isinstance(piece, Exception):
                    raise piece
                self.begun += 1
                buffer.copy_(torch.sin(torch.arange(PIECE) * 0.1 * self.begun) * 0.5)
                yield buffer[:piece]
        finally:
            self.closed.set()

    def ask(self, **fields: Any) -> Any:
        body = {"model": "tone", "input": "three words here", "voice": "sine", **fields}
        return self.app.test_client().post("/v1/audio/speech", json=body)

    def idle(self) -> bool:
        """Tell whether the instance came back in time."""
        with self.pool.lease(timeout_s=10):
            return True
