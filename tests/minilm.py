"""The sentence-embedding model for tests: imported once a test run, and attached from its file."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from scripts.import_minilm import read_minilm
from server.families.base import Instance
from server.families.minilm import MiniLM
from weights.manifest import Manifest
from weights.store import Store
from weights.writing import write_version


def publish_minilm(models: Path) -> Manifest:
    """Publish the package's model into *models*."""
    found = read_minilm()
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch) / "version"
        manifest = write_version(
            staged, {"model.safetensors": found.tensors}, name="minilm",
            family=found.family, config=found.config, assets=found.assets,
        )  # fmt: skip
        Store(models).publish(staged)
    return manifest


@lru_cache(maxsize=1)
def built() -> tuple[MiniLM, Instance]:
    """Return the family and an instance of it."""
    with tempfile.TemporaryDirectory() as scratch:
        config = publish_minilm(Path(scratch)).config
        directory = Path(scratch) / "v1"
        family = MiniLM(directory, config)
        module = family.build()
        module.load_state_dict(load_file(directory / "model.safetensors"), strict=True, assign=True)
    return family, Instance(module.eval(), torch.device("cpu"), 0)
