"""`warmserve publish DIR`: verify a version directory and make it the next vN, or nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scripts.exits import DONE
from server.settings import Settings
from weights.store import Store


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("publish", help="verify a directory and publish it as the next version")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--move", action="store_true", help="move instead of copy (same file system only)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print the new version's name; nothing is published when the directory is refused (exit 1)."""
    print(Store(settings.models).publish(arguments.directory, move=arguments.move).name)
    return DONE
