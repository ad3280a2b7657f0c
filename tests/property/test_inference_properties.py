"""Tensors survive both forms whatever they hold; whatever arrives is answered, never with a 5xx."""

from __future__ import annotations

import functools
import gzip
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from flask.testing import FlaskClient
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api import tensors
from server.families.base import TensorSpec
from tests.apps.affine.affine import ECHOED
from tests.unit.served import app_for_affine, app_for_tone

INFER = "/v2/models/affine/infer"
MATRIX = {"name": "matrix", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SIZES = st.integers(-3, 4) | st.sampled_from([2**31, 2**63, -(2**63), 10**30])
NUMBERS = [datatype for datatype in tensors.CODES if datatype not in ("BOOL", "BF16")]


@functools.cache
def client() -> FlaskClient:
    """Made at its first use, in the module's own time: the computing threads end with the module."""
    return app_for_affine().test_client()


@functools.cache
def speaker() -> FlaskClient:
    """The same over a family that speaks."""
    return app_for_tone().test_client()


def elements(datatype: str) -> st.SearchStrategy[Any]:
    """Return a strategy for what JSON can hold of *datatype*."""
    if datatype == "BYTES":
        return st.text(max_size=6)
    if datatype == "BOOL":
        return st.booleans()
    code = np.dtype(tensors.CODES[datatype])
    if code.kind == "f":
        return st.floats(allow_nan=False, allow_infinity=False, width=code.itemsize * 8)  # type: ignore[arg-type]
    limits = np.iinfo(code)
    return st.integers(int(limits.min), int(limits.max))


def check(answer: Any) -> None:
    assert answer.status_code < 500
    if answer.status_code != 200:
        assert list(answer.json) == ["error"]
        assert isinstance(answer.json["error"], str)


@pytest.mark.parametrize("datatype", [*NUMBERS, "BOOL", "BYTES"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_datatype_comes_back_from_json_and_from_binary(datatype: str, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape))
    flat = data.draw(st.lists(elements(datatype), min_size=count, max_size=count))
    spec = TensorSpec("x", datatype, tuple(shape))
    value = tensors.from_json(spec, shape, flat)
    assert tensors.to_json(spec, value) == flat
    again = tensors.from_binary(spec, shape, memoryview(tensors.to_binary(value)))
    assert list(again.shape) == shape
    assert tensors.to_json(spec, again) == flat


@pytest.mark.parametrize("datatype", [*NUMBERS, "BF16"])
@given(raw=st.binary(max_size=64))
@settings(max_examples=25, deadline=None)
def test_any_bytes_of_a_number_come_back_as_they_were(datatype: str, raw: bytes) -> None:
    """NaN with any payload and both infinities too."""
    count = len(raw) // tensors.width(datatype)
    raw = raw[: count * tensors.width(datatype)]
    value = tensors.from_binary(TensorSpec("x", datatype, (-1,)), [count], memoryview(raw))
    assert isinstance(value, torch.Tensor)
    assert tensors.to_binary(value) == raw


@given(st.lists(st.binary(max_size=12), max_size=6))
@settings(deadline=None)
def test_any_byte_strings_come_back_as_they_were(items: list[bytes]) -> None:
    raw = b"".join(struct.pack("<I", len(item)) + item for item in items)
    value = tensors.from_binary(TensorSpec("x", "BYTES", (-1,)), [len(items)], memoryview(raw))
    assert value.tolist() == items
    assert tensors.to_binary(value) == raw


@given(st.binary(max_size=200), st.none() | st.integers(-2, 250))
@settings(max_examples=70, deadline=None)
def test_arbitrary_bytes_under_any_header_never_fail_the_server(body: bytes, length: int | None) -> None:
    headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
    for asked, path in ((client(), INFER), (speaker(), "/v2/models/tone/infer")):
        if not body.startswith((b"sleep", b"seconds", b"raise")):  # instructions to the tone family
            check(asked.post(path, data=body, headers=headers))


@given(
    st.dictionaries(st.sampled_from(["inputs", "outputs", "parameters", "id"]) | st.text(max_size=4), VALUES)
)
@settings(max_examples=70, deadline=None)
def test_arbitrary_fields_never_fail_the_server(fields: dict[str, Any]) -> None:
    body = {"inputs": [MATRIX], "outputs": [{"name": "scaled"}], **fields}
    check(client().post(INFER, data=json.dumps(body), content_type="application/json"))


@given(
    name=st.sampled_from([f"in_{datatype}" for datatype in ECHOED]),
    datatype=st.sampled_from(list(tensors.CODES)) | st.text(max_size=4),
    shape=st.lists(SIZES, max_size=4),
    data=st.none() | st.lists(VALUES, max_size=4),
    size=st.none() | SIZES,
    content=st.binary(max_size=24),
    short=st.integers(-2, 2),
)
@settings(max_examples=120, deadline=None)
def test_lying_shapes_sizes_and_data_never_fail_the_server(
    name: str, datatype: str, shape: list[int], data: Any, size: int | None, content: bytes, short: int
) -> None:
    row: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
    if data is not None:
        row["data"] = data
    if size is not None:
        row["parameters"] = {"binary_data_size": size}
    head = json.dumps({"inputs": [MATRIX, row], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head) + short)}
    check(client().post(INFER, data=head + content, headers=headers))


@given(st.sampled_from(ECHOED), st.binary(max_size=48), st.lists(st.integers(0, 6), min_size=2, max_size=2))
@settings(max_examples=70, deadline=None)
def test_any_binary_tensor_is_echoed_or_refused(datatype: str, content: bytes, shape: list[int]) -> None:
    row = {"name": f"in_{datatype}", "datatype": datatype, "shape": shape,
           "parameters": {"binary_data_size": len(content)}}  # fmt: skip
    output = {"name": f"out_{datatype}", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [MATRIX, row], "outputs": [output]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = client().post(INFER, data=head + content, headers=headers)
    check(answer)
    if answer.status_code == 200 and datatype != "BYTES":
        assert answer.data[int(answer.headers["Inference-Header-Content-Length"]) :] == content


@given(
    st.binary(max_size=300) | st.integers(1, 3).map(lambda megabytes: b" " * (megabytes << 20)),
    st.sampled_from([("gzip", gzip.compress), ("deflate", zlib.compress)]),
    st.integers(0, 40),
)
@settings(max_examples=15, deadline=None)
def test_packed_bodies_and_bombs_never_fail_the_server(body: bytes, packing: Any, cut: int) -> None:
    coding, pack = packing
    packed = pack(body)
    check(client().post(INFER, data=packed[: len(packed) - cut], headers={"Content-Encoding": coding}))
    check(client().post(INFER, data=body[:300], headers={"Content-Encoding": coding}))
