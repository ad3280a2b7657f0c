"""Publish versions of the tone family (tests/apps/tone): good ones, and bad ones of every kind."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from weights.store import Store, Version
from weights.writing import write_version


def publish_tone(
    models: Path, *, gain: float = 0.5, ballast_mb: int = 0, family: str = "tone", **config: Any
) -> Version:
    """Publish one more version whose speech is a sine of amplitude *gain*; *config* is the family's."""
    tensors = {"gain": torch.full((16,), gain)}
    if ballast_mb:
        tensors["ballast"] = torch.arange(ballast_mb * 2**18, dtype=torch.float32)
    config = {"sample_rate": 24000, "ballast": ballast_mb * 2**18, **config}
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch) / "version"
        write_version(staged, {"model.safetensors": tensors}, name="tone", family=family, config=config)
        return Store(models).publish(staged)


def publish_copy(models: Path, source: Version) -> Version:
    """Publish a copy of *source* the way an operator may: copy to a temporary name, then rename."""
    target = models / f"v{Store(models).versions()[-1].number + 1}"
    temporary = models / ".copying"
    shutil.copytree(source.path, temporary)
    temporary.rename(target)
    return Store(models).versions()[-1]


def damage_weights(version: Version, how: str) -> None:
    """Spoil a published version behind the store's back: truncated, checksum, missing, manifest, format."""
    weights = version.path / "model.safetensors"
    manifest = version.path / "manifest.json"
    match how:
        case "truncated":
            _replace(weights, weights.read_bytes()[:-8])
        case "checksum":
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            _replace(weights, bytes(content))
        case "missing":
            weights.unlink()
        case "manifest":
            _replace(manifest, b"{")
        case "format":
            _replace(manifest, manifest.read_bytes().replace(b'"format": 1', b'"format": 99'))
        case _:
            raise ValueError(how)


def _replace(path: Path, content: bytes) -> None:
    """A new inode: overwriting in place would change the bytes under whoever maps the old ones."""
    temporary = path.with_name(".new")
    temporary.write_bytes(content)
    temporary.replace(path)
