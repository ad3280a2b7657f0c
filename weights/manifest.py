"""The manifest of a version: parse, validate, render. Pure; opens no file and imports no torch.

``manifest.json`` says what a version is and lists every other file of its directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

from weights.errors import DuplicateKey, FormatUnknown, ManifestInvalid, PathEscapes
from weights.strict_json import JsonRefused, KeyTwice, loads

FORMAT = 1
FILE_NAME = "manifest.json"
MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_FILES = 10_000

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FILE_FIELDS = {"path", "bytes", "sha256", "prefix"}
_FIELDS = {"format", "name", "family", "config", "precision", "created", "files"}
_FIELDS |= {"warmup", "licence", "source"}  # these three may be left out


@dataclass(frozen=True)
class FileEntry:
    """One file: its path inside the version, its size, its checksum (64 lower-case hex digits).

    ``prefix`` is put before the tensor names of this file, so that the files of several modules can
    share one version. ``extra`` keeps fields this release does not know.
    """

    path: str
    size_bytes: int
    sha256: str
    prefix: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds_tensors(self) -> bool:
        """Whether this is a safetensors file; anything else is an asset."""
        return self.path.endswith(".safetensors")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a version is. ``created`` is ISO 8601 in UTC; ``warmup`` holds inputs in the family's terms."""

    name: str
    family: str
    config: Mapping[str, Any]
    precision: str
    created: str
    files: tuple[FileEntry, ...]
    warmup: tuple[Mapping[str, Any], ...] = ()
    licence: str = ""
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(entry.size_bytes for entry in self.files)


def utc_now() -> str:
    """Return the present in the form of ``created``, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(raw: bytes, path: Path = Path(FILE_NAME)) -> Manifest:
    """Return the manifest that *raw* holds; *path* only names it in errors.

    Raises:
        FormatUnknown: written in another format.
        DuplicateKey: a key twice in one object.
        PathEscapes: a file's path is absolute or has ``..`` in it.
        ManifestInvalid: anything else; ``field`` says where.
    """
    if len(raw) > MAX_BYTES:
        raise ManifestInvalid("manifest", f"over {MAX_BYTES} bytes", path)
    try:
        table = loads(raw, max_depth=MAX_DEPTH)
    except KeyTwice as exc:
        raise DuplicateKey(path, exc.key) from None
    except JsonRefused as exc:
        raise ManifestInvalid("manifest", str(exc), path) from None
    if not isinstance(table, dict):
        raise ManifestInvalid("manifest", "not an object", path)
    return _manifest(_Reader(table, path))


def render(manifest: Manifest) -> bytes:
    """Return the JSON of *manifest*; ``parse`` gives the same manifest back.

    Raises:
        ManifestInvalid, PathEscapes: it holds something that ``parse`` would refuse.
    """
    table = {
        **manifest.extra,
        "format": FORMAT,
        "name": manifest.name,
        "family": manifest.family,
        "config": manifest.config,
        "precision": manifest.precision,
        "created": manifest.created,
        "files": [_render_file(entry) for entry in manifest.files],
        "warmup": list(manifest.warmup),
        "licence": manifest.licence,
        "source": manifest.source,
    }
    try:
        raw = json.dumps(table, indent=2, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as exc:
        raise ManifestInvalid("manifest", f"cannot be written as JSON: {exc}") from None
    parse(raw)  # a manifest that nobody could read back must not get onto the disk
    return raw


def _render_file(entry: FileEntry) -> dict[str, Any]:
    table = {**entry.extra, "path": entry.path, "bytes": entry.size_bytes, "sha256": entry.sha256}
    return {**table, "prefix": entry.prefix} if entry.prefix else table


@dataclass(frozen=True)
class _Reader:
    """One JSON object and its place in the manifest; takes fields out by type."""

    table: dict[str, Any]
    path: Path
    place: str = ""

    def refuse(self, key: str, why: str) -> ManifestInvalid:
        return ManifestInvalid(f"{self.place}{key}", why, self.path)

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        if key not in self.table and default is not None:
            return default
        if key not in self.table:
            raise self.refuse(key, "missing")
        value = self.table[key]
        if type(value) is not kind:  # not isinstance: true is no number
            raise self.refuse(key, f"is {type(value).__name__}, not {kind.__name__}")
        return value

    def word(self, key: str) -> str:
        value: str = self.take(key, str)
        if not value or len(value) > 200 or _CONTROL.search(value):
            raise self.refuse(key, "not 1 to 200 characters without control characters")
        return value


def _manifest(reader: _Reader) -> Manifest:
    # The format number first: another format may mean anything by the other fields.
    found = reader.take("format", int)
    if found != FORMAT:
        raise FormatUnknown(found, FORMAT, reader.path)
    return Manifest(
        name=reader.word("name"),
        family=reader.word("family"),
        config=reader.take("config", dict),
        precision=reader.word("precision"),
        created=_created(reader),
        files=_files(reader),
        warmup=_warmup(reader),
        licence=reader.take("licence", str, ""),
        source=reader.take("source", str, ""),
        extra={key: value for key, value in reader.table.items() if key not in _FIELDS},
    )


def _created(reader: _Reader) -> str:
    value: str = reader.take("created", str)
    try:
        if _CREATED.fullmatch(value):
            datetime.fromisoformat(value[:19])
            return value
    except ValueError:
        pass
    raise reader.refuse("created", "not ISO 8601 in UTC, like 2026-01-31T12:00:00Z")


def _warmup(reader: _Reader) -> tuple[Mapping[str, Any], ...]:
    items = reader.take("warmup", list, [])
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise reader.refuse(f"warmup[{index}]", "not an object")
    return tuple(items)


def _files(reader: _Reader) -> tuple[FileEntry, ...]:
    items = reader.take("files", list)
    if len(items) > MAX_FILES:
        raise reader.refuse("files", f"more than {MAX_FILES}")
    entries = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise reader.refuse(f"files[{index}]", "not an object")
        entries.append(_file(_Reader(item, reader.path, f"files[{index}].")))
    _check_paths(reader, entries)
    return tuple(entries)


def _file(reader: _Reader) -> FileEntry:
    entry = FileEntry(
        path=_inside(reader),
        size_bytes=reader.take("bytes", int),
        sha256=reader.take("sha256", str),
        prefix=reader.take("prefix", str, ""),
        extra={key: value for key, value in reader.table.items() if key not in _FILE_FIELDS},
    )
    if not 0 <= entry.size_bytes < 2**63:
        raise reader.refuse("bytes", "not a file size")
    if not _SHA256.fullmatch(entry.sha256):
        raise reader.refuse("sha256", "not 64 lower-case hexadecimal digits")
    if entry.prefix and not entry.holds_tensors:
        raise reader.refuse("prefix", "only a .safetensors file has tensor names")
    return entry


def _inside(reader: _Reader) -> str:
    value: str = reader.take("path", str)
    parts = value.split("/")
    if value.startswith("/") or ".." in parts:
        raise PathEscapes(reader.path, f"{reader.place}path {value[:200]!r} leads out of the version")
    too_long = len(value.encode()) > 1000 or any(len(part.encode()) > 255 for part in parts)
    if too_long or "" in parts or "." in parts or "\\" in value or _CONTROL.search(value):
        raise reader.refuse("path", "not a plain relative path")
    return value


def _check_paths(reader: _Reader, entries: list[FileEntry]) -> None:
    seen = {FILE_NAME}
    directories: set[str] = set()
    for index, entry in enumerate(entries):
        if entry.path in seen:
            raise reader.refuse(f"files[{index}].path", f"{entry.path!r} is listed twice or is the manifest")
        seen.add(entry.path)
        directories.update(str(parent) for parent in PurePosixPath(entry.path).parents)
    for both in seen & directories:
        raise reader.refuse("files", f"{both!r} is both a file and a directory")
