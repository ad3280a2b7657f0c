"""What a model family is: one architecture, its inputs, and how to run it once.

Knows tensors and the version directory it is given; knows nothing of HTTP, gunicorn or other files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class Voice:
    """One voice as clients see it: the name they send, a BCP 47 language tag."""

    id: str
    language: str
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class SpeechRequest:
    """One text to speak, already checked against the limits and the voices.

    ``speed`` is a factor on the speaking rate (2.0 halves the duration); the same ``seed`` gives the
    same bytes.
    """

    text: str
    voice: str
    speed: float = 1.0
    seed: int = 0
    language: str | None = None
    instructions: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Instance:
    """A built module and what one request at a time needs. Parameters are shared, state is not."""

    module: torch.nn.Module
    device: torch.device
    number: int


class InputError(Exception):
    """The request cannot be served by this family: ``field`` names the field, ``message`` the limit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Family(ABC):
    """One architecture. One object per worker and version; instances hold what requests change.

    Args:
        directory: the version directory; assets (tokenizer, lexicon) are read from it.
        config: the manifest's ``config``.
    """

    name: ClassVar[str]

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self.directory = directory
        self.config = config

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """Return the module with every parameter on the meta device and every buffer real."""

    @abstractmethod
    def warmup_inputs(self) -> tuple[Mapping[str, Any], ...]:
        """Return the inputs to run before traffic when the manifest declares none.

        Each is a JSON object in the terms of the manifest's ``warmup`` list; together they reach every
        code path and shape a request can reach.
        """

    @abstractmethod
    def rehearse(self, instance: Instance, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Run one real inference for *inputs* and return its named outputs, for the server to check.

        Raises:
            InputError: *inputs* is not something a request could ask for.
        """


class SpeechFamily(Family):
    """A family that speaks."""

    sample_rate: int

    @abstractmethod
    def voices(self) -> tuple[Voice, ...]:
        """List the voices of this version; the first is the default."""

    @abstractmethod
    def speak(self, instance: Instance, request: SpeechRequest) -> Iterator[torch.Tensor]:
        """Yield the audio piece by piece: ``(samples,) float32`` in [-1, 1] at ``sample_rate``.

        Raises:
            InputError: the text holds nothing that can be spoken, or a field is out of range.
        """

    def rehearse(self, instance: Instance, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Speak once; the output is named ``audio``."""
        voice = self.voices()[0].id
        request = SpeechRequest(**{"voice": voice, **inputs})
        return {"audio": torch.cat([*self.speak(instance, request), torch.empty(0)])}
