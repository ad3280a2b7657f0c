"""The OpenAI protocol: speech, models, voices. Parse, lease, run, render."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from flask import Blueprint, Response, g, jsonify, request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model

from server.api.answers import ModelRow, ModelRows, VoiceRows
from server.api.bodies import JSON, parse_json, read_body
from server.api.computing import Computing
from server.api.deadline import within
from server.api.exchange import Exchange, Served
from server.api.models import Model, Models
from server.api.openapi import described
from server.api.record import Record
from server.api.streaming import speech_response
from server.audio import FORMATS, Samples
from server.errors import InvalidField, ServingError, UnknownModel, headers_of, openai_error
from server.families.base import Instance, SpeechFamily, SpeechRequest
from server.settings import Settings

INPUT_CHARS = 4096  # of the protocol; MAX_INPUT_CHARS may be lower
SEED_LIMIT = 2**63
SPOKEN = (*(format.media_type for format in FORMATS.values()), "text/event-stream")


class VoiceObject(BaseModel):
    """The other way to name a voice."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: str


Text = Annotated[str, StringConstraints(min_length=1, max_length=INPUT_CHARS)]


class Named(BaseModel):
    """What a body says first of all."""

    model: str


class SpeechBody(BaseModel):
    """POST /v1/audio/speech. ``seed`` and ``language`` are ours, and a family has its own options.

    Anything else unknown is refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    input: Text
    voice: str | VoiceObject
    instructions: Annotated[str, StringConstraints(max_length=INPUT_CHARS)] | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    speed: Annotated[float, Field(ge=0.25, le=4.0)] = 1.0
    stream_format: Literal["audio", "sse"] = "audio"
    seed: Annotated[int, Field(ge=0, lt=SEED_LIMIT)] = 0
    language: Annotated[str, StringConstraints(max_length=35)] | None = None

    @property
    def voice_id(self) -> str:
        """The voice's name, whichever way it was given."""
        return self.voice if isinstance(self.voice, str) else self.voice.id


def speech_body(family: SpeechFamily) -> type[SpeechBody]:
    """Return the body for *family*: the fields of every family and its own options."""
    bases: Any = (SpeechBody, family.Options)
    body: type[SpeechBody] = create_model("SpeechBody", __base__=bases, __doc__=SpeechBody.__doc__)
    return body


def create_blueprint(settings: Settings, models: Models) -> Blueprint:
    """Return the routes of *models*."""
    blueprint = Blueprint("openai", __name__, url_prefix="/v1")
    bodies = {
        m.name: speech_body(m.served.family) for m in models if isinstance(m.served.family, SpeechFamily)
    }

    @blueprint.post("/audio/speech")
    @described(summary="Speak a text", body=_described_body(bodies), media_types=SPOKEN)
    def speech() -> Response:
        if models.only is not None:  # what it does not do need not be read
            _speaking(models.only)
        raw = read_body(request, JSON, limit_bytes=settings.max_body_bytes)
        exchange = Exchange.of(request.environ)
        exchange.note_read()
        body = parse_json(raw, _body_class(raw, bodies))
        model = models.find(body.model, param="model")
        family = _speaking(model)
        _check(body, settings, family)
        same = family.deterministic or "seed" in body.model_fields_set
        return model.cache.respond(
            "speech",
            body.model_dump_json().encode() if same else None,
            lambda: _answer(body, settings, model.served, family, exchange),
        )

    @blueprint.get("/models")
    @described(summary="The models", answer=ModelRows)
    def list_models() -> Response:
        return jsonify(object="list", data=[_model(model.served) for model in models])

    @blueprint.get("/models/<model>")
    @described(summary="One model", answer=ModelRow)
    def one_model(model: str) -> Response:
        return jsonify(_model(models.find(model, param="model").served))

    @blueprint.get("/audio/voices")
    @described(summary="The voices", answer=VoiceRows)
    def voices() -> Response:
        rows = [{"id": v.id, "name": v.id, "language": v.language, "description": v.description}
                for v in _speaking(_named(models)).voices()]  # fmt: skip
        return jsonify(voices=rows)

    return blueprint


def _body_class(raw: bytes, bodies: Mapping[str, type[SpeechBody]]) -> type[SpeechBody]:
    """Return the body of the model that *raw* names: each has options of its own."""
    if len(bodies) == 1:
        return next(iter(bodies.values()))
    return bodies.get(parse_json(raw, Named).model, SpeechBody)


def _described_body(bodies: Mapping[str, type[SpeechBody]]) -> type[SpeechBody]:
    return next(iter(bodies.values())) if len(bodies) == 1 else SpeechBody


def _named(models: Models) -> Model:
    """Return the model that ``?model=`` names; without it, the only one or the first that speaks."""
    if (name := request.args.get("model")) is not None:
        return models.find(name, param="model")
    speaking = [model for model in models if isinstance(model.served.family, SpeechFamily)]
    return models.find((speaking or list(models))[0].name)


def render_error(error: ServingError) -> Response:
    """Return the response for *error* in this protocol's shape."""
    response = jsonify(openai_error(error))
    response.status_code = error.status
    response.headers.update(headers_of(error))
    return response


def _speaking(model: Model) -> SpeechFamily:
    if not isinstance(model.served.family, SpeechFamily):
        raise UnknownModel(f"the model {model.name!r} does not speak", param="model")
    return model.served.family


def _check(body: SpeechBody, settings: Settings, family: SpeechFamily) -> None:
    if len(body.input) > settings.max_input_chars:
        raise InvalidField(f"input: at most {settings.max_input_chars} characters", param="input")
    known = [voice.id for voice in family.voices()]
    if body.voice_id not in known:
        raise InvalidField(f"voice: {body.voice_id!r} is not one of {', '.join(known)}", param="voice")


def _answer(
    body: SpeechBody, settings: Settings, served: Served, family: SpeechFamily, exchange: Exchange
) -> Response:
    record: Record = g.record
    record.fields |= {"voice": body.voice_id, "chars": len(body.input)}

    def answer(timeout_s: float) -> Response:
        return speech_response(
            Computing(served, exchange, record, timeout_s, lambda i: _speak(family, i, body)).start(),
            name=body.response_format, sse=body.stream_format == "sse", chars=len(body.input),
            sample_rate=family.sample_rate, record=record,
        )  # fmt: skip

    return within(record, settings.request_timeout_s, answer)


def _speak(family: SpeechFamily, instance: Instance, body: SpeechBody) -> Iterator[Samples]:
    wanted = SpeechRequest(
        text=body.input, voice=body.voice_id, speed=body.speed, seed=body.seed, language=body.language,
        instructions=body.instructions,
        options=family.Options.model_construct(**{n: getattr(body, n) for n in family.Options.model_fields}),
    )  # fmt: skip
    for piece in family.speak(instance, wanted):
        # A copy: the piece may be a buffer of the instance, which is at its next piece, or request, soon.
        samples = np.array(piece.cpu().numpy(), np.float32)
        if not np.isfinite(samples).all():
            raise ValueError("the model gave NaN or infinity")
        yield samples


def _model(served: Served) -> dict[str, Any]:
    return {"id": served.name, "object": "model", "created": served.created, "owned_by": "warmserve"}
