"""The versions of one model on disk: list, publish, pin, delete.

``root/vN`` directories, ``root/CURRENT`` (one line, the pinned version) and ``root/.lock``. Reading needs
no write permission; a version is never rewritten and its number never used again.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from weights import scratch
from weights.checksums import Progress, verify_checksums
from weights.confined import open_directory, open_file, read_exactly, system_errors
from weights.errors import (
    FileMissing,
    NoVersion,
    PinInvalid,
    VersionNotFound,
    VersionProtected,
)
from weights.lease import exclusive
from weights.manifest import FILE_NAME, Manifest
from weights.publishing import copy_version, rename_new, settle, sync_directory
from weights.store_lock import StoreLock, locked
from weights.verify import verify_layout

LOCK_TIMEOUT_S = 30.0  # held for renames and fsyncs only
_NAME = re.compile(r"v([1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True, order=True)
class Version:
    """One version directory of a store."""

    number: int
    path: Path

    @property
    def name(self) -> str:
        """``v7``, as it is written everywhere."""
        return f"v{self.number}"


class Store:
    """All versions of one model.

    Args:
        root: the directory that holds them; it is made by the first publish.
    """

    CURRENT = "CURRENT"

    def __init__(self, root: Path) -> None:
        self.root = root

    def version(self, number: int) -> Version:
        """Return the complete version of that *number*.

        Raises:
            VersionNotFound: there is none.
        """
        found = Version(number, self.root / f"v{number}")
        if not _is_complete(found.path):
            raise VersionNotFound(found.path)
        return found

    def versions(self) -> list[Version]:
        """List the complete versions by number; other names and interrupted work are passed over."""
        return [version for version in self._numbered() if _is_complete(version.path)]

    def current(self) -> Version:
        """Return the version to serve: the pinned one, else the highest.

        Raises:
            NoVersion: none is pinned and none is there.
            VersionNotFound: CURRENT names one that is not there.
            PinInvalid: CURRENT is not one line like ``v7``.
        """
        number = self.pinned()
        if number is not None:
            path = self.root / f"v{number}"
            if not _is_complete(path):
                raise VersionNotFound(path, self.root / self.CURRENT)
            return Version(number, path)
        versions = self.versions()
        if not versions:
            raise NoVersion(self.root)
        return versions[-1]

    def pinned(self) -> int | None:
        """Return the number that CURRENT names, whether that version is there or not; None without CURRENT.

        Raises:
            PinInvalid: CURRENT is not one line like ``v7``.
        """
        path = self.root / self.CURRENT
        try:
            with open_directory(self.root, follow=True) as fd, open_file(fd, self.CURRENT, path) as file_fd:
                text = read_exactly(file_fd, 64, 0, path).decode(errors="replace")
        except FileMissing:
            return None
        match = _NAME.fullmatch(text.strip())
        if match is None:
            raise PinInvalid(path)
        return int(match[1])

    def pin(self, number: int) -> Version:
        """Make *number* the current version, whatever is published later.

        Raises:
            VersionNotFound: there is no such version.
            StoreBusy: another process held the store's lock too long.
        """
        with self._locked():
            version = self.version(number)
            temporary = scratch.new_name(self.root, scratch.PIN)
            with temporary.open("x") as file:
                file.write(f"{version.name}\n")
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            os.replace(temporary, self.root / self.CURRENT)
            sync_directory(self.root)
        return version

    def unpin(self) -> None:
        """Let the highest version be the current one again.

        Raises:
            StoreBusy: another process held the store's lock too long.
        """
        if not self.root.is_dir():
            return
        with self._locked():
            (self.root / self.CURRENT).unlink(missing_ok=True)
            sync_directory(self.root)

    def publish(self, source: Path, *, move: bool = False, on_progress: Progress | None = None) -> Version:
        """Verify *source* and make it the next version; it appears complete or not at all.

        With *move*, a source on the same file system is renamed, never copied, and is gone afterwards;
        nothing happens to it if it is refused.

        Raises:
            WeightsError: *source* is not a sound version; see ``verify_layout``, ``verify_checksums``.
            NoSpace: no room for the copy.
            StoreBusy: another process held the store's lock too long.
        """
        manifest = verify_layout(source).manifest
        self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not move:
            return self._publish_copy(source, manifest, on_progress)
        if os.path.samefile(source.parent, self.root) and _NAME.fullmatch(source.name):
            raise VersionProtected(source, "published already, and only delete() takes it away")
        if _same_file_system(source, self.root):
            verify_checksums(source, manifest, on_progress=on_progress)
            return self._adopt(source, manifest)
        version = self._publish_copy(source, manifest, on_progress)
        shutil.rmtree(source)
        return version

    def delete(self, number: int, *, protected: Collection[int] = ()) -> None:
        """Delete a version that no process maps and nobody protects.

        Args:
            protected: numbers the caller needs, such as the previous version.

        Raises:
            VersionNotFound: there is no such version.
            VersionProtected: it is protected, current or pinned.
            VersionInUse: a live process leases it.
            StoreBusy: another process held the store's lock too long.
        """
        path = self.root / f"v{number}"
        aside = scratch.new_name(self.root, scratch.DELETE)
        with ExitStack() as stack:
            with self._locked() as lock:
                self._refuse_protected(number, path, protected)
                lock.remember(number)  # it may have come by hand and not from next_number()
                # The exclusive lock ends with this block: whoever waited for a lease finds the name gone.
                with exclusive(path) if _is_complete(path) else nullcontext():
                    stack.enter_context(scratch.hold(path))
                    rename_new(path, aside)
            shutil.rmtree(aside)

    def leftovers(self) -> list[Path]:
        """List what interrupted work left in the store, work that still goes on included."""
        return scratch.leftovers(self.root)

    def sweep(self) -> list[Path]:
        """Remove what interrupted work left behind, and return it; work that goes on is not touched.

        Raises:
            StoreBusy: another process held the store's lock too long.
        """
        if not self.leftovers():
            return []
        with self._locked():
            seized = list(scratch.seize(self.root))
        for path, fd in seized:
            if fd is None:
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path, ignore_errors=True)
                os.close(fd)
        return [path for path, _ in seized]

    def _publish_copy(self, source: Path, manifest: Manifest, on_progress: Progress | None) -> Version:
        staging = scratch.new_name(self.root, scratch.PUBLISH)
        with ExitStack() as stack:
            with self._locked():  # sweep() looks under this lock: it never sees the directory unheld
                staging.mkdir(mode=0o700)
                stack.enter_context(scratch.hold(staging))
            try:
                copy_version(source, staging, manifest)
                # The copy is what will be served, so the copy is what is checked.
                copied = verify_layout(staging).manifest
                verify_checksums(staging, copied, on_progress=on_progress)
                return self._adopt(staging, copied)
            finally:
                shutil.rmtree(staging, ignore_errors=True)  # gone from this name if it was adopted

    def _adopt(self, directory: Path, manifest: Manifest) -> Version:
        settle(directory, manifest)
        with self._locked() as lock:
            number = lock.next_number(version.number for version in self._numbered())
            version = Version(number, self.root / f"v{number}")
            rename_new(directory, version.path)
        return version

    def _refuse_protected(self, number: int, path: Path, protected: Collection[int]) -> None:
        if not os.path.isdir(path):
            raise VersionNotFound(path)
        if number in protected:
            raise VersionProtected(path, "needed by the caller")
        if number == self.pinned():
            raise VersionProtected(path, "pinned")
        with suppress(NoVersion, VersionNotFound):
            if self.current().number == number:
                raise VersionProtected(path, "current")

    def _numbered(self) -> list[Version]:
        try:
            with system_errors(self.root), os.scandir(self.root) as entries:
                names = [match for entry in entries if (match := _NAME.fullmatch(entry.name))]
        except FileMissing:
            return []
        return sorted(Version(int(match[1]), self.root / match[0]) for match in names)

    def _locked(self) -> AbstractContextManager[StoreLock]:
        return locked(self.root / ".lock", timeout_s=LOCK_TIMEOUT_S)


def _same_file_system(one: Path, other: Path) -> bool:
    return os.stat(one).st_dev == os.stat(other).st_dev


def _is_complete(path: Path) -> bool:
    try:
        manifest = os.lstat(path / FILE_NAME)
        return stat.S_ISDIR(os.lstat(path).st_mode) and stat.S_ISREG(manifest.st_mode)
    except OSError:
        return False
