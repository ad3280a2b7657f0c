"""The encoder of MiniLM sentence embeddings: BERT with post-norm layers, as plain torch modules.

Knows tensors only; texts become numbers in the family. Sizes come from the version's configuration.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from server.families.meta_layers import Embedding, LayerNorm, Linear

NORM_EPSILON = 1e-12  # BERT's, in the model's config.json


class Layer(nn.Module):
    """Self-attention and feed-forward; what each adds is normalised together with what came in."""

    def __init__(self, size: int, *, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (Linear(size, size) for _ in range(3))
        self.attention_out = Linear(size, size)
        self.attention_norm = LayerNorm(size, NORM_EPSILON)
        self.feed_in = Linear(size, hidden)
        self.feed_out = Linear(hidden, size)
        self.feed_norm = LayerNorm(size, NORM_EPSILON)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Map (batch, length, size) to the same shape; *seen* is (batch, 1, 1, length) bool."""
        batch, length, size = x.shape

        def by_head(projected: Tensor) -> Tensor:
            return projected.view(batch, length, self.heads, size // self.heads).transpose(1, 2)

        query, key, value = (by_head(project(x)) for project in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        joined = attended.transpose(1, 2).reshape(batch, length, size)
        x = self.attention_norm(x + self.attention_out(joined))
        mixed: Tensor = self.feed_norm(x + self.feed_out(F.gelu(self.feed_in(x))))
        return mixed


class MiniLMNetwork(nn.Module):
    """Tokens to one vector of length 1 a text: the mean over its tokens, normalised."""

    def __init__(
        self, *, vocabulary: int, positions: int, segments: int,
        size: int, layers: int, heads: int, hidden: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.word = Embedding(vocabulary, size)
        self.position = Embedding(positions, size)
        self.segment = Embedding(segments, size)
        self.norm = LayerNorm(size, NORM_EPSILON)
        self.layers = nn.ModuleList(Layer(size, heads=heads, hidden=hidden) for _ in range(layers))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Map tokens (batch, longest) int64, of which the first (batch,) count, to (batch, size) float32."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        counted = places < lengths[:, None]
        # Every text is one segment, the first.
        x = self.norm(self.word(tokens) + self.segment.weight[0] + self.position.weight[: len(places)])
        for layer in self.layers:
            x = layer(x, counted[:, None, None, :])
        summed = (x * counted[:, :, None]).sum(1)
        return F.normalize(summed / lengths[:, None], dim=1)
