"""How operators name versions on the command line."""

from __future__ import annotations

import argparse
import re


def version_number(text: str) -> int:
    """Return 7 for ``v7``.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    match = re.fullmatch(r"v([1-9][0-9]{0,17})", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version like v7")
    return int(match[1])
