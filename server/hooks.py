"""What gunicorn.conf.py names: reading the settings, and adopting gunicorn's arbiter."""

from __future__ import annotations

import os
import sys
from typing import Any

from server.settings import Settings, SettingsError

# Before torch is imported: on a machine with a GPU its availability check asks NVML instead of making a
# driver context in the arbiter, which no fork could use.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def read_settings() -> Settings:
    """Return the settings, or end with every mistake on stderr (exit 1); a reload catches that."""
    try:
        return Settings.load()
    except SettingsError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


def on_starting(arbiter: Any) -> None:
    """Specialise gunicorn's arbiter before it opens sockets or handles signals."""
    # Imported here: the configuration is checked before torch, which costs seconds, is imported.
    from server.arbiter import WarmArbiter
    from server.placement import NoSuchDevice

    try:
        WarmArbiter.adopt(arbiter, read_settings())
    except NoSuchDevice as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
