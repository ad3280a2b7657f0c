"""Versions that failed here and are not tried again until their files or the pin change.

One JSON file in the run directory: the arbiter writes it, `warmserve versions` shows it, `--force` lifts it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from server import events
from server.events import emit
from server.preparation import Refusal
from weights.store import Store, Version

LOG = logging.getLogger("warmserve")


class Quarantine:
    """The quarantined versions of one run directory, by the version's path."""

    def __init__(self, run_dir: Path, store: Store) -> None:
        self._file = run_dir / "quarantine.json"
        self._store = store
        self._unsaved: dict[str, Any] = {}  # what a full or read-only disk did not take

    def add(self, version: Version, refusal: Refusal) -> None:
        """Quarantine *version* as it is now."""
        entry = {**refusal.__dict__, "state": self._state_of(version), "since_unix": time.time()}
        try:
            self._write({**self._read(), self._key(version): entry})
        except OSError as error:
            self._unsaved[self._key(version)] = entry
            emit(LOG, logging.WARNING, events.QUARANTINE_NOT_SAVED, version=version.name, detail=str(error))

    def refusal_of(self, version: Version) -> Refusal | None:
        """Return why *version* is quarantined; None if it is not, or changed since, or the pin did."""
        entry = self._read().get(self._key(version)) or self._unsaved.get(self._key(version))
        if entry is None or entry.get("state") != self._state_of(version):
            return None
        return Refusal(str(entry["reason"]), str(entry["detail"]))

    def lift(self, version: Version) -> None:
        """Allow *version* to be tried again."""
        entries = self._read()
        if entries.pop(self._key(version), None) is not None:
            self._write(entries)

    def _key(self, version: Version) -> str:
        return str(version.path.resolve())

    def _state_of(self, version: Version) -> str:
        """Return a digest of the version's files (by name, size, inode, times) and of the pin."""
        pin = self._store.root / Store.CURRENT
        paths = [*sorted(version.path.rglob("*")), pin]
        lines = [f"{path}\0{_stat(path)}" for path in paths]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _read(self) -> dict[str, Any]:
        try:
            entries: dict[str, Any] = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return entries

    def _write(self, entries: dict[str, Any]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(entries, indent=2))
        temporary.chmod(0o644)  # an operator may write it for the arbiter to read
        os.replace(temporary, self._file)


def _stat(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "-"
    return f"{found.st_size} {found.st_ino} {found.st_mtime_ns} {found.st_ctime_ns}"
