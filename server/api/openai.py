"""The OpenAI protocol: speech, models, voices. Parse, lease, run, render."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
from flask import Blueprint, Response, g, jsonify, request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model

from server.api.answers import ModelRow, ModelRows, VoiceRows
from server.api.bodies import read_json
from server.api.cache import ResponseCache
from server.api.computing import Computing
from server.api.deadline import within
from server.api.exchange import Exchange, Served
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


def create_blueprint(settings: Settings, served: Served, cache: ResponseCache) -> Blueprint:
    """Return the routes of one served model."""
    blueprint = Blueprint("openai", __name__, url_prefix="/v1")
    body_class = speech_body(served.family) if isinstance(served.family, SpeechFamily) else SpeechBody

    @blueprint.post("/audio/speech")
    @described(summary="Speak a text", body=body_class, media_types=SPOKEN)
    def speech() -> Response:
        family = _speaking(served)
        body = read_json(request, body_class, limit_bytes=settings.max_body_bytes)
        exchange = Exchange.of(request.environ)
        exchange.note_read()
        _check(body, settings, served, family)
        same = family.deterministic or "seed" in body.model_fields_set
        return cache.respond(
            "speech",
            body.model_dump_json().encode() if same else None,
            lambda: _answer(body, settings, served, family, exchange),
        )

    @blueprint.get("/models")
    @described(summary="The models", answer=ModelRows)
    def models() -> Response:
        return jsonify(object="list", data=[_model(served)])

    @blueprint.get("/models/<model>")
    @described(summary="One model", answer=ModelRow)
    def model(model: str) -> Response:
        check_model(model, served)
        return jsonify(_model(served))

    @blueprint.get("/audio/voices")
    @described(summary="The voices", answer=VoiceRows)
    def voices() -> Response:
        rows = [{"id": v.id, "name": v.id, "language": v.language, "description": v.description}
                for v in _speaking(served).voices()]  # fmt: skip
        return jsonify(voices=rows)

    return blueprint


def render_error(error: ServingError) -> Response:
    """Return the response for *error* in this protocol's shape."""
    response = jsonify(openai_error(error))
    response.status_code = error.status
    response.headers.update(headers_of(error))
    return response


def _speaking(served: Served) -> SpeechFamily:
    if not isinstance(served.family, SpeechFamily):
        raise UnknownModel(f"the model {served.name!r} does not speak", param="model")
    return served.family


def check_model(name: str, served: Served) -> None:
    """Refuse a *name* that is not the served model's.

    Raises:
        UnknownModel: always when it refuses.
    """
    if name != served.name:
        raise UnknownModel(
            f"the model {name!r} does not exist; this server has {served.name!r}", param="model"
        )


def _check(body: SpeechBody, settings: Settings, served: Served, family: SpeechFamily) -> None:
    check_model(body.model, served)
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
