"""What importing makes of a model as its authors ship it, before it is published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch


class MissingExtra(ModuleNotFoundError):
    """A package that only importing needs is not installed; ``extra`` names what to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'warmserve[{extra}]'")
        self.package = package
        self.extra = extra


@dataclass(frozen=True, kw_only=True)
class ImportedVersion:
    """What a version is made of before it is published.

    ``tensors`` share no memory; ``assets`` are files to put beside them, as bytes or as
    the path to copy; the rest goes into the manifest.
    """

    family: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    warmup: tuple[dict[str, Any], ...] = ()
    assets: dict[str, bytes | Path] = field(default_factory=dict)
    licence: str = ""
    source: str = ""


def licence_files(package: str) -> Iterator[Path]:
    """Yield the licence texts that *package* was installed with."""
    for path in files(package) or ():
        if path.parent.name == "licenses":
            yield Path(str(path.locate()))
