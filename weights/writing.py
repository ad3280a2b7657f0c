"""Making a version directory from tensors in memory: an operator's step, never a server's.

What is guaranteed of each safetensors file: its data starts at a multiple of 64 bytes; every tensor
starts at a multiple of its element size; every tensor of a multiple of 64 bytes starts at one. The
format allows no hole between tensors, so the others cannot all be aligned to 64.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from weights.checksums import file_sha256
from weights.confined import open_directory, open_file
from weights.errors import ManifestInvalid, TiedTensors, VersionExists
from weights.header import LENGTH_BYTES
from weights.manifest import FILE_NAME, FileEntry, Manifest, render, utc_now
from weights.mapping import TORCH_DTYPES

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def write_version(
    directory: Path,
    tensors_by_file: Mapping[str, Mapping[str, torch.Tensor]],
    *,
    name: str,
    family: str,
    config: Mapping[str, Any],
    precision: str = "fp32",
    warmup: Iterable[Mapping[str, Any]] = (),
    licence: str = "",
    source: str = "",
    created: str | None = None,
    assets: Mapping[str, bytes | Path] | None = None,
    prefixes: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a complete version into *directory*, ready for ``Store.publish``, and return its manifest.

    Args:
        directory: made here; may exist only if it is empty.
        tensors_by_file: tensors of any dtype of the format, by file (``model.safetensors``) and name.
        assets: other files by path, as their bytes or as a file to copy.
        prefixes: by file, what to put before its tensor names when they are read.
        created: ISO 8601 in UTC; now, if not given. The same arguments then give the same bytes.

    Raises:
        VersionExists: *directory* holds something.
        TiedTensors: two tensors of one file share memory.
        ManifestInvalid, PathEscapes: a field or a path is not what a manifest may hold.
    """
    for path in tensors_by_file:
        if not path.endswith(".safetensors"):
            raise ManifestInvalid("files", f"{path!r} holds tensors and does not end in .safetensors")
    paths = [*tensors_by_file, *(assets or {})]
    prefixes = prefixes or {}
    blank = tuple(FileEntry(path, 0, "0" * 64, prefixes.get(path, "")) for path in paths)
    fields: dict[str, Any] = {
        "name": name,
        "family": family,
        "config": config,
        "precision": precision,
        "created": created or utc_now(),
        "warmup": tuple(warmup),
        "licence": licence,
        "source": source,
        "extra": extra or {},
    }
    render(Manifest(files=blank, **fields))  # refuses bad paths and fields before anything is written
    if directory.exists() and any(directory.iterdir()):
        raise VersionExists(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for path, tensors in tensors_by_file.items():
        write_safetensors(_inside(directory, path), tensors)
    for path, asset in (assets or {}).items():
        _inside(directory, path).write_bytes(asset if isinstance(asset, bytes) else asset.read_bytes())
    manifest = Manifest(files=tuple(_entry(directory, entry) for entry in blank), **fields)
    (directory / FILE_NAME).write_bytes(render(manifest))
    return manifest


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write *tensors* to the new file *path*, aligned as the module says.

    Raises:
        TiedTensors: two of them share memory.
        KeyError: a dtype that the format does not have, or not in whole bytes.
    """
    _refuse_ties(tensors)
    # Multiples of 64 bytes first: none of them moves the next one off its alignment.
    order = sorted(
        tensors,
        key=lambda name: (
            tensors[name].nbytes % ALIGNMENT_BYTES != 0,
            -tensors[name].element_size(),
            name,
        ),
    )
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        table[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-(LENGTH_BYTES + len(raw)) % ALIGNMENT_BYTES)
    with path.open("xb") as file:
        file.write(len(raw).to_bytes(LENGTH_BYTES, "little"))
        file.write(raw)
        for name in order:
            file.write(_bytes(tensors[name]))


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data  # numpy has no bfloat16, but everything is bytes


def _refuse_ties(tensors: Mapping[str, torch.Tensor]) -> None:
    by_memory: dict[tuple[torch.device, int], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.nbytes:
            by_memory.setdefault((tensor.device, tensor.data_ptr()), []).append(name)
    tied = [name for names in by_memory.values() if len(names) > 1 for name in names]
    if tied:
        raise TiedTensors(tuple(sorted(tied)))


def _inside(directory: Path, path: str) -> Path:
    target = directory / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _entry(directory: Path, blank: FileEntry) -> FileEntry:
    shown = directory / blank.path
    with open_directory(directory) as at, open_file(at, blank.path, shown) as fd:
        digest = file_sha256(fd, shown)
    return FileEntry(blank.path, shown.stat().st_size, digest, blank.prefix)
