"""The operator command `warmserve`: one file a subcommand, exit codes that scripts can act on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from scripts import gc, import_, key, nginx, pin, publish, reload, status, verify, versions, wait
from scripts.exits import USAGE
from server.settings import Settings, SettingsError
from weights.errors import WeightsError

SUBCOMMANDS = (import_, publish, versions, verify, pin, reload, gc, status, wait, nginx, key)


class Parser(argparse.ArgumentParser):
    """argparse with our code for a usage error (its own, 2, means "not running" here)."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    parser = Parser(prog="warmserve", description="Look after a warmserve service and its versions.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in SUBCOMMANDS:
        module.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments, Settings.load())
    except (SettingsError, WeightsError, OSError, ModuleNotFoundError) as error:
        print(f"warmserve {arguments.command}: {error}", file=sys.stderr)
        return USAGE
    return code


if __name__ == "__main__":
    sys.exit(main())
