"""The family table: every installed family, by name, through the entry-point group."""

from __future__ import annotations

from importlib.metadata import entry_points

from server.families.base import Family

GROUP = "warmserve.families"


class UnknownFamily(Exception):
    """No installed package offers a family of this name."""

    reason = "family_unknown"

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"family {name!r} is not installed; installed: {', '.join(known) or 'none'}")
        self.name = name
        self.known = known


def find_family(name: str) -> type[Family]:
    """Import and return the family class registered as *name*.

    Raises:
        UnknownFamily: nothing is registered under that name.
    """
    table = {point.name: point for point in entry_points(group=GROUP)}
    if name not in table:
        raise UnknownFamily(name, tuple(sorted(table)))
    family: type[Family] = table[name].load()
    return family
