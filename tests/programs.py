"""Exported programs for tests: small networks, saved as their owner would save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

CLASSES = 3
FEATURES = 8


class Classifier(nn.Module):
    """A tied and an untied layer, running statistics, a buffer that no checkpoint holds, a table."""

    window: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, FEATURES)
        self.tied = nn.Linear(FEATURES, FEATURES)
        self.tied.weight = self.body.weight
        self.norm = nn.BatchNorm1d(FEATURES)
        self.table = nn.Embedding(5, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("window", torch.linspace(0, 1, FEATURES), persistent=False)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        """Map (batch, FEATURES) float32 and (batch,) int64 to logits and the best class."""
        hidden = self.tied(torch.relu(self.body(x * self.window))) + self.table(kind)
        logits = self.head(self.norm(hidden))
        return {"logits": logits, "best": logits.argmax(-1)}


def classifier() -> Classifier:
    """Return the same network each time."""
    torch.manual_seed(7)
    network = Classifier()
    network.norm.running_mean = torch.randn(FEATURES)
    return network.eval()


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the classifier takes."""
    made = torch.Generator().manual_seed(rows)
    return torch.randn(rows, FEATURES, generator=made), torch.arange(rows) % 5


def save_classifier(path: Path, *, most: int = 16) -> Path:
    """Export it for up to *most* rows."""
    batch = torch.export.Dim("batch", min=1, max=most)
    return save(path, classifier(), inputs(4), dynamic_shapes={"x": {0: batch}, "kind": {0: batch}})


def save(path: Path, module: nn.Module, given: tuple[Any, ...], **how: Any) -> Path:
    """Export *module* and save it, as torch's documentation has it."""
    torch.export.save(torch.export.export(module, given, **how), path)
    return path
