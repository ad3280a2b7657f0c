"""`warmserve reload` and `rollback`: send the running arbiter SIGHUP, and say how the swap went."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

from scripts.exits import DONE, FAILED, NOT_RUNNING, TIMEOUT, USAGE
from scripts.names import version_number
from server.board import Board, live_boards
from server.quarantine import Quarantine
from server.settings import Settings
from weights.store import Store

POLL_S = 0.05


def add_parser(commands: Any) -> None:
    reload = commands.add_parser("reload", help="swap to the current version without a failed request")
    reload.add_argument("--force", action="store_true", help="try a quarantined version again")
    reload.set_defaults(run=run_reload)
    rollback = commands.add_parser("rollback", help="pin the previous version and swap back to it")
    rollback.add_argument(
        "version", nargs="?", type=version_number, metavar="vN", help="default: the previous one"
    )
    rollback.set_defaults(run=run_rollback)
    for parser in (reload, rollback):
        parser.add_argument(
            "--wait", action="store_true", help="block until the swap ended; the exit code says how"
        )
        parser.add_argument(
            "--timeout", type=float, default=300.0, metavar="S", help="seconds for --wait (300)"
        )


def run_reload(arguments: argparse.Namespace, settings: Settings) -> int:
    """Swap to the current version."""
    board = _running(settings)
    if board is None:
        return NOT_RUNNING
    if arguments.force:
        store = Store(settings.models)
        Quarantine(settings.run_dir, store).lift(store.current())
    return _swap(board, arguments)


def run_rollback(arguments: argparse.Namespace, settings: Settings) -> int:
    """Pin the previous version, then swap to it."""
    board = _running(settings)
    if board is None:
        return NOT_RUNNING
    store = Store(settings.models)
    number = arguments.version or _previous(board, store)
    if number is None:
        print("warmserve rollback: there is no previous version", file=sys.stderr)
        return USAGE
    version = store.pin(number)
    Quarantine(settings.run_dir, store).lift(version)
    print(f"pinned {version.name}")
    return _swap(board, arguments)


def _previous(board: Board, store: Store) -> int | None:
    """Return what the service ran before; for one that has not swapped since its start, the next older."""
    record = board.arbiter.read() or {}
    numbers = {version.name: version.number for version in store.versions()}
    if record.get("previous") in numbers:
        return numbers[record["previous"]]
    current = numbers.get(record.get("current", ""), 0)
    return max((number for number in numbers.values() if number < current), default=None)


def _running(settings: Settings) -> Board | None:
    paths = live_boards(settings.run_dir)
    if not paths:
        print(f"warmserve: no arbiter is running on {settings.run_dir}", file=sys.stderr)
        return None
    return Board.open(paths[0])


def _swap(board: Board, arguments: argparse.Namespace) -> int:
    before = (board.arbiter.read() or {}).get("requests", 0)
    os.kill(board.arbiter_pid, signal.SIGHUP)
    if not arguments.wait:
        return DONE
    deadline = time.monotonic() + arguments.timeout
    while time.monotonic() < deadline:
        last = (board.arbiter.read() or {}).get("last_swap") or {}
        if last.get("covers", 0) > before:
            return _say(last)
        if not board.is_live():
            print("warmserve: the arbiter ended", file=sys.stderr)
            return NOT_RUNNING
        time.sleep(POLL_S)
    print(f"warmserve: the swap did not end within {arguments.timeout:g} s", file=sys.stderr)
    return TIMEOUT


def _say(last: dict[str, Any]) -> int:
    if last["result"] == "done":
        print(f"serving {last['serving']} after {last['seconds']:g} s")
        return DONE
    to = last["to"] or "the new version"
    print(
        f"{to} {last['result']}: {last['reason']}: {last['detail']}; serving {last['serving']}",
        file=sys.stderr,
    )
    return FAILED
