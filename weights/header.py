"""The header of a safetensors file: parsed and checked before a tensor byte is read. Pure.

Follows https://github.com/huggingface/safetensors#format and its reference reader (0.8.0): an 8-byte
little-endian length, JSON that begins with ``{``, tensors that fill the rest without hole or overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weights.errors import (
    DtypeUnknown,
    DuplicateKey,
    HeaderInvalid,
    HeaderTooLong,
    NotSafetensors,
    OffsetsInvalid,
    ShapeWrong,
)
from weights.strict_json import JsonRefused, KeyTwice, loads

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the reference reader's limit

# Bytes an element. The format's 4- and 6-bit dtypes (F4, F6_*) fill no whole bytes and are refused.
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

MAX_DIMENSIONS = 64  # of torch's TensorIterator
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_DEPTH = 8  # a header needs 3; the field at fault is a better reason than the depth
_MAX_SIZE = 2**63 - 1  # of one dimension and of the element count: torch holds both in an int64


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file; ``begin`` and ``end`` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """All tensors of a file in the order of their data, and where the data starts."""

    tensors: tuple[TensorEntry, ...]
    data_start: int


def header_bytes(prefix: bytes, file_bytes: int, path: Path) -> int:
    """Return the header's length from the first bytes of the file, refusing it before it is read.

    Raises:
        NotSafetensors: too short for a header, or the signature of another format.
        HeaderTooLong: over the format's limit, or past the end of the file.
    """
    if file_bytes < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        raise NotSafetensors(path, f"{file_bytes} bytes are too few for a header")
    if prefix[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        if prefix.startswith(b"PK\x03\x04"):
            raise NotSafetensors(path, "a zip, as torch.save writes")
        if prefix[0] == 0x80 and 2 <= prefix[1] <= 5:
            raise NotSafetensors(path, "a pickle")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    limit = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    if length > limit:
        raise HeaderTooLong(path, length, limit)
    return length


def parse_header(raw: bytes, file_bytes: int, path: Path) -> Header:
    """Return the checked header; *raw* is the JSON of exactly the announced length.

    Raises:
        HeaderInvalid, DuplicateKey: the JSON is not what the format asks for.
        DtypeUnknown, ShapeWrong, OffsetsInvalid: a tensor is not; the error names it.
    """
    table = _load(raw, path)
    _check_metadata(table.pop("__metadata__", None), path)
    data_start = LENGTH_BYTES + len(raw)
    data_bytes = file_bytes - data_start
    entries = [_entry(name, fields, data_start, data_bytes, path) for name, fields in table.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_cover(entries, data_start, file_bytes, path)
    return Header(tuple(entries), data_start)


def _load(raw: bytes, path: Path) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise HeaderInvalid(path, "does not begin with {")
    try:
        table = loads(raw, max_depth=_MAX_DEPTH)
    except KeyTwice as exc:
        raise DuplicateKey(path, exc.key) from None
    except JsonRefused as exc:
        raise HeaderInvalid(path, str(exc)) from None
    if not isinstance(table, dict):  # pragma: no cover - it begins with {
        raise HeaderInvalid(path, "not an object")
    return table


def _check_metadata(metadata: Any, path: Path) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderInvalid(path, "__metadata__ is not an object of strings")


def _entry(name: str, fields: Any, data_start: int, data_bytes: int, path: Path) -> TensorEntry:
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise HeaderInvalid(path, f"tensor {name!r} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DtypeUnknown(path, name, f"dtype {dtype!r}")
    if not _are_sizes(shape):
        raise ShapeWrong(path, name, "shape is not a list of whole numbers from 0 to 2**63 - 1")
    if len(shape) > MAX_DIMENSIONS:
        raise ShapeWrong(path, name, f"{len(shape)} dimensions, torch computes with {MAX_DIMENSIONS}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise OffsetsInvalid(path, name, "data_offsets are not two whole numbers from 0 to 2**63 - 1")
    begin, end = offsets
    if begin > end or end > data_bytes:
        raise OffsetsInvalid(path, name, f"bytes {begin} to {end} of {data_bytes}")
    strides = _product([max(size, 1) for size in shape])
    if strides is None:
        raise ShapeWrong(path, name, f"{shape} has strides over 2**63")
    needed = 0 if 0 in shape else strides * ITEM_BYTES[dtype]
    if needed != end - begin:
        raise ShapeWrong(path, name, f"{dtype} {shape} is {needed} bytes, not {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _are_sizes(value: Any) -> bool:
    # type(), not isinstance: True is an int to Python and no size to anyone else.
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_SIZE for item in value)


def _product(sizes: list[int]) -> int | None:
    product = 1
    for size in sizes:
        product *= size
        if product > _MAX_SIZE:  # stop here: a hostile shape could ask for megabytes of digits
            return None
    return product


def _check_cover(entries: list[TensorEntry], data_start: int, file_bytes: int, path: Path) -> None:
    position = data_start
    for entry in entries:
        if entry.begin != position:
            kind = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            raise OffsetsInvalid(path, entry.name, kind)
        position = entry.end
    if position != file_bytes:
        last = entries[-1].name if entries else ""
        raise OffsetsInvalid(path, last, f"{file_bytes - position} bytes after it belong to no tensor")
