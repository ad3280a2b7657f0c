"""Add what dead workers counted to one retired file of each kind, so that files do not pile up.

Counters and histograms are sums in the files too (buckets are stored one by one), so a key's values add up
whatever the key means. Gauges are not kept in files at all: see `server.scrape`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

from server.metric_files import FILE_BYTES, KINDS, RETIRED, allocate, folding, owner_of

ENTRY_BYTES = 32  # beside its key: length, padding to 8, value, time


def fold(directory: Path, alive: Set[int]) -> bool:
    """Fold the files of every worker not in *alive*; False when a scrape is in the way: try again later.

    A scrape holds the lock for as long as it reads, so it sees a dead worker's file or its place in the
    retired one, never both and never neither. Only the arbiter folds: it knows who is dead, and if it dies
    in the middle its whole directory has ended with it.

    Raises:
        OSError: no room, for example; what was counted is still where it was.
    """
    kept = {RETIRED, *map(str, alive)}
    dead = [path for path in directory.glob("*.db") if owner_of(path) not in kept]
    if not dead:
        return True
    try:
        with folding(directory):
            for kind in KINDS:
                _fold(directory / f"{kind}_{RETIRED}.db", [p for p in dead if p.name.startswith(f"{kind}_")])
    except BlockingIOError:
        return False
    return True


def _fold(retired: Path, dead: list[Path]) -> None:
    if not dead:
        return
    merged = retired.with_suffix(".new")
    merged.unlink(missing_ok=True)  # of a fold that found no room
    _write(merged, _sums([path for path in (retired, *dead) if path.exists()]))
    merged.rename(retired)
    for path in dead:
        path.unlink()


def _sums(paths: Iterable[Path]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for path in paths:
        if not path.stat().st_size:
            continue  # its worker was killed before the first byte
        for key, value, _timestamp, _position in MmapedDict.read_all_values_from_file(str(path)):
            sums[key] += value
    return sums


def _write(path: Path, values: dict[str, float]) -> None:
    allocate(path, FILE_BYTES + sum(len(key.encode()) + ENTRY_BYTES for key in values))
    file = MmapedDict(str(path))
    try:
        for key, value in values.items():
            file.write_value(key, value, 0.0)
    finally:
        file.close()
