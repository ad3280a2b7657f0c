"""The embedded default voice for tests: read from its package, saved, and attached from the file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scripts.import_hibari import read_hibari
from scripts.imported import ImportedVersion
from server.families.base import Instance, SpeechRequest
from server.families.hibari import Hibari

FILE_NAME = "model.safetensors"


@lru_cache(maxsize=1)
def imported() -> ImportedVersion:
    """Read the package once a test run."""
    return read_hibari()


def save(directory: Path) -> Hibari:
    """Write the weights into *directory*, and return the family that reads them."""
    save_file(imported().tensors, directory / FILE_NAME)
    return Hibari(directory, imported().config)


def attach(family: Hibari, *, number: int = 0) -> Instance:
    """Build the networks and give them the tensors of the mapped file."""
    module = family.build()
    module.load_state_dict(load_file(family.directory / FILE_NAME), strict=True, assign=True)
    return Instance(module.eval(), torch.device("cpu"), number)


def spoken(family: Hibari, instance: Instance, text: str, **fields: object) -> torch.Tensor:
    """Return everything said for *text*: (samples,) float32."""
    request = SpeechRequest(text=text, voice="heart", **fields)  # type: ignore[arg-type]
    return torch.cat(list(family.speak(instance, request)))
