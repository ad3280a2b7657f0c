"""`warmserve versions`: what is published, which one is current, and who uses the others."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from scripts.console import console_for_tables
from scripts.exits import DONE
from server.board import Board, live_boards
from server.quarantine import Quarantine
from server.settings import Settings
from weights.errors import WeightsError
from weights.lease import leased_by
from weights.store import Store, Version
from weights.verify import read_manifest


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("versions", help="list the published versions")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print one row a version, lowest number first."""
    store = Store(settings.models)
    versions = store.versions()
    current = store.current().name if versions else None
    table = Table(
        "version", "model", "family", "precision", "MB", "created", "state", box=None, pad_edge=False
    )
    for version in versions:
        table.add_row(
            version.name, *_describe(version), ", ".join(_states(version, store, settings, current))
        )
    console_for_tables().print(table)
    return DONE


def _describe(version: Version) -> tuple[str, ...]:
    try:
        manifest = read_manifest(version.path)
    except WeightsError as error:
        return ("-", "-", "-", "-", f"refused: {error}")
    megabytes = f"{manifest.total_bytes / 1e6:.1f}"
    return manifest.name, manifest.family, manifest.precision, megabytes, manifest.created


def _states(version: Version, store: Store, settings: Settings, current: str | None) -> list[str]:
    states = []
    previous = {
        (Board.open(path).arbiter.read() or {}).get("previous") for path in live_boards(settings.run_dir)
    }
    if version.name == current:
        states.append("current")
    pinned = store.pinned()
    if pinned == version.number:
        states.append("pinned")
    if version.name in previous:
        states.append("previous")
    if refusal := Quarantine(settings.run_dir, store).refusal_of(version):
        states.append(f"quarantined ({refusal.reason}: {refusal.detail})")
    if pids := leased_by(version.path):
        states.append(f"leased by {' '.join(map(str, pids))}")
    return states
