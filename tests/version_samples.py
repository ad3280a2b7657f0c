"""Small version directories for tests, sound or broken byte by byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weights.manifest import FileEntry, Manifest, render

WEIGHTS = "model.safetensors"
SOUND_TABLE = {
    "bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "flag": {"dtype": "BOOL", "shape": [], "data_offsets": [8, 9]},
    "none": {"dtype": "BF16", "shape": [0, 4], "data_offsets": [9, 9]},
    "odd": {"dtype": "F16", "shape": [3, 1], "data_offsets": [9, 15]},
}
SOUND_DATA = bytes(range(8)) + b"\x01" + bytes(range(6))


def safetensors(table: Any = SOUND_TABLE, data: bytes = SOUND_DATA) -> bytes:
    """Return a safetensors file; *table* may be the header's bytes."""
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def manifest_for(files: Mapping[str, bytes], /, **fields: Any) -> Manifest:
    """Return the manifest that fits *files*."""
    entries = tuple(
        FileEntry(path, len(raw), hashlib.sha256(raw).hexdigest()) for path, raw in sorted(files.items())
    )
    defaults: dict[str, Any] = {
        "name": "tiny",
        "family": "tiny",
        "config": {"width": 2},
        "precision": "fp32",
        "created": "2026-01-31T12:00:00Z",
        "files": entries,
    }
    return Manifest(**(defaults | fields))


def make_version(
    directory: Path,
    files: Mapping[str, bytes] | None = None,
    entries: tuple[FileEntry, ...] | None = None,
    **fields: Any,
) -> Path:
    """Write *files* (one sound safetensors file and an asset by default) and a manifest.

    The manifest fits them unless *entries* says something else.
    """
    if entries is not None:
        fields["files"] = entries
    files = {WEIGHTS: safetensors(), "asset/words.txt": b"one two\n"} if files is None else files
    for path, raw in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(raw)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_bytes(render(manifest_for(files, **fields)))
    return directory
