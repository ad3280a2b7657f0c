"""A network so small that a request costs what serving costs."""

from __future__ import annotations

import torch
from torch import nn

FEATURES = 16


def create_mlp() -> nn.Module:
    """Return it, to be called with ``(rows, FEATURES) float32``."""
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 4)).eval()


def export_mlp(module: nn.Module) -> torch.export.ExportedProgram:
    """Return *module* as a program of 1 to 64 rows."""
    rows = torch.export.Dim("rows", min=1, max=64)
    return torch.export.export(module, (torch.randn(4, FEATURES),), dynamic_shapes=({0: rows},))
