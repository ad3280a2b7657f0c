"""`warmserve verify`: check a version's layout and every byte of it, as the server does before it serves."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scripts.exits import DONE
from server.settings import Settings
from weights.store import Store
from weights.verify import verify_checksums, verify_layout


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("verify", help="check versions against their manifests")
    parser.add_argument("versions", nargs="*", metavar="vN|DIR", help="default: the current version")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Verify each named version or directory; the first refusal ends the command (exit 1)."""
    store = Store(settings.models)
    for directory in [_find(name, store) for name in arguments.versions] or [store.current().path]:
        manifest = verify_layout(directory).manifest
        verify_checksums(directory, manifest, threads=2)
        print(
            f"{directory}: {manifest.name} ({manifest.family}), "
            f"{len(manifest.files)} files, {manifest.total_bytes} bytes, good"
        )
    return DONE


def _find(name: str, store: Store) -> Path:
    named = {version.name: version.path for version in store.versions()}
    return named.get(name) or Path(name)
