"""`warmserve status`: what every worker is doing, read from the board: works before anything listens."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from scripts.console import console_for_tables
from scripts.exits import DONE, NOT_RUNNING
from server.board import Board, live_boards
from server.settings import Settings
from server.status import snapshot
from server.troubles import by_urgency, troubles

WATCH_EVERY_S = 1.0
COLUMNS = {
    "slot": "slot", "pid": "pid", "phase": "phase", "version": "version", "generation": "gen",
    "in_flight": "busy", "served": "served", "load_ms": "load ms", "warmup_ms": "warm ms",
    "resident_bytes": "MB", "unique_bytes": "own MB", "age_s": "age s",
}  # fmt: skip


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("status", help="show the service and its workers")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    form.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print every running arbiter on this run directory, newest first (two during a binary upgrade)."""
    if arguments.watch:
        return _watch(settings)
    found = _snapshots(settings)
    if arguments.json:
        print(json.dumps(found[0] if found else {"status": "NOT_RUNNING"}, indent=2))
    else:
        console_for_tables().print(_screen(found, settings))
    return DONE if found else NOT_RUNNING


def _watch(settings: Settings) -> int:
    found = _snapshots(settings)
    try:
        with Live(_screen(found, settings), console=console_for_tables(), auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_EVERY_S)
                found = _snapshots(settings)
                live.update(_screen(found, settings), refresh=True)
    except KeyboardInterrupt:
        return DONE if found else NOT_RUNNING


def _snapshots(settings: Settings) -> list[dict[str, Any]]:
    boards = [Board.open(path) for path in live_boards(settings.run_dir)]
    return [snapshot(board, settings.min_ready) for board in boards]


def _screen(found: list[dict[str, Any]], settings: Settings) -> Group:
    if not found:
        return Group(Text(f"no arbiter is running on {settings.run_dir}"))
    return Group(*(part for status in found for part in _parts(status)))


def _parts(status: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield what is wrong, where the service is, and a row for each worker."""
    yield Text(status["status"])
    yield from (Text(f"! {line}") for line in troubles(status))
    yield Text(
        f"arbiter {status.get('pid')}, current {status.get('current')}, target {status.get('target')}, "
        f"generation {status.get('generation')}, {status.get('size')} workers wanted"
    )
    if last := status.get("last_swap"):
        pairs = " ".join(f"{key}={value}" for key, value in last.items() if value is not None)
        yield Text(f"last swap: {pairs}")
    table = Table(*COLUMNS.values(), box=None, pad_edge=False)
    for worker in sorted(status["workers"], key=by_urgency):
        table.add_row(*(_cell(column, worker.get(column)) for column in COLUMNS))
    yield table


def _cell(column: str, value: object) -> str:
    if value is None:
        return "-"
    if column.endswith("_bytes") and isinstance(value, int):
        return f"{value / 1e6:.0f}"
    return f"{value:.0f}" if isinstance(value, float) else str(value)
