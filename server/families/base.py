"""What a model family is: one architecture, its inputs, and how to run it once.

Knows tensors and the version directory it is given; knows nothing of HTTP, gunicorn or other files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

# One tensor of a request or an answer; BYTES, which torch does not have, are object arrays of bytes.
Value: TypeAlias = torch.Tensor | npt.NDArray[np.object_]
SPEED_LIMITS = (0.25, 4.0)
# By the names of the Open Inference Protocol, which has BYTES too.
DTYPES = {
    "BOOL": torch.bool, "UINT8": torch.uint8, "UINT16": torch.uint16, "UINT32": torch.uint32,
    "UINT64": torch.uint64, "INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32,
    "INT64": torch.int64, "FP16": torch.float16, "FP32": torch.float32, "FP64": torch.float64,
    "BF16": torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """One input or output as the Open Inference Protocol tells it; -1 is a size each request chooses.

    ``datatype`` is a key of ``DTYPES``, or BYTES.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class Voice:
    """One voice as clients see it: the name they send, a BCP 47 language tag."""

    id: str
    language: str
    description: str = ""


class SpeechOptions(BaseModel):
    """What one family takes beyond what every speech family takes; each field has a default, here are none.

    A field is an extra field of the speech route, a request parameter of the Open Inference Protocol (or
    an input, where the family declares one of that name), and a key of a warm-up input.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


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
    options: SpeechOptions = field(default_factory=SpeechOptions)


def go_on() -> None:
    """Let an inference go on: the checkpoint of one that nobody can give up."""


@dataclass
class Instance:
    """A built module and what one request at a time needs. Parameters are shared, state is not.

    ``stream`` is the instance's own on an accelerator, so that instances do not wait for each other there.
    ``checkpoint`` ends an inference that nobody waits for any more, by an exception: to be called between
    the passes of one that may take seconds.
    """

    module: torch.nn.Module
    device: torch.device
    number: int
    stream: torch.Stream | None = None
    checkpoint: Callable[[], None] = go_on

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run the block without gradients, on the instance's stream."""
        with torch.inference_mode(), self.stream or nullcontext():
            yield


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

    # Whether the same request always gives the same answer, so that one may be kept and given again.
    deterministic: bool = False

    # What the family takes and gives as tensors; one without inputs has no such door.
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

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

    def infer(
        self, instance: Instance, inputs: Mapping[str, Value], parameters: Mapping[str, Any]
    ) -> Mapping[str, Value]:
        """Run once on *inputs*, which have the datatypes and shapes of ``inputs``; return all of ``outputs``.

        What is returned belongs to the caller: the next request on *instance* must not change it.

        Raises:
            InputError: a value is out of range.
        """
        raise InputError("inputs", f"the family {self.name!r} takes no tensors")


class SpeechFamily(Family):
    """A family that speaks."""

    Options: ClassVar[type[SpeechOptions]] = SpeechOptions

    sample_rate: int

    inputs = (
        TensorSpec("text", "BYTES", (1,)),
        TensorSpec("voice", "BYTES", (1,), optional=True),
        TensorSpec("speed", "FP32", (1,), optional=True),
        TensorSpec("seed", "INT64", (1,), optional=True),
    )
    outputs = (TensorSpec("audio", "FP32", (-1,)), TensorSpec("sample_rate", "INT32", (1,)))

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
        own = {name: inputs[name] for name in self.Options.model_fields if name in inputs}
        common = {name: given for name, given in inputs.items() if name not in own}
        request = SpeechRequest(**{"voice": self.voices()[0].id, **common, "options": self._options(own)})
        return {"audio": torch.cat([*self.speak(instance, request), torch.empty(0)])}

    def infer(
        self, instance: Instance, inputs: Mapping[str, Value], parameters: Mapping[str, Any]
    ) -> Mapping[str, Value]:
        """Speak once: ``audio`` is ``(samples,) float32``, ``sample_rate`` ``(1,) int32`` in Hz."""
        request = self._request(inputs, parameters)
        try:
            audio = torch.cat([*self.speak(instance, request), torch.empty(0)])
        except InputError as error:  # families name the text as the speech route does
            raise InputError("text" if error.field == "input" else error.field, error.message) from None
        return {"audio": audio, "sample_rate": torch.tensor([self.sample_rate], dtype=torch.int32)}

    def _request(self, inputs: Mapping[str, Value], parameters: Mapping[str, Any]) -> SpeechRequest:
        known = [voice.id for voice in self.voices()]
        text = _text(inputs, "text", "")
        voice = _text(inputs, "voice", known[0])
        speed = float(inputs["speed"].item()) if "speed" in inputs else 1.0
        seed = int(inputs["seed"].item()) if "seed" in inputs else 0
        low, high = SPEED_LIMITS
        if not text:
            raise InputError("text", "at least 1 character")
        if voice not in known:
            raise InputError("voice", f"{voice!r} is not one of {', '.join(known)}")
        if not low <= speed <= high:  # a NaN too
            raise InputError("speed", f"{low:g} to {high:g}")
        if seed < 0:
            raise InputError("seed", "at least 0")
        own = {name: parameters[name] for name in self.Options.model_fields if name in parameters}
        own |= {name: _plain(inputs, name) for name in self.Options.model_fields if name in inputs}
        return SpeechRequest(text=text, voice=voice, speed=speed, seed=seed, options=self._options(own))

    def _options(self, given: Mapping[str, Any]) -> SpeechOptions:
        try:
            return self.Options.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(str(first["loc"][0]) if first["loc"] else "parameters", first["msg"]) from None


def _plain(inputs: Mapping[str, Value], name: str) -> Any:
    """Return the one element of an input as JSON would have it."""
    return _text(inputs, name, "") if isinstance(inputs[name], np.ndarray) else inputs[name].item()


def _text(inputs: Mapping[str, Value], name: str, default: str) -> str:
    if name not in inputs:
        return default
    raw: Any = inputs[name].item()
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(name, f"not UTF-8 at byte {error.start}") from None
