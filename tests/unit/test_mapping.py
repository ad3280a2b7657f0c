"""Tensors of a mapped version: no copy, every dtype, and no unmapping under a live tensor."""

from __future__ import annotations

import gc
import json
import os
import threading
import warnings

import numpy
import pytest
import safetensors.torch
import torch

from tests.version_samples import WEIGHTS, make_version
from tests.version_samples import safetensors as file_of
from weights.errors import FileSizeWrong, FileUnreadable, MappingInUse, TiedTensors, VersionExists
from weights.header import ITEM_BYTES
from weights.mapping import TORCH_DTYPES, MappedVersion
from weights.residency import residency
from weights.verify import verify_checksums, verify_layout
from weights.writing import write_version

BYTES = torch.arange(48, dtype=torch.uint8)


def every_dtype():
    """One tensor of each dtype of the format: (3, n) over the same 48 bytes, all values finite."""
    return {name: BYTES.clone().view(dtype).reshape(3, -1) for name, dtype in TORCH_DTYPES.items()} | {
        "BOOL": torch.tensor([True, False, True])
    }


@pytest.fixture
def written(tmp_path):
    files = {
        "a.safetensors": every_dtype(),
        "sub/b.safetensors": {"BOOL": torch.zeros(0, 3), "s": torch.tensor(7)},
    }
    write_version(
        tmp_path / "v1",
        files,
        name="tiny",
        family="tiny",
        config={},
        assets={"words.txt": b"one"},
        prefixes={"sub/b.safetensors": "b."},
    )
    return tmp_path / "v1"


def test_dtype_tables_agree():
    assert TORCH_DTYPES.keys() == ITEM_BYTES.keys()
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == dict(ITEM_BYTES)


def test_every_dtype_maps_to_the_tensor_that_was_written(written):
    with MappedVersion(verify_layout(written)) as mapped:
        tensors = mapped.tensors()
        for name, expected in every_dtype().items():
            assert tensors[name].dtype == expected.dtype
            assert tensors[name].shape == expected.shape
            assert torch.equal(tensors[name].view(torch.uint8), expected.view(torch.uint8)), name
            assert mapped.contains(tensors[name])
        assert tensors["b.BOOL"].shape == (0, 3)
        assert tensors["b.s"].item() == 7
        del tensors


def test_written_version_is_sound_and_reads_in_the_reference_library(written):
    layout = verify_layout(written)
    verify_checksums(written, layout.manifest)
    found = safetensors.torch.load_file(written / "a.safetensors")
    assert found.keys() == every_dtype().keys()
    assert torch.equal(found["BF16"], every_dtype()["BF16"])


def test_written_tensors_are_aligned(tmp_path):
    odd = {f"t{n}": torch.zeros(n, dtype=dtype) for n, dtype in enumerate(TORCH_DTYPES.values())}
    even = {f"e{n}": torch.zeros(64 * n, dtype=torch.int8) for n in range(3)}
    write_version(tmp_path / "v1", {WEIGHTS: odd | even}, name="t", family="t", config={})
    header = verify_layout(tmp_path / "v1").headers[WEIGHTS]
    assert header.data_start % 64 == 0
    for entry in header.tensors:
        size = entry.end - entry.begin
        assert entry.begin % (64 if size % 64 == 0 and size else ITEM_BYTES[entry.dtype]) == 0


def test_same_arguments_write_the_same_bytes(tmp_path):
    fields = {"name": "t", "family": "t", "config": {}, "created": "2026-01-31T12:00:00Z"}
    write_version(tmp_path / "a", {WEIGHTS: every_dtype()}, **fields)
    write_version(tmp_path / "b", {WEIGHTS: dict(reversed(every_dtype().items()))}, **fields)
    for name in (WEIGHTS, "manifest.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_writing_over_a_version_is_refused(written):
    with pytest.raises(VersionExists):
        write_version(written, {WEIGHTS: {}}, name="t", family="t", config={})


def test_writing_tied_tensors_is_refused_by_name(tmp_path):
    weight = torch.zeros(4)
    with pytest.raises(TiedTensors, match="embed, head"):
        write_version(
            tmp_path / "v1", {WEIGHTS: {"head": weight, "embed": weight}}, name="t", family="t", config={}
        )


def test_transposed_tensor_is_written_by_value(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3).T
    write_version(tmp_path / "v1", {WEIGHTS: {"w": weight}}, name="t", family="t", config={})
    mapped = MappedVersion(verify_layout(tmp_path / "v1"))
    assert torch.equal(mapped.tensors()["w"], weight)


def test_unaligned_tensors_compute_right(tmp_path):
    """Other writers pad the header to 8 bytes only, and tensors follow each other without a hole."""
    values = numpy.arange(5, dtype="<f4")
    table = {
        "flag": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [5], "data_offsets": [1, 21]},
    }
    header = json.dumps(table).encode()
    raw = file_of(header + b" " * (-len(header) % 8), b"\x01" + values.tobytes())
    mapped = MappedVersion(verify_layout(make_version(tmp_path / "v1", {WEIGHTS: raw})))
    found = mapped.tensors()["w"]
    assert found.data_ptr() % 4 == 1
    assert torch.equal(found * 2, torch.arange(5.0) * 2)
    assert mapped.contains(found)


def test_file_of_no_tensor_maps(tmp_path):
    directory = make_version(tmp_path / "v1", {WEIGHTS: file_of({}, b"")})
    with MappedVersion(verify_layout(directory)) as mapped:
        assert mapped.tensors() == {}
        assert mapped.mapped_bytes == (directory / WEIGHTS).stat().st_size


def test_version_without_weights_maps_nothing(tmp_path):
    with MappedVersion(verify_layout(make_version(tmp_path / "v1", {"words.txt": b"a"}))) as mapped:
        assert (mapped.mapped_bytes, mapped.paths, mapped.populate()) == (0, (), True)


def test_contains_knows_copies_and_foreign_tensors(written):
    mapped = MappedVersion(verify_layout(written))
    tensors = mapped.tensors()
    assert mapped.contains(tensors["F32"][1:])
    assert mapped.contains(torch.nn.Parameter(tensors["F32"], requires_grad=False))
    assert mapped.contains(torch.empty(0))
    assert not mapped.contains(tensors["F32"].clone())
    assert not mapped.contains(tensors["F32"].to(torch.bfloat16))
    assert not mapped.contains(torch.empty(2, device="meta"))


def test_no_warning_escapes_and_others_are_not_silenced(written):
    mapped = MappedVersion(verify_layout(written))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mapped.tensors()
        warnings.warn("another", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["another"]


def test_close_is_refused_under_a_live_tensor_and_works_after_it(written):
    mapped = MappedVersion(verify_layout(written))
    held = mapped.tensors()["F32"][0]
    with pytest.raises(MappingInUse) as refusal:
        mapped.close()
    assert refusal.value.paths == (written / "a.safetensors",)
    assert torch.equal(held, every_dtype()["F32"][0])
    assert mapped.tensors()["b.s"].item() == 7
    del held
    mapped.close()
    assert mapped.mapped_bytes == 0
    mapped.close()


def test_close_collects_modules_that_hold_themselves(written):
    mapped = MappedVersion(verify_layout(written))
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(mapped.tensors()["F32"], requires_grad=False)
    module.itself = [module]
    gc.disable()
    try:
        del module
        mapped.close()
    finally:
        gc.enable()


def test_file_cut_since_it_was_verified_is_not_mapped(written):
    layout = verify_layout(written)
    os.truncate(written / "a.safetensors", 100)
    with pytest.raises(FileSizeWrong):
        MappedVersion(layout)


def test_populate_makes_every_page_resident(tmp_path):
    write_version(tmp_path / "v1", {WEIGHTS: {"w": torch.zeros(1 << 18)}}, name="t", family="t", config={})
    mapped = MappedVersion(verify_layout(tmp_path / "v1"))
    seen = []
    if not mapped.populate(seen.append):
        pytest.skip("this kernel is older than 5.14")
    assert seen[-1] == mapped.mapped_bytes
    cost = residency(mapped.paths)[mapped.paths[0]]
    assert cost.rss_bytes >= mapped.mapped_bytes
    assert cost.anonymous_bytes == 0


def test_populate_refuses_a_file_that_was_cut(tmp_path):
    write_version(tmp_path / "v1", {WEIGHTS: {"w": torch.zeros(1 << 14)}}, name="t", family="t", config={})
    mapped = MappedVersion(verify_layout(tmp_path / "v1"))
    os.truncate(tmp_path / "v1" / WEIGHTS, 4096)
    with pytest.raises(FileUnreadable):
        mapped.populate()


def test_mapping_starts_no_thread(written):
    threads_before = threading.active_count()
    """Whoever maps forks later, and a fork of a process with threads can hang."""
    before = len(os.listdir("/proc/self/task"))
    mapped = MappedVersion(verify_layout(written))
    mapped.tensors()
    mapped.populate()
    assert len(os.listdir("/proc/self/task")) == before
    assert threading.active_count() <= threads_before
