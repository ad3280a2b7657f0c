"""Tensors of the Open Inference Protocol as JSON and as bytes, both ways. Knows no HTTP and no model.

Numbers are torch tensors, BYTES are numpy object arrays. Binary is little-endian, row-major, unpadded;
of BYTES each element is its length in 4 bytes and then itself (Triton's binary tensor data extension).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from server.errors import InvalidField
from server.families.base import DTYPES, TensorSpec, Value

MAX_DIMENSIONS = 32  # numpy 1.26 has no more
MAX_ELEMENTS = 2**40  # and the sizes besides a 0 multiply too: past 2**63 bytes numpy and torch give up
LENGTH = struct.Struct("<I")

BYTES, BF16 = "BYTES", "BF16"
# In numpy, which has no bfloat16: there it is the 16 bits.
CODES = {
    "BOOL": "u1", "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8", "INT8": "i1", "INT16": "i2",
    "INT32": "i4", "INT64": "i8", "FP16": "f2", "FP32": "f4", "FP64": "f8", BF16: "u2",
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def from_json(spec: TensorSpec, shape: Sequence[int], data: list[Any]) -> Value:
    """Return *data*, flat or nested as *shape* says.

    Raises:
        InvalidField: *data* does not fill *shape*, or holds what *spec*'s datatype cannot.
    """
    flat = _flatten(spec, data, shape)
    match spec.datatype:
        case "BF16":
            _refuse(spec, "BF16 has no form in JSON; send it as binary data")
        case "BYTES":
            _check_types(spec, flat, {str}, "strings")
            return _objects([text.encode() for text in flat], shape)
        case "BOOL":
            _check_types(spec, flat, {bool}, "true and false")
            return torch.from_numpy(np.array(flat, bool).reshape(shape))
        case "FP16" | "FP32" | "FP64":
            return torch.from_numpy(_floats(spec, flat).reshape(shape))
    _check_types(spec, flat, {int}, "whole numbers")
    limits = np.iinfo(CODES[spec.datatype])
    if flat and not limits.min <= min(flat) <= max(flat) <= limits.max:
        _refuse(spec, f"a number is outside {spec.datatype}")
    return torch.from_numpy(np.array(flat, CODES[spec.datatype]).reshape(shape))


def from_binary(spec: TensorSpec, shape: Sequence[int], raw: memoryview) -> Value:
    """Return the tensor of *shape* that *raw* holds; the bytes are copied.

    Raises:
        InvalidField: *raw* is longer or shorter than *shape*, or not *spec*'s datatype.
    """
    count = math.prod(shape)
    if spec.datatype == BYTES:
        return _objects(_split(spec, raw, count), shape)
    code = np.dtype(CODES[spec.datatype])
    if len(raw) != count * code.itemsize:
        _refuse(spec, f"{len(raw)} bytes, but its shape needs {count * code.itemsize}")
    array = np.frombuffer(raw, code.newbyteorder("<")).astype(code).reshape(shape)
    if spec.datatype == "BOOL":
        if bool((array > 1).any()):
            _refuse(spec, "a BOOL is the byte 0 or 1")
        return torch.from_numpy(array.astype(bool))
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if spec.datatype == BF16 else tensor


def to_json(spec: TensorSpec, value: Value) -> list[Any]:
    """Return the elements of *value* in one flat list.

    Raises:
        InvalidField: JSON cannot hold them: BF16, NaN and infinities, bytes that are not UTF-8.
    """
    if not isinstance(value, torch.Tensor):
        try:
            return [item.decode("utf-8") for item in value.ravel()]
        except UnicodeDecodeError:
            _refuse(spec, "not UTF-8, so not for JSON; ask for it with binary_data")
    if value.dtype is torch.bfloat16:
        _refuse(spec, "BF16 has no form in JSON; ask for it with binary_data")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        _refuse(spec, "NaN or infinity, which JSON cannot hold; ask for it with binary_data")
    elements: list[Any] = value.flatten().tolist()
    return elements


def to_binary(value: Value) -> bytes:
    """Return the elements of *value* as bytes."""
    if not isinstance(value, torch.Tensor):
        return b"".join(part for item in value.ravel() for part in (LENGTH.pack(len(item)), item))
    if value.dtype is torch.bfloat16:
        value = value.contiguous().view(torch.uint16)
    array = value.numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def width(datatype: str) -> int:
    """Return the bytes of one element of *datatype*, which is not BYTES."""
    return np.dtype(CODES[datatype]).itemsize


def on_host(specs: Sequence[TensorSpec], values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the tensors of *specs* in main memory.

    Raises:
        TypeError: *values* are not what *specs* promise: the family's mistake, not the client's.
    """
    found: dict[str, Value] = {}
    for spec in specs:
        value = values[spec.name]
        datatype = NAMES.get(value.dtype) if isinstance(value, torch.Tensor) else BYTES
        if datatype != spec.datatype or not fits(spec, value.shape):
            raise TypeError(
                f"output {spec.name!r} is {datatype} {tuple(value.shape)}, not as declared: {spec}"
            )
        found[spec.name] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    return found


def fits(spec: TensorSpec, shape: Sequence[int]) -> bool:
    """Tell whether *shape* is one that *spec* allows."""
    pairs = zip(spec.shape, shape, strict=False)
    return len(shape) == len(spec.shape) and all(want in (-1, size) for want, size in pairs)


def check_shape(spec: TensorSpec, shape: Sequence[int]) -> None:
    """Refuse a *shape* that *spec* does not allow or that no tensor can have.

    Raises:
        InvalidField: always when it refuses.
    """
    if len(shape) > MAX_DIMENSIONS or not all(0 <= size <= MAX_ELEMENTS for size in shape):
        _refuse(spec, f"the shape has a size below 0, one above {MAX_ELEMENTS} or too many of them")
    if math.prod(max(1, size) for size in shape) > MAX_ELEMENTS:
        _refuse(spec, f"the shape has more than {MAX_ELEMENTS} elements")
    if not fits(spec, shape):
        _refuse(spec, f"the shape {list(shape)} does not match {list(spec.shape)}")


def _flatten(spec: TensorSpec, data: list[Any], shape: Sequence[int]) -> list[Any]:
    flat = data
    if data and isinstance(data[0], list):
        if len(data) != next(iter(shape), None):
            _refuse(spec, "the data is not nested as the shape says")
        for size in shape[1:]:
            if not all(isinstance(row, list) and len(row) == size for row in flat):
                _refuse(spec, "the data is not nested as the shape says")
            flat = [item for row in flat for item in row]
    if len(flat) != math.prod(shape):
        _refuse(spec, f"{len(flat)} elements, but its shape needs {math.prod(shape)}")
    return flat


def _floats(spec: TensorSpec, flat: list[Any]) -> np.ndarray[Any, Any]:
    _check_types(spec, flat, {int, float}, "numbers")
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, np.float64).astype(CODES[spec.datatype])
    except OverflowError:  # an integer that no double can hold
        _refuse(spec, f"a number is outside {spec.datatype}")
    if not np.isfinite(array).all():
        _refuse(spec, f"a number is outside {spec.datatype}")
    return array


def _split(spec: TensorSpec, raw: memoryview, count: int) -> list[bytes]:
    items, at = [], 0
    while at < len(raw):
        start = at + LENGTH.size
        at = start + LENGTH.unpack_from(raw, at)[0] if start <= len(raw) else len(raw) + 1
        if at > len(raw):
            _refuse(spec, "an element is longer than the data")
        items.append(bytes(raw[start:at]))
    if len(items) != count:
        _refuse(spec, f"{len(items)} elements, but its shape needs {count}")
    return items


def _objects(items: list[bytes], shape: Sequence[int]) -> Value:
    array = np.empty(len(items), object)  # np.array(items) would make fixed-width strings and drop zero bytes
    array[:] = items
    return array.reshape(shape)


def _check_types(spec: TensorSpec, flat: list[Any], allowed: set[type], what: str) -> None:
    # By exact type: True is an int in Python and is none here.
    if not set(map(type, flat)) <= allowed:
        _refuse(spec, f"{spec.datatype} data must be {what}")


def _refuse(spec: TensorSpec, message: str) -> NoReturn:
    raise InvalidField(f"{spec.name}: {message}", param=spec.name)
