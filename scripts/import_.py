"""`warmserve import FAMILY`: make a version out of a model as its authors ship it, and publish it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from scripts.exits import DONE
from server.settings import Settings
from weights.store import Store


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("import", help="make a version out of a model as its authors ship it")
    families = parser.add_subparsers(dest="family", required=True, metavar="FAMILY")
    hibari = families.add_parser(
        "hibari", help="the embedded default: English speech out of the package hibari-tts"
    )
    hibari.set_defaults(run=run_hibari)


def run_hibari(arguments: argparse.Namespace, settings: Settings) -> int:
    """Publish the weights inside the installed hibari-tts package as the next version."""
    # Imported here: only these two subcommands need torch, which takes seconds to import.
    from scripts.import_hibari import read_hibari
    from weights.writing import write_version

    found = read_hibari()
    with tempfile.TemporaryDirectory(prefix="warmserve-import-") as scratch:
        staged = Path(scratch) / "version"
        write_version(
            staged, {"model.safetensors": found.tensors}, name="hibari",
            family=found.family, config=found.config,
            warmup=found.warmup, licence=found.licence, source=found.source, assets=found.assets,
        )  # fmt: skip
        print(Store(settings.models).publish(staged).name)
    return DONE
