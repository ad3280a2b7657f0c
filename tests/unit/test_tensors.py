"""Tensors as JSON and bytes: what each datatype accepts, and every refusal."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch

from server.api import tensors
from server.errors import InvalidField
from server.families.base import TensorSpec


def spec(datatype: str, *shape: int) -> TensorSpec:
    return TensorSpec("x", datatype, shape)


def read(datatype: str, shape: list[int], data: list[Any]) -> Any:
    return tensors.from_json(spec(datatype), shape, data)


def read_bytes(datatype: str, shape: list[int], raw: bytes) -> Any:
    return tensors.from_binary(spec(datatype), shape, memoryview(raw))


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("BOOL", [True, False]),
        *((f"UINT{bits}", [0, 2**bits - 1]) for bits in (8, 16, 32, 64)),
        *((f"INT{bits}", [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1]) for bits in (8, 16, 32, 64)),
        ("FP16", [0.5, 65504.0]),
        ("FP32", [1, -1.5]),
        ("FP64", [0.1, 1e300]),
    ],
)
def test_each_datatype_holds_its_limits_in_json_and_binary(datatype: str, data: list[Any]) -> None:
    tensor = read(datatype, [2], data)
    assert tensors.NAMES[tensor.dtype] == datatype
    assert tensors.to_json(spec(datatype), tensor) == data
    again = read_bytes(datatype, [2], tensors.to_binary(tensor))
    assert again.dtype == tensor.dtype
    assert torch.equal(again, tensor)


def test_binary_is_little_endian() -> None:
    assert read_bytes("INT32", [1], b"\x01\x02\0\0").tolist() == [0x201]
    assert tensors.to_binary(torch.tensor([0x201], dtype=torch.int16)) == b"\x01\x02"
    assert read_bytes("BF16", [1], b"\x80\x3f").tolist() == [1.0]
    assert tensors.to_binary(torch.ones(1, dtype=torch.bfloat16)) == b"\x80\x3f"


def test_binary_of_a_strided_tensor_is_row_major() -> None:
    assert tensors.to_binary(torch.arange(6, dtype=torch.uint8).reshape(2, 3).T) == b"\0\3\1\4\2\5"


def test_bytes_have_a_length_each_and_keep_zero_bytes() -> None:
    raw = b"\2\0\0\0a\0" + b"\0\0\0\0"
    value = read_bytes("BYTES", [2], raw)
    assert value.tolist() == [b"a\0", b""]
    assert tensors.to_binary(value) == raw
    assert read("BYTES", [1, 2], ["é", ""]).tolist() == [["é".encode(), b""]]
    assert tensors.to_json(spec("BYTES"), read("BYTES", [1], ["é"])) == ["é"]


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]]])
def test_data_may_be_flat_or_nested(data: list[Any]) -> None:
    assert read("INT8", [2, 2], data).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("shape", "data"), [([], [7]), ([0], []), ([2, 0], [[], []]), ([0, 2**30], [])])
def test_scalars_and_empty_tensors_are_read(shape: list[int], data: list[Any]) -> None:
    assert list(read("INT8", shape, data).shape) == shape


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "reason"),
    [
        ("INT8", [1], [128], "outside"),
        ("UINT64", [1], [-1], "outside"),
        ("INT64", [1], [2**63], "outside"),
        ("INT64", [1], [1.0], "whole numbers"),
        ("INT64", [1], [True], "whole numbers"),
        ("FP32", [1], [True], "numbers"),
        ("FP32", [1], ["1"], "numbers"),
        ("FP32", [1], [None], "numbers"),
        ("FP32", [1], [1e39], "outside"),
        ("FP16", [1], [70000], "outside"),
        ("FP64", [1], [10**400], "outside"),
        ("BOOL", [1], [1], "true and false"),
        ("BYTES", [1], [1], "strings"),
        ("BF16", [1], [1.0], "binary"),
        ("INT8", [2], [1], "1 elements"),
        ("INT8", [2, 2], [[1, 2], [3]], "nested"),
        ("INT8", [2, 2], [[1, 2], 3, 4], "nested"),
        ("INT8", [2, 2], [[1, 2]], "nested"),
        ("INT8", [], [[1]], "nested"),
        ("INT8", [1], [[1]], "whole numbers"),
        ("INT8", [1, 1], [[[1]]], "whole numbers"),
    ],
)
def test_json_data_is_refused(datatype: str, shape: list[int], data: list[Any], reason: str) -> None:
    with pytest.raises(InvalidField, match=reason) as caught:
        read(datatype, shape, data)
    assert caught.value.param == "x"


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "reason"),
    [
        ("FP32", [1], b"\0\0\0", "3 bytes"),
        ("FP32", [2**30], b"\0\0\0\0", "4 bytes"),
        ("FP32", [0], b"\0", "1 bytes"),
        ("BOOL", [1], b"\2", "0 or 1"),
        ("BYTES", [1], b"\0\0\0", "longer than the data"),
        ("BYTES", [1], b"\1\0\0\0", "longer than the data"),
        ("BYTES", [1], struct.pack("<I", 2**32 - 1), "longer than the data"),
        ("BYTES", [2], b"\0\0\0\0", "1 elements"),
        ("BYTES", [1], b"\0\0\0\0" * 2, "2 elements"),
    ],
)
def test_binary_data_is_refused(datatype: str, shape: list[int], raw: bytes, reason: str) -> None:
    with pytest.raises(InvalidField, match=reason):
        read_bytes(datatype, shape, raw)


@pytest.mark.parametrize("shape", [[], [2], [2, 4], [-1, 3], [2**41, 3], [2, 3, 1], [1] * 40])
def test_a_shape_is_refused(shape: list[int]) -> None:
    with pytest.raises(InvalidField):
        tensors.check_shape(spec("FP32", -1, 3), shape)


def test_sizes_beside_a_zero_are_refused_where_their_product_is_no_size() -> None:
    with pytest.raises(InvalidField, match="more than"):
        tensors.check_shape(spec("FP64", -1, -1, -1), [0, 2**40, 2**40])
    assert tensors.fits(spec("FP32", -1, 3), [0, 3])


@pytest.mark.parametrize(
    "value",
    [torch.tensor([math.nan]), torch.tensor([math.inf]), torch.ones(1, dtype=torch.bfloat16),
     np.array([b"\xff"], object)],
)  # fmt: skip
def test_what_json_cannot_hold_is_refused_and_binary_holds_it(value: Any) -> None:
    with pytest.raises(InvalidField, match="binary_data"):
        tensors.to_json(spec("FP32", 1), value)
    assert tensors.to_binary(value)


@pytest.mark.parametrize(
    "values", [{"x": torch.ones(1, dtype=torch.int8)}, {"x": torch.ones(2)}, {"x": np.array([b"a"], object)}]
)
def test_an_output_that_is_not_as_declared_is_the_familys_mistake(values: Any) -> None:
    with pytest.raises(TypeError, match="not as declared"):
        tensors.on_host([spec("FP32", 1)], values)
    assert tensors.on_host([spec("FP32", 1)], {"x": torch.ones(1), "more": torch.ones(9)}).keys() == {"x"}
