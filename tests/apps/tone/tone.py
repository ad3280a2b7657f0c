"""A tiny family to serve in tests: speech is a sine, and every way to be a bad version can be asked for."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from server.families.base import Instance, SpeechFamily, SpeechOptions, SpeechRequest, Voice

RATE = 24000
SECONDS = 0.1


class Oscillator(torch.nn.Module):
    """One small parameter that is heard, and ballast to give the file a size."""

    def __init__(self, size: int, ballast: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.empty(size, device="meta"))
        if ballast:
            self.ballast = torch.nn.Parameter(torch.empty(ballast, device="meta"))

    def forward(self, samples: int, speed: float, octave: int = 0) -> torch.Tensor:
        """Return ``(samples / speed,) float32``; reads every byte of the ballast."""
        count = round(samples / speed)
        step = 2 * math.pi * 440 * 2**octave / RATE
        wave = torch.sin(torch.arange(count, device=self.gain.device) * step) * self.gain[0]
        return wave + self.ballast.sum() * 0 if hasattr(self, "ballast") else wave


class ToneOptions(SpeechOptions):
    """``octave`` moves the pitch."""

    octave: int = Field(0, ge=-2, le=2)


class Tone(SpeechFamily):
    """Texts are instructions; any other text is one piece of a tenth of a second.

    ``sleep:S`` waits first, ``seconds:S`` is that long, ``raise!`` fails, ``nan!`` gives NaN.
    ``pieces:N:S`` is N pieces with S seconds before each. ``gate:PATH`` is one piece, and once the file
    PATH holds a number, that many more; if it holds ``raise!``, a failure.

    ``config``: ``fail`` names a way to fail, ``warmup_delay_s`` makes warm-up slow.
    """

    name = "tone"
    sample_rate = RATE
    Options = ToneOptions

    def __init__(self, directory: Any, config: Mapping[str, Any]) -> None:
        super().__init__(directory, config)
        if config.get("forks") and os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        if config.get("fail") == "context":
            torch.cuda._initialized = True  # as after a first use of a GPU
        if config.get("fail") == "init":
            raise ValueError(self.message("the configuration is no good"))
        self.rehearsing = False

    def message(self, otherwise: str) -> str:
        """Return what an error says: ``config["message"]``, UTF-16 in hexadecimal, so many times."""
        if "message" not in self.config:
            return otherwise
        text = bytes.fromhex(self.config["message"]).decode("utf-16", "surrogatepass")
        return text * int(self.config.get("times", 1))

    def voices(self) -> tuple[Voice, ...]:
        return (Voice("sine", "en-US", "a pure tone"), Voice("soft", "en-US", "half as loud"))

    def build(self) -> torch.nn.Module:
        if self.config.get("fail") == "build":
            raise RuntimeError("the network cannot be built")
        return Oscillator(self.config.get("size", 16), self.config.get("ballast", 0))

    def warmup_inputs(self) -> tuple[Mapping[str, Any], ...]:
        return ({"text": "hello"}, {"text": "hello", "voice": "soft", "speed": 2.0, "octave": -1})

    def rehearse(self, instance: Instance, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        time.sleep(self.config.get("warmup_delay_s", 0) / 2)
        _fail(self.config.get("fail", ""), self.message("warm-up went wrong"))
        if "only_one" in self.config and not hasattr(self, "room"):
            # Raises BlockingIOError in every process but the first.
            self.room = open(self.config["only_one"], "w")  # noqa: SIM115 - held as long as the process lives
            fcntl.flock(self.room, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.rehearsing = True
        outputs = super().rehearse(instance, inputs)
        self.rehearsing = False
        spoil = {"nan": math.nan, "silence": 0.0}.get(self.config.get("fail", ""))
        if spoil is not None:
            outputs = {"audio": outputs["audio"] * spoil}
        return {"audio": torch.empty(0)} if self.config.get("fail") == "empty" else outputs

    def speak(self, instance: Instance, request: SpeechRequest) -> Iterator[torch.Tensor]:
        word, _, number = request.text.partition(":")
        if word == "raise!":
            raise RuntimeError("asked to fail")
        if word == "sleep":
            time.sleep(float(number))
        if self.config.get("dies_on_request") and not self.rehearsing:
            os.kill(os.getpid(), signal.SIGKILL)
        octave = request.options.octave if isinstance(request.options, ToneOptions) else 0
        samples = int(RATE * float(number)) if word == "seconds" else int(RATE * SECONDS)
        for _ in _pieces(word, number):
            tone = instance.module(samples, request.speed, octave)
            if word == "nan!":
                tone = tone * math.nan
            yield tone * (0.5 if request.voice == "soft" else 1.0)


def _pieces(word: str, rest: str) -> Iterator[None]:
    """Yield once a piece, when it is time for it."""
    if word == "pieces":
        count, _, pause = rest.partition(":")
        for _ in range(int(count)):
            time.sleep(float(pause))
            yield
        return
    yield
    if word == "gate":
        for _ in range(_behind_gate(Path(rest))):
            yield


def _behind_gate(path: Path) -> int:
    while not (path.exists() and path.read_text()):
        time.sleep(0.005)
    if path.read_text() == "raise!":
        raise RuntimeError("asked to fail behind the gate")
    return int(path.read_text())


def _fail(how: str, message: str) -> None:
    """End this process, or this warm-up, in the way that *how* names."""
    signals = {"segv": signal.SIGSEGV, "bus": signal.SIGBUS, "kill": signal.SIGKILL}
    if how == "raise":
        raise RuntimeError(message)
    if how == "system exit":
        raise SystemExit(5)
    if how == "exit":
        os._exit(7)
    if how == "hang":
        time.sleep(600)
    if how in signals:
        os.kill(os.getpid(), signals[how])
        time.sleep(10)
