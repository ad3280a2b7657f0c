"""What can be wrong with a version on disk. Conditions a caller can act on, with fields."""

from __future__ import annotations

from pathlib import Path


class WeightsError(Exception):
    """Root of everything this package raises on purpose.

    Every child sets ``reason``, one snake_case word for logs, status and metrics.
    """

    reason = "weights_error"
