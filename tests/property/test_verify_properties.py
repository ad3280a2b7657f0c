"""A file is refused, or its tensors are exactly what its header says. Nothing in between, no other error."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.version_samples import SOUND_DATA, SOUND_TABLE, WEIGHTS, make_version, safetensors
from weights.errors import ChecksumWrong, WeightsError
from weights.header import ITEM_BYTES
from weights.mapping import TORCH_DTYPES, MappedVersion
from weights.verify import read_manifest, verify_checksums, verify_layout

SOUND = safetensors()
NUMPY = {"F32": "<f4", "F16": "<f2", "U8": "u1", "I8": "i1", "BOOL": "?", "I16": "<i2", "U16": "<u2"}


def map_as_declared(raw):
    """Map *raw* as a version's only file, or raise; what comes back equals its header and bytes."""
    with tempfile.TemporaryDirectory() as directory:
        version = make_version(Path(directory), {WEIGHTS: raw})
        with MappedVersion(verify_layout(version)) as mapped:
            check(raw, mapped)


def check(raw, mapped):
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]
    table.pop("__metadata__", None)
    tensors = mapped.tensors()
    assert tensors.keys() == table.keys()
    for name, fields in table.items():
        begin, end = fields["data_offsets"]
        assert tensors[name].dtype == TORCH_DTYPES[fields["dtype"]]
        assert list(tensors[name].shape) == fields["shape"]
        flat = tensors[name].reshape(-1).view(torch.uint8)
        assert flat.numpy().tobytes() == data[begin:end]
        if fields["dtype"] in NUMPY and end > begin:
            expected = numpy.frombuffer(data[begin:end], NUMPY[fields["dtype"]]).reshape(fields["shape"])
            assert numpy.array_equal(tensors[name].numpy(), expected, equal_nan=expected.dtype.kind == "f")


def test_sound_file_is_mapped_as_declared():
    map_as_declared(SOUND)


@st.composite
def damaged(draw):
    raw = bytearray(SOUND)
    for _ in range(draw(st.integers(0, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] ^= draw(st.integers(1, 255))
    return bytes(raw[: draw(st.integers(0, len(raw)) | st.just(len(raw)))])


@settings(max_examples=80, deadline=None)
@given(damaged())
def test_damaged_file_is_refused_or_mapped_as_declared(raw):
    try:
        map_as_declared(raw)
    except WeightsError:
        return


@settings(max_examples=20, deadline=None)
@given(st.integers(0, len(SOUND) - 1), st.integers(1, 255))
def test_any_flipped_bit_fails_the_checksum(position, flip):
    raw = bytearray(SOUND)
    raw[position] ^= flip
    with tempfile.TemporaryDirectory() as directory:
        version = make_version(Path(directory), {WEIGHTS: SOUND})
        (version / WEIGHTS).write_bytes(raw)
        with pytest.raises(ChecksumWrong):
            verify_checksums(version, read_manifest(version))


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=80))
@example(b"")
@example(b"\x02\0\0\0\0\0\0\0{}\0")
def test_arbitrary_bytes_are_refused(raw):
    with pytest.raises(WeightsError):
        map_as_declared(raw)


numbers = st.integers(-1, 20) | st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64, True, 1.5, None])
tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*ITEM_BYTES, "F4"]),
        "shape": st.lists(numbers, max_size=3),
        "data_offsets": st.lists(numbers, min_size=1, max_size=3),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=3), tensors, max_size=3), st.binary(max_size=20))
@example(SOUND_TABLE, SOUND_DATA)
def test_any_table_is_refused_or_mapped_as_declared(table, data):
    try:
        map_as_declared(safetensors(table, data))
    except WeightsError:
        return


@st.composite
def sound_files(draw):
    table, data = {}, b""
    for index, dtype in enumerate(draw(st.lists(st.sampled_from(sorted(ITEM_BYTES)), max_size=6))):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        count = ITEM_BYTES[dtype] * int(numpy.prod(shape, dtype=int))
        # 0 and 1 only: other bytes are no bool to torch
        part = draw(st.binary(min_size=count, max_size=count).map(lambda raw: bytes(b & 1 for b in raw)))
        table[f"t{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + count]}
        data += part
    return safetensors(table, data)


@settings(max_examples=30, deadline=None)
@given(sound_files())
def test_any_sound_file_is_mapped_as_declared(raw):
    map_as_declared(raw)
