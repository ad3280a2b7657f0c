"""What can be wrong with a version, on disk or in memory. Conditions a caller can act on, with fields.

Knows no protocol: a message names the file and the reason, ``reason`` is the word for machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class WeightsError(Exception):
    """Root of everything this package raises on purpose.

    Every child sets ``reason``, one snake_case word for logs, status and metrics.
    """

    reason = "weights_error"

    def __reduce__(self) -> tuple[Callable[..., WeightsError], tuple[Any, ...]]:
        # Exceptions pickle by positional args and ours have fields by name; a checking process sends them.
        return _rebuild, (type(self), dict(vars(self)))


def _rebuild(kind: type[WeightsError], fields: Mapping[str, Any]) -> WeightsError:
    return kind(**fields)


# --- a file of a version ------------------------------------------------------------------------------


@dataclass(eq=False)
class FileRefused(WeightsError):
    """A file of a version is not what a version may hold. ``path`` is the file."""

    reason = "file_refused"
    path: Path

    def __str__(self) -> str:
        return f"{self.path}: {self._why()}"

    def _why(self) -> str:
        return self.reason.replace("_", " ")


@dataclass(eq=False)
class FileMissing(FileRefused):
    """The manifest lists a file that is not there."""

    reason = "file_missing"

    def _why(self) -> str:
        return "listed in the manifest, not on disk"


@dataclass(eq=False)
class FileUnlisted(FileRefused):
    """A file or directory is there that the manifest does not list."""

    reason = "file_unlisted"

    def _why(self) -> str:
        return "on disk, not listed in the manifest"


@dataclass(eq=False)
class FileUnreadable(FileRefused):
    """The system refuses to open or read the file. ``error`` is what it said."""

    reason = "file_unreadable"
    error: str

    def _why(self) -> str:
        return f"cannot be read: {self.error}"


@dataclass(eq=False)
class NotRegular(FileRefused):
    """A FIFO, socket, device or directory where a file should be (or a file in a directory's place)."""

    reason = "not_regular"

    def _why(self) -> str:
        return "not of the kind the manifest needs there (a regular file, inside real directories)"


@dataclass(eq=False)
class PathEscapes(FileRefused):
    """A symbolic link, an absolute path or ``..``: it could lead out of the version's directory."""

    reason = "path_escapes"
    why: str

    def _why(self) -> str:
        return self.why


@dataclass(eq=False)
class FileSizeWrong(FileRefused):
    """The file is shorter or longer than the manifest says."""

    reason = "file_size_wrong"
    expected_bytes: int
    actual_bytes: int

    def _why(self) -> str:
        return f"{self.actual_bytes} bytes, the manifest says {self.expected_bytes}"


@dataclass(eq=False)
class ChecksumWrong(FileRefused):
    """The bytes of the file are not the ones the manifest was written for."""

    reason = "checksum_wrong"
    expected: str
    actual: str

    def _why(self) -> str:
        return f"sha256 {self.actual}, the manifest says {self.expected}"


# --- the manifest -------------------------------------------------------------------------------------


@dataclass(eq=False)
class ManifestMissing(FileRefused):
    """A directory without manifest.json is no version, or not yet."""

    reason = "manifest_missing"

    def _why(self) -> str:
        return "no such file; a directory without it is not a version"


@dataclass(eq=False)
class ManifestInvalid(WeightsError):
    """The manifest breaks a rule. ``field`` is the place (``files[2].sha256``), ``why`` the rule."""

    reason = "manifest_invalid"
    field: str
    why: str
    path: Path = Path("manifest.json")

    def __str__(self) -> str:
        return f"{self.path}: {self.field}: {self.why}"


@dataclass(eq=False)
class FormatUnknown(WeightsError):
    """The manifest is written in a format this release does not know."""

    reason = "format_unknown"
    found: int
    known: int
    path: Path = Path("manifest.json")

    def __str__(self) -> str:
        return f"{self.path}: format {self.found}, this release reads format {self.known}"


# --- a safetensors header -----------------------------------------------------------------------------


@dataclass(eq=False)
class NotSafetensors(FileRefused):
    """Another format under this name. ``looks_like`` says which (``a zip, as torch.save writes``)."""

    reason = "not_safetensors"
    looks_like: str

    def _why(self) -> str:
        return f"not a safetensors file: {self.looks_like}"


@dataclass(eq=False)
class HeaderTooLong(FileRefused):
    """The header claims more bytes than the file or the format allows; nothing was read."""

    reason = "header_too_long"
    header_bytes: int
    limit_bytes: int

    def _why(self) -> str:
        return f"header of {self.header_bytes} bytes, at most {self.limit_bytes} are possible"


@dataclass(eq=False)
class HeaderInvalid(FileRefused):
    """The header is not the JSON that the format asks for."""

    reason = "header_invalid"
    why: str

    def _why(self) -> str:
        return f"header: {self.why}"


@dataclass(eq=False)
class TensorRefused(FileRefused):
    """One tensor of a header breaks a rule."""

    reason = "tensor_refused"
    tensor: str
    why: str

    def _why(self) -> str:
        return f"tensor {self.tensor!r}: {self.why}"


@dataclass(eq=False)
class OffsetsInvalid(TensorRefused):
    """Data offsets out of range, backwards, overlapping or with a hole between them."""

    reason = "offsets_invalid"


@dataclass(eq=False)
class DtypeUnknown(TensorRefused):
    """A dtype that is not in the table, or that does not fill whole bytes."""

    reason = "dtype_unknown"


@dataclass(eq=False)
class ShapeWrong(TensorRefused):
    """The shape is no list of sizes, or shape x dtype is not the number of bytes."""

    reason = "shape_wrong"


@dataclass(eq=False)
class DuplicateKey(FileRefused):
    """One name twice: a JSON key, or a tensor name of two files (after their prefixes)."""

    reason = "duplicate_key"
    key: str

    def _why(self) -> str:
        return f"{self.key!r} is there twice"


# --- the store ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class VersionExists(WeightsError):
    """A version is already at the place where one should be written; versions are never rewritten."""

    reason = "version_exists"
    path: Path

    def __str__(self) -> str:
        return f"{self.path}: already there, and versions are never rewritten"


@dataclass(eq=False)
class VersionNotFound(WeightsError):
    """No complete version of that number. ``named_by`` is the file that asked for it, if one did."""

    reason = "version_not_found"
    path: Path
    named_by: Path | None = None

    def __str__(self) -> str:
        return f"{self.path}: no such version" + (f", named by {self.named_by}" if self.named_by else "")


@dataclass(eq=False)
class NoVersion(WeightsError):
    """The store holds no complete version at all."""

    reason = "no_version"
    root: Path

    def __str__(self) -> str:
        return f"{self.root}: holds no complete version"


@dataclass(eq=False)
class PinInvalid(FileRefused):
    """CURRENT holds something else than one line like ``v7``."""

    reason = "pin_invalid"

    def _why(self) -> str:
        return "not one line naming a version, like v7"


@dataclass(eq=False)
class VersionInUse(WeightsError):
    """A live process maps the version, or someone is deleting it right now."""

    reason = "version_in_use"
    path: Path

    def __str__(self) -> str:
        return f"{self.path}: in use by another process"


@dataclass(eq=False)
class VersionProtected(WeightsError):
    """Deleting was refused because the version is current, pinned or protected by the caller."""

    reason = "version_protected"
    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path}: not deleted, it is {self.why}"


@dataclass(eq=False)
class StoreBusy(WeightsError):
    """Another process held the store's lock for the whole time allowed."""

    reason = "store_busy"
    path: Path
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.path}: still locked by another process after {self.timeout_s:g} s"


@dataclass(eq=False)
class NoSpace(WeightsError):
    """The file system has no room for the version."""

    reason = "no_space"
    path: Path
    needed_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return f"{self.path}: {self.needed_bytes} bytes needed, {self.free_bytes} free"


# --- memory -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class MappingInUse(WeightsError):
    """Closing was refused: tensors still point into the mapping."""

    reason = "mapping_in_use"
    paths: tuple[Path, ...]

    def __str__(self) -> str:
        return f"tensors still use {', '.join(map(str, self.paths))}"


@dataclass(eq=False)
class AttachMismatch(WeightsError):
    """Tensors and module do not fit. Each list is cut to a few names; ``total`` counts all."""

    reason = "attach_mismatch"
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong_shape: tuple[str, ...]
    wrong_dtype: tuple[str, ...]
    total: int

    def __str__(self) -> str:
        kinds = ("missing", "unexpected", "wrong_shape", "wrong_dtype")
        found = [(kind.replace("_", " "), getattr(self, kind)) for kind in kinds]
        lists = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in found if names)
        return f"{self.total} tensors do not fit; {lists}"


@dataclass(eq=False)
class PrivateWeights(WeightsError):
    """Parameters or buffers that are not in the mapping: this process would pay for them alone."""

    reason = "private_weights"
    names: tuple[str, ...]
    total: int

    def __str__(self) -> str:
        return f"{self.total} tensors lie outside the mapping: {', '.join(self.names)}"


@dataclass(eq=False)
class LeftOnMeta(WeightsError):
    """Parameters or buffers without memory: no tensor of the version filled them."""

    reason = "left_on_meta"
    names: tuple[str, ...]
    total: int

    def __str__(self) -> str:
        return f"{self.total} tensors were never filled (still on meta): {', '.join(self.names)}"


@dataclass(eq=False)
class TiedTensors(WeightsError):
    """Tensors to write share memory; the format has no ties, so one of them must go."""

    reason = "tied_tensors"
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"share memory, write one and tie again after attaching: {', '.join(self.names)}"
