"""`warmserve wait`: block until the service is ready; the exit code says how it went."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from scripts.exits import DONE, FAILED, NOT_RUNNING, TIMEOUT
from server.board import Board, dead_boards, live_boards
from server.settings import Settings
from server.status import snapshot

POLL_S = 0.05


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("wait", help="block until the service is ready")
    parser.add_argument(
        "--timeout", type=float, default=None, metavar="S", help="seconds (default: BOOT_TIMEOUT_S)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Wait for READY. A service that is only about to be started may appear until the timeout."""
    timeout_s = arguments.timeout if arguments.timeout is not None else float(settings.boot_timeout_s)
    deadline = time.monotonic() + timeout_s
    began = time.time()
    running = False
    while time.monotonic() < deadline:
        paths = live_boards(settings.run_dir)
        for path in paths[:1]:
            running = True
            status = snapshot(Board.open(path), settings.min_ready)
            if status["ready"]:
                return DONE
        if not paths and (failure := _failure_since(began if not running else 0.0, settings)):
            print(f"warmserve wait: {failure}", file=sys.stderr)
            return FAILED
        if running and not paths:
            print("warmserve wait: the arbiter ended before it was ready", file=sys.stderr)
            return FAILED
        time.sleep(POLL_S)
    print(f"warmserve wait: not ready within {timeout_s:g} s", file=sys.stderr)
    return TIMEOUT if running else NOT_RUNNING


def _failure_since(began: float, settings: Settings) -> str | None:
    """Return why the last arbiter gave up, if it did so since *began* (Unix seconds)."""
    for path in dead_boards(settings.run_dir):
        record = Board.open(path).arbiter.read() or {}
        if record.get("failure") and record.get("started_unix", 0.0) >= began:
            return str(record["failure"])
    return None
