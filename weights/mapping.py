"""A version's tensors in memory: mapped read-only and shared, so that all processes use one copy.

Starts no thread and runs no torch operation that would start one: the process that maps forks later.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import gc
import math
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy
import torch

from weights.confined import check_size, open_directory, open_file, system_errors
from weights.errors import FileUnreadable, MappingInUse
from weights.header import Header, TensorEntry
from weights.verify import Layout

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

_MADV_POPULATE_READ = 22  # Linux 5.14
_WINDOW_BYTES = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass
class _MappedFile:
    path: Path
    prefix: str
    header: Header
    mapping: mmap.mmap
    address: int
    # Tensors keep this view alive and it keeps the mapping: None once closing was asked for.
    view: memoryview | None


class MappedVersion:
    """Every safetensors file of one version, mapped. Closing is refused while a tensor uses it.

    Args:
        layout: a verified version; sizes are checked once more against the open files.

    Raises:
        FileMissing, FileSizeWrong, FileUnreadable, NotRegular, PathEscapes: the files changed since.
    """

    def __init__(self, layout: Layout) -> None:
        self.directory = layout.directory
        self.manifest = layout.manifest
        self._files: list[_MappedFile] = []
        with open_directory(layout.directory) as fd:
            for entry in layout.manifest.files:
                if entry.holds_tensors:
                    shown = layout.directory / entry.path
                    with open_file(fd, entry.path, shown) as file_fd:
                        check_size(file_fd, entry.size_bytes, shown)
                        header = layout.headers[entry.path]
                        self._files.append(_map(file_fd, shown, entry.prefix, header, entry.size_bytes))
        self._files.sort(key=lambda file: file.address)
        self._addresses = [file.address for file in self._files]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The mapped files."""
        return tuple(file.path for file in self._files)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of address space, the same as the files' sizes; 0 once closed."""
        return sum(len(file.mapping) for file in self._files)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by prefixed name, as views of the mapping: no copy, no page touched.

        Writing to one is SIGSEGV. An empty tensor has no bytes to map and gets memory of its own, none.
        """
        found = {}
        with _read_only_buffers_are_fine():
            for file in self._files:
                for entry in file.header.tensors:
                    found[file.prefix + entry.name] = _tensor(file, entry)
        return found

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether all memory of *tensor* is mapped here (true for a tensor of no bytes, but not on meta)."""
        if tensor.device.type != "cpu":
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return True
        index = bisect.bisect_right(self._addresses, storage.data_ptr()) - 1
        if index < 0:
            return False
        file = self._files[index]
        return storage.data_ptr() + storage.nbytes() <= file.address + len(file.mapping)

    def populate(self, on_progress: Callable[[int], None] | None = None) -> bool:
        """Read all pages into memory and map them, in windows; False if this kernel cannot (before 5.14).

        Called through ctypes, which releases the GIL; mmap.madvise holds it for the whole call.

        Raises:
            FileUnreadable: the disk failed, or the file was cut.
        """
        total = 0
        for file in self._files:
            for start in range(0, len(file.mapping), _WINDOW_BYTES):
                length = min(_WINDOW_BYTES, len(file.mapping) - start)
                if not _populate(file, start, length):
                    return False
                total += length
                if on_progress is not None:
                    on_progress(total)
        return True

    def close(self) -> None:
        """Unmap everything, or nothing: unmapping under a live tensor would be SIGSEGV at its next use.

        Raises:
            MappingInUse: tensors of the named files are still referenced in this process.
        """
        used = self._used_after_release()
        if used:
            gc.collect()  # modules hold themselves in cycles
            used = self._used_after_release()
        if used:
            raise MappingInUse(tuple(used))
        for file in self._files:
            file.view = None
            file.mapping.close()
        self._files, self._addresses = [], []

    def _used_after_release(self) -> list[Path]:
        used = []
        for file in self._files:
            if file.view is None:  # pragma: no cover - closing is all or nothing
                continue
            watch = weakref.ref(file.view)
            file.view = None
            file.view = watch() or memoryview(file.mapping)
            if watch() is not None:
                used.append(file.path)
        return used

    def __enter__(self) -> MappedVersion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not after an error: its traceback holds the tensors, and MappingInUse would hide it.
        if kind is None:
            self.close()


def _map(fd: int, shown: Path, prefix: str, header: Header, size_bytes: int) -> _MappedFile:
    with system_errors(shown):
        mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    view = memoryview(mapping)
    address = int(numpy.frombuffer(view, numpy.uint8).__array_interface__["data"][0])
    return _MappedFile(shown, prefix, header, mapping, address, view)


def _tensor(file: _MappedFile, entry: TensorEntry) -> torch.Tensor:
    dtype = TORCH_DTYPES[entry.dtype]
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=dtype)
    # From the view, not the mmap object: torch keeps its argument alive, and the view counts as an
    # export of the mapping, so that close() cannot unmap under the tensor.
    flat = torch.frombuffer(file.view, dtype=dtype, count=math.prod(entry.shape), offset=entry.begin)
    return flat.view(entry.shape)


@contextmanager
def _read_only_buffers_are_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns; here a write is meant to be a fault.
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        yield


def _populate(file: _MappedFile, start: int, length: int) -> bool:
    while _libc.madvise(file.address + start, length, _MADV_POPULATE_READ) != 0:
        error = ctypes.get_errno()
        if error == errno.EINVAL:
            return False
        if error not in (errno.EINTR, errno.EAGAIN):
            raise FileUnreadable(file.path, os.strerror(error))
    return True
