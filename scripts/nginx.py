"""`warmserve nginx`: print an nginx configuration that fits the settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scripts.exits import DONE
from server.settings import Settings

TEMPLATE = Path(__file__).with_name("nginx.conf")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("nginx", help="print an nginx configuration for these settings")
    parser.add_argument("--listen", default="8080", help="what nginx listens on (8080)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print the configuration, to be included inside nginx's ``http`` block."""
    print(render(settings, arguments.listen), end="")
    return DONE


def render(settings: Settings, listen: str) -> str:
    """Return the configuration as text."""
    values = {
        "BIND": settings.bind_addresses[0],
        "LISTEN": listen,
        "MAX_BODY_BYTES": settings.max_body_bytes,
        # Waiting in the queue and computing each have the request's timeout.
        "READ_TIMEOUT": 2 * settings.request_timeout_s + 10,
    }
    text = TEMPLATE.read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text
