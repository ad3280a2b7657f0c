"""Copying a version to a device, for which the main processor stands in: every byte arrives."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weights.upload import UploadedVersion, parts, upload

CPU = torch.device("cpu")


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), max_size=6), st.integers(1, 60))
def test_parts_cover_every_byte_once_and_fit_a_slot(sizes: dict[str, int], slot: int) -> None:
    covered = [(name, at) for name, where in parts(sizes, slot) for at in range(where.start, where.stop)]
    assert covered == [(name, at) for name, size in sizes.items() for at in range(size)]
    assert all(where.stop - where.start <= slot for _, where in parts(sizes, slot))


def test_upload_copies_every_dtype_and_shape() -> None:
    tensors = {
        "a": torch.arange(1000, dtype=torch.float32).reshape(10, 100),
        "b": torch.arange(7, dtype=torch.int64),
        "c": torch.randn(3, 5).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    copies = upload(tensors, CPU, slot_bytes=96)
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor) and copies[name].dtype == tensor.dtype
        assert not tensor.numel() or copies[name].data_ptr() != tensor.data_ptr()


def test_an_uploaded_version_knows_its_own_tensors() -> None:
    source = {"weight": torch.ones(4)}
    uploaded = UploadedVersion(source, CPU)
    assert uploaded.contains(uploaded.tensors()["weight"])
    assert uploaded.contains(uploaded.tensors()["weight"][1:])
    assert not uploaded.contains(source["weight"])
