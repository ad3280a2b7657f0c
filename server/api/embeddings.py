"""OpenAI embeddings: texts or tokens to vectors. Parse, lease, run, render."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from flask import Blueprint, Response, g, jsonify, request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from server.api.answers import EmbeddingsAnswer
from server.api.bodies import read_json
from server.api.deadline import within
from server.api.exchange import Exchange
from server.api.models import Model, Models
from server.api.openapi import described
from server.errors import InvalidField, UnknownModel
from server.families.base import Value
from server.families.embedding import EmbeddingFamily
from server.settings import Settings

MAX_INPUTS = 2048  # of the protocol

Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Token: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Tokens: TypeAlias = Annotated[list[Token], Field(min_length=1)]


class EmbeddingsBody(BaseModel):
    """POST /v1/embeddings. ``input`` is one text or one list of tokens, or several of either."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    input: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


def create_blueprint(settings: Settings, models: Models) -> Blueprint:
    """Return the route of *models*."""
    blueprint = Blueprint("embeddings", __name__, url_prefix="/v1")

    @blueprint.post("/embeddings")
    @described(summary="Turn texts into vectors", body=EmbeddingsBody, answer=EmbeddingsAnswer)
    def embeddings() -> Response:
        if models.only is not None:  # what it does not do need not be read
            _embedding(models.only)
        body = read_json(request, EmbeddingsBody, limit_bytes=settings.max_body_bytes)
        exchange = Exchange.of(request.environ)
        exchange.note_read()
        model = models.find(body.model, param="model")
        family = _embedding(model)
        if body.dimensions not in (None, family.dimensions):
            raise InvalidField(f"dimensions: this model has {family.dimensions}", param="dimensions")
        inputs = _inputs(body, max_chars=settings.max_input_chars, max_tokens=family.max_tokens)

        def answer(timeout_s: float) -> Response:
            return _render(body, model.infer(exchange, g.record, timeout_s, inputs, {}))

        try:
            return model.cache.respond(
                "embeddings",
                body.model_dump_json().encode() if family.deterministic else None,
                lambda: within(g.record, settings.request_timeout_s, answer),
            )
        except InvalidField as error:  # named as this route names it
            message = str(error).removeprefix(f"{error.param}: ")
            raise InvalidField(f"input: {message}", param="input") from None

    return blueprint


def _embedding(model: Model) -> EmbeddingFamily:
    if not isinstance(model.served.family, EmbeddingFamily):
        raise UnknownModel(f"the model {model.name!r} gives no embeddings", param="model")
    return model.served.family


def _inputs(body: EmbeddingsBody, *, max_chars: int, max_tokens: int) -> Mapping[str, Value]:
    """Return the tensors that a family of embeddings takes for *body*."""
    single = isinstance(body.input, str) or isinstance(body.input[0], int)
    rows: list[Any] = [body.input] if single else list(body.input)
    of_text = isinstance(rows[0], str)
    limit, unit = (max_chars, "characters") if of_text else (max_tokens, "tokens")
    for number, row in enumerate(rows):
        if len(row) > limit:  # before one long row makes all the others as long
            raise InvalidField(
                f"input: number {number} has {len(row)} {unit}, at most {limit}", param="input"
            )
    if not of_text:
        padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for target, row in zip(padded, rows, strict=True):
            target[: len(row)] = torch.tensor(row)
        return {"token_ids": padded}
    texts = np.empty(len(rows), object)
    texts[:] = [text.encode() for text in rows]
    return {"text": texts}


def _render(body: EmbeddingsBody, values: Mapping[str, Value]) -> Response:
    vectors, tokens = (np.asarray(values[name]) for name in ("embedding", "tokens"))
    rows = [
        {"object": "embedding", "index": number, "embedding": _encode(vector, body.encoding_format)}
        for number, vector in enumerate(vectors)
    ]
    count = int(tokens.sum())
    usage = {"prompt_tokens": count, "total_tokens": count}
    return jsonify(object="list", data=rows, model=body.model, usage=usage)


def _encode(vector: np.ndarray[Any, Any], encoding: str) -> list[float] | str:
    """Return *vector* as numbers, or as the base64 of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
