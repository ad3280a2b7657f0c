"""`warmserve status`: what every worker is doing, read from the board: works before anything listens."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table

from scripts.console import console_for_tables
from scripts.exits import DONE, NOT_RUNNING
from server.board import Board, live_boards
from server.settings import Settings
from server.status import snapshot

COLUMNS = {
    "slot": "slot", "pid": "pid", "phase": "phase", "version": "version", "generation": "gen",
    "in_flight": "busy", "served": "served", "load_ms": "load ms", "warmup_ms": "warm ms",
    "resident_bytes": "MB", "unique_bytes": "own MB", "age_s": "age s",
}  # fmt: skip


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("status", help="show the service and its workers")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print every running arbiter on this run directory, newest first (two during a binary upgrade)."""
    boards = [Board.open(path) for path in live_boards(settings.run_dir)]
    found = [snapshot(board, settings.min_ready) for board in boards]
    if arguments.json:
        print(json.dumps(found[0] if found else {"status": "NOT_RUNNING"}, indent=2))
    elif not found:
        print(f"no arbiter is running on {settings.run_dir}")
    for status in found if not arguments.json else ():
        _show(status)
    return DONE if found else NOT_RUNNING


def _show(status: dict[str, Any]) -> None:
    console = console_for_tables()
    reason = f" ({status['reason']})" if status["reason"] else ""
    console.print(f"{status['status']}{reason}", highlight=False, markup=False)
    console.print(
        f"arbiter {status.get('pid')}, current {status.get('current')}, target {status.get('target')}, "
        f"generation {status.get('generation')}, {status.get('size')} workers wanted",
        highlight=False,
        markup=False,
    )
    if last := status.get("last_swap"):
        pairs = " ".join(f"{key}={value}" for key, value in last.items() if value is not None)
        console.print(f"last swap: {pairs}", highlight=False, markup=False)
    table = Table(*COLUMNS.values(), box=None, pad_edge=False)
    for worker in status["workers"]:
        table.add_row(*(_cell(column, worker.get(column)) for column in COLUMNS))
    console.print(table)


def _cell(column: str, value: object) -> str:
    if value is None:
        return "-"
    if column.endswith("_bytes") and isinstance(value, int):
        return f"{value / 1e6:.0f}"
    return f"{value:.0f}" if isinstance(value, float) else str(value)
