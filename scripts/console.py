"""Where tables are printed: as wide as the terminal, and never folded into a file or a pipe."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_COLUMNS = 300


def console_for_tables() -> Console:
    """Return a console on standard output."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
