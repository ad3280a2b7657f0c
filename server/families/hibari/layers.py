"""The two blocks that the networks of the hibari family are made of."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from server.families.meta_layers import Conv1d, LayerNorm, Linear, parameter


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
