"""`warmserve key NAME`: make an API key; the secret is shown once, the line for the file holds its hash."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from scripts.exits import DONE, USAGE
from server.keys import NAME, new_key
from server.settings import Settings


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("key", help="make an API key and the line for the file of keys")
    parser.add_argument("name", metavar="NAME", help="whose it is; it is in the log of each request")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print the line to add to WARMSERVE_API_KEYS_FILE, and the secret on standard error."""
    if not NAME.fullmatch(arguments.name):
        print("warmserve key: a name is 1 to 64 of letters, digits and ._@-", file=sys.stderr)
        return USAGE
    secret, digest = new_key()
    print(f"the key, shown only now: {secret}", file=sys.stderr)
    print(f"{arguments.name} {digest}")
    return DONE
