"""Refuse a version before it is used: its layout without reading a tensor, its checksums by reading all.

Holds no state and starts no process; the caller decides where the seconds of reading are spent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from weights.checksums import verify_checksums as verify_checksums
from weights.confined import check_size, open_directory, open_file, read_exactly, system_errors
from weights.errors import (
    DuplicateKey,
    FileMissing,
    FileUnlisted,
    HeaderTooLong,
    ManifestInvalid,
    ManifestMissing,
)
from weights.header import LENGTH_BYTES, Header, header_bytes, parse_header
from weights.manifest import FILE_NAME, MAX_BYTES, FileEntry, Manifest, parse


@dataclass(frozen=True)
class Layout:
    """A version whose files are all there with the right sizes and sound headers (by path)."""

    directory: Path
    manifest: Manifest
    headers: Mapping[str, Header]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the safetensors files, as they are mapped."""
        return sum(entry.size_bytes for entry in self.manifest.files if entry.holds_tensors)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of the version in *directory*.

    Raises:
        ManifestMissing: there is none. Otherwise what ``manifest.parse`` and ``confined`` raise.
    """
    with open_directory(directory) as fd:
        return _read_manifest(fd, directory)


def verify_layout(directory: Path) -> Layout:
    """Check everything about the version in *directory* that needs no tensor byte; milliseconds.

    Raises:
        WeightsError: a child that names the file and the reason, for every way to be wrong.
    """
    with open_directory(directory) as fd:
        manifest = _read_manifest(fd, directory)
        headers = {}
        for entry in manifest.files:
            shown = directory / entry.path
            with open_file(fd, entry.path, shown) as file_fd:
                check_size(file_fd, entry.size_bytes, shown)
                if entry.holds_tensors:
                    headers[entry.path] = _read_header(file_fd, entry, shown)
        _refuse_unlisted(fd, directory, manifest)
    _check_names(directory, manifest, headers)
    return Layout(directory, manifest, headers)


def _read_manifest(directory_fd: int, directory: Path) -> Manifest:
    path = directory / FILE_NAME
    try:
        with open_file(directory_fd, FILE_NAME, path) as fd:
            if os.fstat(fd).st_size > MAX_BYTES:
                raise ManifestInvalid("manifest", f"over {MAX_BYTES} bytes", path)
            return parse(read_exactly(fd, MAX_BYTES + 1, 0, path), path)
    except FileMissing:
        raise ManifestMissing(path) from None


def _read_header(fd: int, entry: FileEntry, shown: Path) -> Header:
    prefix = read_exactly(fd, LENGTH_BYTES + 1, 0, shown)
    length = header_bytes(prefix, entry.size_bytes, shown)
    raw = read_exactly(fd, length, LENGTH_BYTES, shown)
    if len(raw) != length:  # it shrank since its size was checked
        raise HeaderTooLong(shown, length, len(raw))
    return parse_header(raw, entry.size_bytes, shown)


def _refuse_unlisted(directory_fd: int, directory: Path, manifest: Manifest) -> None:
    # A file that nobody listed is a file that nobody checked, and a family could read it.
    listed = {entry.path for entry in manifest.files} | {FILE_NAME}
    parents = {str(parent) for path in listed for parent in PurePosixPath(path).parents}
    for parent in sorted(parents):
        shown = directory / parent
        with system_errors(shown):
            names = os.listdir(directory_fd) if parent == "." else _list_below(directory_fd, parent)
        for name in names:
            path = name if parent == "." else f"{parent}/{name}"
            if path not in listed and path not in parents:
                raise FileUnlisted(directory / path)


def _list_below(directory_fd: int, relative: str) -> list[str]:
    try:
        fd = os.open(
            relative, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd
        )
    except (FileNotFoundError, NotADirectoryError):
        return []  # replaced since its files were opened; whoever opens them next says so
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _check_names(directory: Path, manifest: Manifest, headers: Mapping[str, Header]) -> None:
    seen: set[str] = set()
    for entry in manifest.files:
        if entry.path in headers:
            for tensor in headers[entry.path].tensors:
                name = entry.prefix + tensor.name
                if name in seen:
                    raise DuplicateKey(directory / entry.path, name)
                seen.add(name)
