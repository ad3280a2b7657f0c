"""Torch layers that start without values: parameters on the meta device, and no initialiser run.

torch's own initialisers on meta tensors import torch._dynamo (2 s, 820 modules measured); every value
comes from the version anyway.
"""

from __future__ import annotations

from torch import empty, nn

META = "meta"


class Linear(nn.Linear):
    """A linear map whose values come from the version."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__(size_in, size_out, device=META)

    def reset_parameters(self) -> None:
        """Leave the parameters empty."""


class Conv1d(nn.Conv1d):
    """A convolution of odd width that keeps the length; its values come from the version."""

    def __init__(
        self, channels_in: int, channels_out: int, width: int, *, dilation: int = 1, groups: int = 1
    ) -> None:
        padding = dilation * (width // 2)
        super().__init__(
            channels_in, channels_out, width, padding=padding, dilation=dilation, groups=groups, device=META
        )

    def reset_parameters(self) -> None:
        """Leave the parameters empty."""


class LayerNorm(nn.LayerNorm):
    """Normalisation over the last dimension; its values come from the version."""

    def __init__(self, size: int, epsilon: float = 1e-5) -> None:
        super().__init__(size, eps=epsilon, device=META)

    def reset_parameters(self) -> None:
        """Leave the parameters empty."""


class Embedding(nn.Embedding):
    """A table of vectors; its values come from the version."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__(count, size, device=META)

    def reset_parameters(self) -> None:
        """Leave the parameters empty."""


def parameter(*shape: int) -> nn.Parameter:
    """Return a parameter of *shape* on the meta device."""
    return nn.Parameter(empty(*shape, device=META))
