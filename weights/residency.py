"""How much memory mapped weights really cost a process, and how much it may use. Reads /proc and cgroups."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ \S+ \d+ +(.*)")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Residency:
    """Memory of one mapped file in one process.

    ``pss_bytes`` is this process's share of it: summed over all processes it is the file's one copy.
    ``anonymous_bytes`` are pages of its own: 0 for a weight that nobody wrote to.
    """

    rss_bytes: int = 0
    pss_bytes: int = 0
    anonymous_bytes: int = 0


def residency(paths: Iterable[Path], pid: int | None = None) -> dict[Path, Residency]:
    """Return what each of *paths* costs the process *pid* (this one by default); all zero if not mapped.

    Anonymous and not Private_Dirty, which also counts fresh page cache that is not yet written back.

    Raises:
        OSError: the process is gone or not ours to look at.
    """
    # The kernel writes a newline in a name as \\012, and a file renamed since under its new name.
    wanted = {os.path.realpath(path).replace("\n", "\\012"): path for path in paths}
    found = {path: Residency() for path in wanted.values()}
    current: Path | None = None
    with open(f"/proc/{pid or 'self'}/smaps") as lines:
        for line in lines:
            if match := _MAPPING.match(line):
                current = wanted.get(match[1])
            elif current is not None:
                found[current] = _add(found[current], line)
    return found


def _add(before: Residency, line: str) -> Residency:
    name, _, value = line.partition(":")
    if name not in ("Rss", "Pss", "Anonymous"):
        return before
    count = int(value.split()[0]) * 1024
    return Residency(
        before.rss_bytes + count * (name == "Rss"),
        before.pss_bytes + count * (name == "Pss"),
        before.anonymous_bytes + count * (name == "Anonymous"),
    )


def memory_limit_bytes(
    cgroup_file: Path = Path("/proc/self/cgroup"), cgroup_root: Path = _CGROUP_ROOT
) -> int:
    """Return the bytes this process may use: the tightest limit of its cgroups, or the machine's memory."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = cgroup_file.read_text().splitlines()
    except OSError:
        return limits[0]
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            limits += _limits(cgroup_root, place, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(cgroup_root / "memory", place, "memory.limit_in_bytes")
    return min(limits)


def _limits(root: Path, place: str, name: str) -> list[int]:
    # Every ancestor's limit counts too. Inside a container the place may not exist below the root.
    relative = Path(place.lstrip("/"))
    found = []
    for directory in (relative, *relative.parents):
        try:
            text = (root / directory / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" is none
            found.append(int(text))
    return found
