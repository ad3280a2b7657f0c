"""The family ``minilm``: sentence embeddings of the MiniLM line, such as all-MiniLM-L6-v2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from server.families.base import Instance
from server.families.embedding import EmbeddingFamily
from server.families.minilm.network import MiniLMNetwork

TOKENIZER = "tokenizer.json"


class MiniLM(EmbeddingFamily):
    """Texts to unit vectors. ``config``: ``network`` (sizes), ``max_tokens`` of one text, special ones too.

    Made in the master before it forks: it reads the tokenizer and tokenizes nothing.
    """

    name = "minilm"

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        super().__init__(directory, config, dimensions=config["network"]["size"])
        self.max_tokens = int(config["max_tokens"])
        self.vocabulary = int(config["network"]["vocabulary"])
        self._tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
        # Limits are ours to refuse, and lengths differ from batch to batch.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def build(self) -> torch.nn.Module:
        """Return the encoder, every parameter on the meta device; it has no buffers."""
        return MiniLMNetwork(**self.config["network"])

    def tokenize(self, text: str) -> Sequence[int]:
        """Return the numbers of *text*'s tokens, special ones too."""
        # One at a time: the library's batches start threads of their own, in every worker.
        return list(self._tokenizer.encode(text).ids)

    def embed(self, instance: Instance, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return (texts, dimensions) float32, each of length 1."""
        lengths = torch.tensor([len(row) for row in tokens], device=instance.device)
        padded = torch.zeros(len(tokens), int(lengths.max()), dtype=torch.int64)
        for row, numbers in zip(padded, tokens, strict=True):
            row[: len(numbers)] = torch.tensor(numbers)
        vectors: torch.Tensor = instance.module(padded.to(instance.device), lengths)
        return vectors
