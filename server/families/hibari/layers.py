"""Torch layers that start without values: parameters on the meta device, and no initialiser run.

torch's own initialisers on meta tensors import torch._dynamo (2 s, 820 modules measured); every value
comes from the version anyway.
"""

from __future__ import annotations

from torch import Tensor, empty, nn
from torch.nn import functional as F

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

    def __init__(self, size: int) -> None:
        super().__init__(size, device=META)

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


class ConvBlock(nn.Module):
    """A ConvNeXt block over time: mix along time per channel, then across channels, scaled, added."""

    def __init__(self, size: int, width: int, *, expansion: int, dilation: int = 1) -> None:
        super().__init__()
        self.depthwise = Conv1d(size, size, width, dilation=dilation, groups=size)
        self.norm = LayerNorm(size)
        self.expand = Linear(size, expansion * size)
        self.contract = Linear(expansion * size, size)
        self.gamma = parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        """Map (1, channels, time) to the same shape."""
        mixed = self.norm(self.depthwise(x).transpose(1, 2))
        update = self.gamma * self.contract(F.gelu(self.expand(mixed)))
        mixed_in: Tensor = x + update.transpose(1, 2)
        return mixed_in


class TransformerLayer(nn.Module):
    """Pre-norm self-attention and feed-forward, each added to what came in."""

    def __init__(self, size: int, *, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = LayerNorm(size)
        self.query_key_value = Linear(size, 3 * size)
        self.attention_out = Linear(size, size)
        self.feed_norm = LayerNorm(size)
        self.feed_in = Linear(size, hidden)
        self.feed_out = Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        """Map (1, time, channels) to the same shape; every position sees every other."""
        batch, time, size = x.shape
        projected = self.query_key_value(self.attention_norm(x))
        by_head = projected.view(batch, time, 3, self.heads, size // self.heads)
        query, key, value = by_head.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, time, size))
        fed: Tensor = self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))
        return x + fed
