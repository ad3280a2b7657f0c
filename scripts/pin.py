"""`warmserve pin vN` and `unpin`: which version is current, whatever is published later."""

from __future__ import annotations

import argparse
from typing import Any

from scripts.exits import DONE
from scripts.names import version_number
from server.settings import Settings
from weights.store import Store


def add_parser(commands: Any) -> None:
    pin = commands.add_parser("pin", help="make vN the current version (takes effect at the next reload)")
    pin.add_argument("version", type=version_number, metavar="vN")
    pin.set_defaults(run=run_pin)
    unpin = commands.add_parser("unpin", help="make the highest version the current one again")
    unpin.set_defaults(run=run_unpin)


def run_pin(arguments: argparse.Namespace, settings: Settings) -> int:
    """Pin and print the current version."""
    print(Store(settings.models).pin(arguments.version).name)
    return DONE


def run_unpin(arguments: argparse.Namespace, settings: Settings) -> int:
    """Unpin and print the current version."""
    store = Store(settings.models)
    store.unpin()
    print(store.current().name)
    return DONE
