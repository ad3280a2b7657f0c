"""Every refusal of a version on disk, hostile files among them. One test a reason, named for it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import threading

import pytest
import torch

from tests.version_samples import SOUND_DATA, SOUND_TABLE, WEIGHTS, make_version, manifest_for, safetensors
from weights import errors
from weights.manifest import MAX_BYTES, FileEntry
from weights.verify import read_manifest, verify_checksums, verify_layout


@pytest.fixture
def version(tmp_path):
    return make_version(tmp_path / "v1")


def refuse_weights(tmp_path, raw, error):
    """Write a version whose manifest fits *raw*, so that only the file itself can be refused."""
    directory = make_version(tmp_path / "v1", {WEIGHTS: raw})
    with pytest.raises(error) as refusal:
        verify_layout(directory)
    assert type(refusal.value) is error
    assert str(directory / WEIGHTS) in str(refusal.value)
    return refusal.value


def one_tensor(data=b"\0" * 8, **fields):
    return safetensors({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields}, data)


def test_sound_version_is_accepted_with_its_headers(version):
    layout = verify_layout(version)
    assert [tensor.name for tensor in layout.headers[WEIGHTS].tensors] == ["bias", "flag", "none", "odd"]
    assert layout.tensor_bytes == (version / WEIGHTS).stat().st_size
    verify_checksums(version, layout.manifest)


def test_layout_reads_no_tensor_byte(tmp_path):
    """A sparse terabyte is verified at once."""
    size = 1 << 40
    table = {"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    raw = safetensors(table, b"")
    directory = make_version(
        tmp_path / "v1",
        {WEIGHTS: raw},
        entries=(FileEntry(WEIGHTS, len(raw) + size, "0" * 64),),
    )
    try:
        os.truncate(directory / WEIGHTS, len(raw) + size)
    except OSError:
        pytest.skip("this file system holds no sparse terabyte")
    assert verify_layout(directory).tensor_bytes == len(raw) + size


# --- the directory and its files ----------------------------------------------------------------------


def test_missing_directory_is_refused(tmp_path):
    with pytest.raises(errors.FileMissing):
        verify_layout(tmp_path / "v1")


def test_missing_manifest_is_refused(version):
    (version / "manifest.json").unlink()
    with pytest.raises(errors.ManifestMissing):
        verify_layout(version)


def test_manifest_over_the_limit_is_refused_unread(version):
    (version / "manifest.json").write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(errors.ManifestInvalid, match="over"):
        read_manifest(version)


def test_manifest_of_another_format_is_refused(version):
    (version / "manifest.json").write_text('{"format": 2}')
    with pytest.raises(errors.FormatUnknown, match=str(version)):
        verify_layout(version)


def test_deep_manifest_is_refused(version):
    (version / "manifest.json").write_bytes(b"[" * 500_000)
    with pytest.raises(errors.ManifestInvalid):
        verify_layout(version)


@pytest.mark.parametrize("path", ["/etc/passwd", "../v1/" + WEIGHTS])
def test_manifest_path_out_of_the_directory_is_refused(version, path):
    table = json.loads((version / "manifest.json").read_text())
    table["files"][0]["path"] = path
    (version / "manifest.json").write_text(json.dumps(table))
    with pytest.raises(errors.PathEscapes):
        verify_layout(version)


@pytest.mark.parametrize("path", [WEIGHTS, "asset/words.txt"])
def test_file_missing_from_disk_is_refused(version, path):
    (version / path).unlink()
    with pytest.raises(errors.FileMissing, match=path):
        verify_layout(version)


@pytest.mark.parametrize("path", ["extra.safetensors", "asset/extra.txt", ".hidden"])
def test_file_missing_from_the_manifest_is_refused(version, path):
    (version / path).write_bytes(b"")
    with pytest.raises(errors.FileUnlisted, match=path):
        verify_layout(version)


def test_directory_missing_from_the_manifest_is_refused(version):
    (version / "more").mkdir()
    with pytest.raises(errors.FileUnlisted, match="more"):
        verify_layout(version)


@pytest.mark.parametrize("path", [WEIGHTS, "manifest.json", "asset/words.txt"])
def test_symlinked_file_is_refused(version, tmp_path, path):
    (version / path).rename(tmp_path / "elsewhere")
    (version / path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.PathEscapes, match="symbolic link"):
        verify_layout(version)


def test_symlinked_directory_inside_is_refused(version, tmp_path):
    (version / "asset").rename(tmp_path / "elsewhere")
    (version / "asset").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.PathEscapes, match="symbolic link"):
        verify_layout(version)


def test_symlinked_version_directory_is_refused(version, tmp_path):
    (tmp_path / "v2").symlink_to(version)
    with pytest.raises(errors.PathEscapes, match="symbolic link"):
        verify_layout(tmp_path / "v2")


@pytest.mark.parametrize("path", [WEIGHTS, "manifest.json"])
def test_fifo_is_refused_without_blocking(version, path):
    (version / path).unlink()
    os.mkfifo(version / path)
    with pytest.raises(errors.NotRegular):
        verify_layout(version)


def test_directory_in_place_of_a_file_is_refused(version):
    (version / WEIGHTS).unlink()
    (version / WEIGHTS).mkdir()
    with pytest.raises(errors.NotRegular):
        verify_layout(version)


def test_file_in_place_of_a_directory_is_refused(version):
    (version / "asset/words.txt").unlink()
    (version / "asset").rmdir()
    (version / "asset").write_bytes(b"")
    with pytest.raises(errors.NotRegular):
        verify_layout(version)


def test_failing_read_is_refused(version, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(errors.FileUnreadable, match="Input/output error"):
        verify_layout(version)


@pytest.mark.parametrize("change", [-1, 1])
def test_file_of_another_size_is_refused(version, change):
    os.truncate(version / WEIGHTS, (version / WEIGHTS).stat().st_size + change)
    with pytest.raises(errors.FileSizeWrong) as refusal:
        verify_layout(version)
    assert refusal.value.actual_bytes == refusal.value.expected_bytes + change


# --- checksums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("path", [WEIGHTS, "asset/words.txt"])
def test_wrong_checksum_is_refused(version, path, threads):
    threads_before = threading.active_count()
    raw = bytearray((version / path).read_bytes())
    raw[-1] ^= 1
    (version / path).write_bytes(raw)
    manifest = verify_layout(version).manifest
    with pytest.raises(errors.ChecksumWrong, match=path):
        verify_checksums(version, manifest, threads=threads)
    assert threading.active_count() <= threads_before


def test_file_cut_after_the_layout_was_checked_is_refused(version):
    manifest = verify_layout(version).manifest
    os.truncate(version / WEIGHTS, 10)
    with pytest.raises(errors.FileSizeWrong):
        verify_checksums(version, manifest)


@pytest.mark.parametrize("threads", [1, 2])
def test_checksums_report_every_byte_read(version, threads):
    threads_before = threading.active_count()
    seen = []
    manifest = read_manifest(version)
    verify_checksums(version, manifest, on_progress=seen.append, threads=threads)
    assert seen[-1] == manifest.total_bytes
    assert seen == sorted(seen)
    assert threading.active_count() <= threads_before


# --- the header as a whole ----------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"", b"\x02\0\0\0", b"\x02\0\0\0\0\0\0"])
def test_file_without_room_for_a_length_is_refused(tmp_path, raw):
    refuse_weights(tmp_path, raw, errors.NotSafetensors)


@pytest.mark.parametrize("length", [100, 2**31, 2**63, 2**64 - 1])
def test_header_longer_than_the_file_is_refused(tmp_path, length):
    error = refuse_weights(tmp_path, length.to_bytes(8, "little") + b"{}", errors.HeaderTooLong)
    assert (error.header_bytes, error.limit_bytes) == (length, 2)


def test_header_over_the_format_limit_is_refused(tmp_path):
    raw = (100_000_001).to_bytes(8, "little") + b"{"
    size = 200_000_000
    directory = make_version(tmp_path / "v1", {WEIGHTS: raw}, entries=(FileEntry(WEIGHTS, size, "0" * 64),))
    os.truncate(directory / WEIGHTS, size)
    with pytest.raises(errors.HeaderTooLong) as refusal:
        verify_layout(directory)
    assert refusal.value.limit_bytes == 100_000_000


def test_torch_save_zip_in_disguise_is_refused(tmp_path):
    buffer = io.BytesIO()
    torch.save({"t": torch.zeros(2)}, buffer)
    assert "zip" in refuse_weights(tmp_path, buffer.getvalue(), errors.NotSafetensors).looks_like


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_in_disguise_is_refused(tmp_path, protocol):
    raw = pickle.dumps({"t": [1.0] * 100}, protocol=protocol)
    assert "pickle" in refuse_weights(tmp_path, raw, errors.NotSafetensors).looks_like


@pytest.mark.parametrize("protocol", [0, 1])
def test_old_pickle_in_disguise_is_refused(tmp_path, protocol):
    refuse_weights(tmp_path, pickle.dumps({"t": [1.0] * 100}, protocol=protocol), errors.HeaderTooLong)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b" {}",
        b"[]",
        b'{"t": 1}',
        b'{"t": {}}',
        b'{"t": {"dtype": "U8", "shape": [], "data_offsets": [0, 1], "more": 1}}',
        b'{"__metadata__": []}',
        b'{"__metadata__": {"a": 1}}',
        b'{"\xff": 1}',
        b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
        b'{"t": NaN}',
        b'{"t": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"t": ' + b"[" * 10 + b"]" * 10 + b"}",
    ],
)
def test_header_that_is_not_the_formats_json_is_refused(tmp_path, header):
    refuse_weights(tmp_path, safetensors(header, b""), errors.HeaderInvalid)


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (b'{"t": 1, "t": 1}', "t"),
        (b'{"t": {"dtype": "U8", "dtype": "I8"}}', "dtype"),
    ],
)
def test_key_twice_in_the_header_is_refused(tmp_path, header, key):
    assert refuse_weights(tmp_path, safetensors(header, b""), errors.DuplicateKey).key == key


def test_tensor_name_in_two_files_is_refused(tmp_path):
    files = {"a.safetensors": safetensors(), "b.safetensors": safetensors()}
    with pytest.raises(errors.DuplicateKey) as refusal:
        verify_layout(make_version(tmp_path / "v1", files))
    assert refusal.value.key == "bias"


def test_prefix_tells_tensor_names_of_two_files_apart(tmp_path):
    files = {"a.safetensors": safetensors(), "b.safetensors": safetensors()}
    entries = tuple(dataclasses.replace(e, prefix=e.path[:2]) for e in manifest_for(files).files)
    assert len(verify_layout(make_version(tmp_path / "v1", files, entries)).headers) == 2


# --- one tensor of the header -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "f32", "", None, 4, ["F32"]])
def test_unknown_dtype_is_refused(tmp_path, dtype):
    assert refuse_weights(tmp_path, one_tensor(dtype=dtype), errors.DtypeUnknown).tensor == "t"


@pytest.mark.parametrize(
    "shape",
    [
        [3],
        [],
        [0],
        [2, 2],
        [True, 2],
        [2.0],
        ["2"],
        [[2]],
        None,
        2,
        "2",
        [-2],
        [-1, -2],
        [2**63],
        [2**62, 4],
        [2**33, 2**33, 2**33],
        [2**63 - 1] * 64,
        [2**62, 0, 4],
        [1] * 64 + [2],
    ],
)
def test_shape_that_is_not_the_bytes_is_refused(tmp_path, shape):
    assert refuse_weights(tmp_path, one_tensor(shape=shape), errors.ShapeWrong).tensor == "t"


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 9],
        [4, 12],
        [2**62, 2**62 + 8],
        [2**64, 2**64 + 8],
        [8, 0],
        [-8, 0],
        [0, True],
        [0, 8.0],
        [0],
        [0, 8, 8],
        [],
        None,
        "08",
        {"0": 8},
    ],
)
def test_offsets_out_of_range_are_refused(tmp_path, offsets):
    assert refuse_weights(tmp_path, one_tensor(data_offsets=offsets), errors.OffsetsInvalid).tensor == "t"


def two_tensors(first, second, data_bytes):
    table = {
        "a": {"dtype": "U8", "shape": [first[1] - first[0]], "data_offsets": first},
        "b": {"dtype": "U8", "shape": [second[1] - second[0]], "data_offsets": second},
    }
    return safetensors(table, b"\0" * data_bytes)


@pytest.mark.parametrize(("first", "second"), [([0, 4], [3, 7]), ([0, 7], [3, 4]), ([0, 7], [0, 7])])
def test_overlapping_tensors_are_refused(tmp_path, first, second):
    error = refuse_weights(tmp_path, two_tensors(first, second, 7), errors.OffsetsInvalid)
    assert "overlaps" in error.why


def test_hole_between_tensors_is_refused(tmp_path):
    error = refuse_weights(tmp_path, two_tensors([0, 3], [4, 7], 7), errors.OffsetsInvalid)
    assert (error.tensor, error.why) == ("b", "leaves a hole before it")


def test_bytes_of_no_tensor_are_refused(tmp_path):
    assert "no tensor" in refuse_weights(tmp_path, one_tensor(b"\0" * 9), errors.OffsetsInvalid).why
    assert "no tensor" in refuse_weights(tmp_path, safetensors({}, b"\0"), errors.OffsetsInvalid).why


def test_file_cut_inside_the_last_tensor_is_refused(tmp_path):
    refuse_weights(tmp_path, safetensors(SOUND_TABLE, SOUND_DATA[:-1]), errors.OffsetsInvalid)


def test_file_of_no_tensor_is_accepted(tmp_path):
    layout = verify_layout(make_version(tmp_path / "v1", {WEIGHTS: safetensors({}, b"")}))
    assert layout.headers[WEIGHTS].tensors == ()


def test_names_and_metadata_are_free_text(tmp_path):
    table = {"__metadata__": {"a": "\U0001f600"}, "": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    assert verify_layout(make_version(tmp_path / "v1", {WEIGHTS: safetensors(table, b"\0")}))


def test_every_error_has_its_own_reason():
    children, found = [errors.WeightsError], []
    while children:
        kind = children.pop()
        found.append(kind.reason)
        children += kind.__subclasses__()
    assert len(found) == len(set(found))
