"""The tone family with faults that show only once it serves: for tests of what a worker does about them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tone import Tone

from server.families.base import Instance, SpeechRequest

MEGABYTE = 1 << 20


class Faulty(Tone):
    """Beside the texts of `Tone`: ``leak:MB`` keeps memory, ``segv!`` crashes, ``device!`` breaks the device.

    ``oom:N`` finds the device's memory full N times, ``late oom!`` after its first piece.

    ``config``: ``load_delay_s`` makes loading slow, ``nan_from`` is the number of the first call that gives
    NaN. ``gate`` is a file that a keep-alive waits for to go away; while it holds ``raise!``, it fails.
    """

    name = "faulty"

    def __init__(self, directory: Any, config: Mapping[str, Any]) -> None:
        super().__init__(directory, config)
        self.kept: list[bytearray] = []
        self.calls = 0
        self.full: dict[int, int] = {}  # by a request's seed
        self.rehearsed = 0

    def build(self) -> torch.nn.Module:
        time.sleep(self.config.get("load_delay_s", 0))
        return super().build()

    def rehearse(self, instance: Instance, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        self.rehearsed += 1
        if self.rehearsed > len(self.warmup_inputs()):  # with one instance: warm-up is over
            self._wait_at(Path(self.config.get("gate", "/nowhere")))
        return super().rehearse(instance, inputs)

    def _wait_at(self, gate: Path) -> None:
        while gate.exists():
            if gate.read_text() == "raise!":
                raise RuntimeError("asked to fail in keep-alive")
            time.sleep(0.005)

    def speak(self, instance: Instance, request: SpeechRequest) -> Iterator[torch.Tensor]:
        word, _, number = request.text.partition(":")
        if word == "leak":
            self.kept.append(bytearray(os.urandom(MEGABYTE)) * int(number))
        if word == "segv!":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(10)  # another thread may be the one that takes the signal
        if word == "device!":
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        if word == "oom":
            self.full[request.seed] = self.full.get(request.seed, 0) + 1
            if self.full[request.seed] <= int(number):
                raise torch.OutOfMemoryError("CUDA out of memory.")
        self.calls += 1
        spoiled = self.calls >= self.config.get("nan_from", float("inf"))
        for piece in super().speak(instance, request):
            yield piece * float("nan") if spoiled else piece
            if word == "late oom!":
                time.sleep(0.2)  # long enough that the piece has been sent
                raise torch.OutOfMemoryError("CUDA out of memory.")
