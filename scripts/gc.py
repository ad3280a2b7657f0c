"""`warmserve gc`: delete old versions that nobody uses, and what interrupted work left behind."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from scripts.exits import DONE
from server.board import Board, live_boards
from server.quarantine import Quarantine
from server.settings import Settings
from weights.errors import VersionInUse, WeightsError
from weights.store import Store, Version


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("gc", help="delete old versions that nobody uses")
    parser.add_argument(
        "--keep", type=int, required=True, metavar="N", help="keep the N newest whatever they are"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Delete every version that is not kept; one in use by any process is passed over."""
    if arguments.keep < 0:
        raise WeightsError("--keep must be 0 or more")
    store = Store(settings.models)
    kept = keep(store, settings, arguments.keep)
    for version in store.versions():
        if version.number in kept:
            continue
        if arguments.dry_run:
            print(f"would delete {version.name}")
            continue
        try:
            store.delete(version.number, protected=kept)
            print(f"deleted {version.name}")
        except (VersionInUse, OSError) as error:
            print(f"kept {version.name}: {error}", file=sys.stderr)
    try:
        for path in store.leftovers() if arguments.dry_run else store.sweep():
            print(f"{'would remove' if arguments.dry_run else 'removed'} {path.name}")
    except OSError as error:  # a models directory that this host may only read
        print(f"kept the leftovers: {error}", file=sys.stderr)
    return DONE


def keep(store: Store, settings: Settings, newest: int) -> set[int]:
    """Return the numbers that stay: the *newest*, current, pinned, previous, served, last quarantined."""
    versions = store.versions()
    numbers = {version.name: version.number for version in versions}
    kept = {version.number for version in versions[len(versions) - newest :]} if newest else set()
    kept |= {store.current().number} if versions else set()
    for path in live_boards(settings.run_dir):
        record = Board.open(path).arbiter.read() or {}
        named = (record.get(key) for key in ("current", "target", "previous"))
        kept |= {numbers[name] for name in named if name in numbers}
    below = [version.number for version in versions if version.number < max(kept, default=0)]
    if not live_boards(settings.run_dir) and below:
        kept.add(max(below))  # nobody can say what was served before: keep the likeliest
    return kept | _newest_quarantined(versions, Quarantine(settings.run_dir, store))


def _newest_quarantined(versions: list[Version], quarantine: Quarantine) -> set[int]:
    """A version that failed stays while it is the newest: it is what the operator has to look at."""
    held = [version.number for version in versions if quarantine.refusal_of(version) is not None]
    return {max(held)} if held and max(held) == versions[-1].number else set()
