"""One generation: a version mapped and leased by the arbiter, and what its workers build from it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from server.api.exchange import Served
from server.device_context import DeviceContextMade, has_device_context
from server.families import find_family
from server.families.base import Family, Instance
from server.pool import InstancePool
from weights.attach import attach
from weights.lease import Lease
from weights.manifest import FILE_NAME as MANIFEST
from weights.manifest import Manifest
from weights.mapping import MappedVersion
from weights.store import Version
from weights.upload import UploadedVersion
from weights.verify import Layout, verify_checksums, verify_layout


@dataclass(frozen=True)
class Generation:
    """A mapped version under its number. The arbiter loads it; its forks inherit it as it is."""

    number: int
    version: Version
    manifest: Manifest
    family: Family
    mapped: MappedVersion
    files: dict[tuple[int, int], int]  # the mapped files: (device, inode) -> bytes
    lease: Lease

    @classmethod
    def load(cls, number: int, version: Version) -> Generation:
        """Lease and map *version* and read what its family needs; no weight is read or copied.

        Raises:
            WeightsError: the version went away or changed its shape since it was checked.
            Exception: whatever the family raises on its configuration or assets.
        """
        lease = Lease(version.path)
        try:
            layout = verify_layout(version.path)
            manifest = layout.manifest
            family = find_family(manifest.family)(version.path, manifest.config)
            return cls(number, version, manifest, family, MappedVersion(layout), weight_files(layout), lease)
        except BaseException:
            lease.close()
            raise

    def build_instances(self, count: int, device: torch.device) -> list[Instance]:
        """Build *count* instances over one set of parameters: the mapping itself, or one copy on *device*."""
        weights = self.mapped if device.type == "cpu" else UploadedVersion(self.mapped.tensors(), device)
        return [self._build_instance(number, device, weights) for number in range(count)]

    def _build_instance(
        self, number: int, device: torch.device, weights: MappedVersion | UploadedVersion
    ) -> Instance:
        module = attach(self.family.build(), weights.tensors(), weights)
        if device.type == "cpu":
            return Instance(module=module, device=device, number=number)
        # Moves the buffers that no file holds; the parameters are there already.
        return Instance(module=module.to(device), device=device, number=number, stream=torch.Stream(device))

    def serve(
        self, instances: list[Instance], device: torch.device, device_broke: Callable[[str], None]
    ) -> Served:
        """Return what a worker serves with *instances*."""
        path = self.version.path
        return Served(
            name=self.manifest.name, version=self.version.name, family=self.family,
            pool=InstancePool(instances, version=self.version.name), created=int(path.stat().st_mtime),
            generation=self.number, device=device, device_broke=device_broke,
            manifest_sha256=hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest(),
        )  # fmt: skip

    def close(self) -> None:
        """Unmap and end this process's part in the lease."""
        self.mapped.close()
        self.lease.close()


class MemoryWouldNotFit(Exception):
    """Serving the old and the new version at once, as a swap does, would exceed the memory limit."""

    reason = "memory_would_not_fit"


@dataclass(frozen=True)
class MemoryUse:
    """What is held while a new version comes up, in bytes; ``limit_bytes`` is what may be held."""

    limit_bytes: int
    private_bytes: int  # of the arbiter and of as many workers as a swap has at its fullest
    mapped: dict[tuple[int, int], int]  # weight files mapped now: (device, inode) -> bytes

    def refuse_excess(self, layout: Layout) -> None:
        """Raise MemoryWouldNotFit if *layout*'s files beside those mapped now exceed the limit.

        A file that is mapped already costs nothing more: its pages are the same.
        """
        together = self.mapped | weight_files(layout)
        needed = self.private_bytes + sum(together.values())
        if needed > self.limit_bytes:
            raise MemoryWouldNotFit(
                f"old and new version and their workers need {needed} bytes, the limit is {self.limit_bytes}"
            )


def weight_files(layout: Layout) -> dict[tuple[int, int], int]:
    """Return the weight files of a version as (device, inode) -> bytes."""
    found = {}
    for path in layout.headers:
        status = (layout.directory / path).stat()
        found[status.st_dev, status.st_ino] = status.st_size
    return found


def check_version(version: Version, memory: MemoryUse, *, try_family: bool) -> None:
    """Read every byte of *version* once against its manifest; with *try_family*, make its family too.

    Raises:
        WeightsError, UnknownFamily, MemoryWouldNotFit, DeviceContextMade, or whatever the family raises.
    """
    layout = verify_layout(version.path)
    family = find_family(layout.manifest.family)
    memory.refuse_excess(layout)
    verify_checksums(version.path, layout.manifest, threads=2)
    if try_family:
        family(version.path, layout.manifest.config)
        if has_device_context():
            raise DeviceContextMade
