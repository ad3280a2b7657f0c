"""A family that turns texts into vectors, whatever the route they came by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from server.families.base import InputError, Instance, TensorSpec, Value
from server.families.batching import BatchingFamily, Prepared

ROWS = 32  # texts in one pass: enough to fill a processor, few enough to pad little

# A word; a sentence; more texts than one pass holds, of unlike lengths.
WARMUP = (
    {"text": ["Hello"]},
    {"text": ["The quick brown fox jumps over the lazy dog."]},
    {"text": ["word " * (1 + n % 40) for n in range(ROWS + 1)]},
)


class EmbeddingFamily(BatchingFamily):
    """A family of sentence embeddings.

    As tensors: ``text``, or in its place ``token_ids`` with 0 behind the end of the shorter rows, to
    ``embedding`` and ``tokens``, the number of tokens of each text.
    """

    deterministic = True
    max_tokens: int  # of one text
    vocabulary: int  # numbers below this are tokens

    def __init__(self, directory: Path, config: Mapping[str, Any], *, dimensions: int) -> None:
        super().__init__(directory, config)
        self.dimensions = dimensions
        self.inputs = (
            TensorSpec("text", "BYTES", (-1,), optional=True),
            TensorSpec("token_ids", "INT64", (-1, -1), optional=True),
        )
        self.outputs = (
            TensorSpec("embedding", "FP32", (-1, dimensions)),
            TensorSpec("tokens", "INT32", (-1,)),
        )

    @abstractmethod
    def tokenize(self, text: str) -> Sequence[int]:
        """Return the numbers of *text*'s tokens, special ones too; at least one."""

    @abstractmethod
    def embed(self, instance: Instance, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return ``(texts, dimensions) float32`` for at most ``ROWS`` texts of at most ``max_tokens``."""

    def warmup_inputs(self) -> tuple[Mapping[str, Any], ...]:
        """Return texts of several lengths, and more of them than one pass takes."""
        return WARMUP

    def rehearse(self, instance: Instance, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Embed the list of texts in *inputs*; the output is named ``embedding``."""
        texts = [text.encode() for text in inputs["text"]]
        vectors = self.infer(instance, {"text": np.array(texts, object)}, {})["embedding"]
        assert isinstance(vectors, torch.Tensor)
        return {"embedding": vectors}

    def prepare(self, inputs: Mapping[str, Value], parameters: Mapping[str, Any]) -> Prepared:
        """Tokenize; texts of twice the length are not for the same pass, which would pad the others."""
        tokens = self._tokens(inputs)
        longest = max((len(row) for row in tokens), default=0)
        return Prepared(key=longest.bit_length(), content=tokens)

    def infer_batch(
        self, instance: Instance, contents: Sequence[Sequence[Sequence[int]]]
    ) -> Sequence[Mapping[str, Value]]:
        """Embed every text of every request; each vector is the same as if its text had come alone."""
        vectors = self._embed_all(instance, [row for tokens in contents for row in tokens])
        each = torch.split(vectors, [len(tokens) for tokens in contents])
        return [
            {"embedding": mine, "tokens": torch.tensor([len(row) for row in tokens], dtype=torch.int32)}
            for tokens, mine in zip(contents, each, strict=True)
        ]

    def _embed_all(self, instance: Instance, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        vectors = torch.empty(len(tokens), self.dimensions)
        by_length = sorted(range(len(tokens)), key=lambda number: len(tokens[number]))
        for start in range(0, len(by_length), ROWS):  # alike in length, so that little is padded
            instance.checkpoint()
            chosen = by_length[start : start + ROWS]
            vectors[chosen] = self.embed(instance, [tokens[n] for n in chosen]).float().cpu()
        return vectors

    def _tokens(self, inputs: Mapping[str, Value]) -> list[Sequence[int]]:
        if ("text" in inputs) == ("token_ids" in inputs):
            raise InputError("text", "either text or token_ids")
        if "text" in inputs:
            tokens = [self.tokenize(_decoded(raw)) for raw in inputs["text"]]
        else:
            tokens = [_without_padding(row) for row in inputs["token_ids"].tolist()]
        for number, row in enumerate(tokens):
            self._check(next(iter(inputs)), number, row)
        return tokens

    def _check(self, field: str, number: int, row: Sequence[int]) -> None:
        if not row:
            raise InputError(field, f"number {number} is empty")
        if len(row) > self.max_tokens:
            raise InputError(
                field, f"number {number} has {len(row)} tokens, at most {self.max_tokens} are possible"
            )
        if not 0 <= min(row) <= max(row) < self.vocabulary:
            raise InputError(field, f"number {number} holds a number outside 0 to {self.vocabulary - 1}")


def _decoded(raw: Any) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise InputError("text", f"not UTF-8 at byte {error.start}") from None


def _without_padding(row: Sequence[int]) -> Sequence[int]:
    length = len(row)
    while length and row[length - 1] == 0:
        length -= 1
    return row[:length]
