"""The Open Inference Protocol v2: server, models, statistics and inference. Parse, lease, run, render."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import Any

from flask import Blueprint, Response, g, jsonify, request
from pydantic import BaseModel, ConfigDict

from server.api import inference_answer, inference_body
from server.api.answers import (
    IndexRow,
    InferAnswer,
    Live,
    ModelMetadata,
    ModelNames,
    ModelReady,
    Ready,
    ServerMetadata,
    StatisticsAnswer,
)
from server.api.batching import Infer
from server.api.bodies import JSON, parse_json, read_body
from server.api.deadline import within
from server.api.exchange import Exchange, Served
from server.api.inference_body import InferBody, Inference
from server.api.models import Model, Models
from server.api.openapi import described
from server.api.record import Record
from server.errors import (
    InvalidField,
    ServingError,
    UnknownModel,
    Unsupported,
    headers_of,
    inference_error,
)
from server.families.base import Family, SpeechFamily, TensorSpec, Value
from server.families.embedding import EmbeddingFamily
from server.settings import Settings

BINARY = "application/octet-stream"
HEADER_LENGTH = "Inference-Header-Content-Length"
EXTENSIONS = ("binary_tensor_data", "model_repository", "parameters", "schedule_policy", "statistics")


class IndexBody(BaseModel):
    """POST /v2/repository/index; what is listed here is ready, so ``ready`` changes nothing."""

    model_config = ConfigDict(strict=True)
    ready: bool = False


def create_blueprint(settings: Settings, models: Models) -> Blueprint:
    """Return the routes of *models*."""
    blueprint = Blueprint("inference", __name__, url_prefix="/v2")
    _add_server_routes(blueprint, settings, models)
    _add_model_routes(blueprint, settings, models)
    return blueprint


def render_error(error: ServingError) -> Response:
    """Return the response for *error* in this protocol's shape."""
    response = jsonify(inference_error(error))
    response.status_code = error.status
    response.headers.update(headers_of(error))
    return response


def _add_server_routes(blueprint: Blueprint, settings: Settings, models: Models) -> None:
    @blueprint.get("")
    @described(summary="The server", answer=ServerMetadata)
    def server() -> Response:
        return jsonify(name="warmserve", version=_server_version(), extensions=list(EXTENSIONS))

    @blueprint.get("/health/live")
    @described(summary="Whether the server is alive", answer=Live)
    def live() -> Response:
        return jsonify(live=True)

    @blueprint.get("/health/ready")
    @described(summary="Whether the server takes requests", answer=Ready)
    def ready() -> Response:
        return jsonify(ready=True)  # whoever answers on the data address is warm

    @blueprint.post("/repository/index")
    @described(summary="The versions", body=IndexBody, body_optional=True, answer=IndexRow, many=True)
    def index() -> Response:
        raw = read_body(request, (*JSON, BINARY), limit_bytes=settings.max_body_bytes)
        Exchange.of(request.environ).note_read()
        if raw:  # tritonclient sends none
            parse_json(raw, IndexBody)
        return jsonify(
            [{"name": m.name, "version": m.number, "state": "READY", "reason": ""} for m in models]
        )

    @blueprint.post("/repository/models/<model>/<any(load, unload):_action>")
    @described(summary="Load and unload are the operator's", only_refuses=True)
    def change(model: str, _action: str) -> Response:
        models.find(model)
        raise Unsupported("models are loaded and unloaded by the operator, not on this address")


def _add_model_routes(blueprint: Blueprint, settings: Settings, models: Models) -> None:
    @blueprint.get("/models")
    @described(summary="The models by name", answer=ModelNames)
    def list_models() -> Response:
        return jsonify(models=[model.name for model in models])

    @blueprint.get("/models/<model>")
    @blueprint.get("/models/<model>/versions/<version>")
    @described(summary="What a model takes and gives", answer=ModelMetadata)
    def metadata(model: str, version: str | None = None) -> Response:
        return jsonify(_metadata(models.find(model, version)))

    @blueprint.get("/models/<model>/ready")
    @blueprint.get("/models/<model>/versions/<version>/ready")
    @described(summary="Whether the model takes requests", answer=ModelReady)
    def model_ready(model: str, version: str | None = None) -> Response:
        return jsonify(name=models.find(model, version).name, ready=True)

    @blueprint.get("/models/stats")  # of all models
    @blueprint.get("/models/<model>/stats")
    @blueprint.get("/models/<model>/versions/<version>/stats")
    @described(summary="What inferences took", answer=StatisticsAnswer)
    def stats(model: str | None = None, version: str | None = None) -> Response:
        asked = models if model is None else [models.find(model, version)]
        return jsonify(model_stats=[m.statistics.snapshot(name=m.name, version=m.number) for m in asked])

    @blueprint.post("/models/<model>/infer")
    @blueprint.post("/models/<model>/versions/<version>/infer")
    @described(
        summary="Infer", body=InferBody, body_types=(BINARY,), answer=InferAnswer, media_types=(BINARY,)
    )
    def infer(model: str, version: str | None = None) -> Response:
        found = models.find(model, version)
        _check_reachable(found.served)
        with found.statistics.inference() as parts:
            return _infer(settings, found, parts)


def _infer(settings: Settings, model: Model, parts: dict[str, int]) -> Response:
    family = model.served.family
    exchange = Exchange.of(request.environ)
    raw = read_body(request, (*JSON, BINARY), limit_bytes=settings.max_body_bytes)
    exchange.note_read()
    began = time.monotonic_ns()
    length = _header_length()
    inference = inference_body.parse(raw, length, family)
    _check_text(inference, settings, family)
    parts["compute_input"] = time.monotonic_ns() - began

    def answer() -> Response:
        values = _run(settings, model.infer, exchange, inference)
        fields = g.record.fields
        parts["queue"], parts["compute_infer"] = (int(fields[k] * 1e6) for k in ("queue_ms", "inference_ms"))
        parts["batch_size"] = fields.get("batch_size", 1)
        began = time.monotonic_ns()
        response = _respond(inference, values, model)
        parts["compute_output"] = time.monotonic_ns() - began
        return response

    same = family.deterministic or "seed" in {**inference.inputs, **inference.parameters}
    began = time.monotonic_ns()
    response = model.cache.respond("infer", f"{length}\0".encode() + raw if same else None, answer)
    if (how := g.record.fields.get("cache")) in ("hit", "miss"):
        parts[f"cache_{how}"] = time.monotonic_ns() - began
    return response


def _run(settings: Settings, run: Infer, exchange: Exchange, inference: Inference) -> Mapping[str, Value]:
    record: Record = g.record
    record.priority = inference.priority
    if inference.timeout_s is not None:
        record.own_timeout_s = min(record.own_timeout_s, inference.timeout_s)

    def timed(timeout_s: float) -> Mapping[str, Value]:
        return run(exchange, record, timeout_s, inference.inputs, inference.parameters)

    return within(record, settings.request_timeout_s, timed)


def _respond(inference: Inference, values: Mapping[str, Value], model: Model) -> Response:
    body, head = inference_answer.render(inference, values, model=model.name, version=model.number)
    if head is None:
        return Response(body, mimetype=JSON[0])
    return Response(body, mimetype=BINARY, headers={HEADER_LENGTH: str(head)})


def _header_length() -> int | None:
    given = request.headers.get(HEADER_LENGTH)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 20):
        raise InvalidField(f"{HEADER_LENGTH}: a number of bytes", param=HEADER_LENGTH)
    return int(given)


def _check_reachable(served: Served) -> None:
    if not served.family.inputs:
        raise UnknownModel(f"the model {served.name!r} takes no tensors")


def _check_text(inference: Inference, settings: Settings, family: Family) -> None:
    """Hold texts to the limit they have on the other routes; the family says whether they are texts."""
    if not isinstance(family, SpeechFamily | EmbeddingFamily):
        return
    texts: Any = inference.inputs.get("text", ())
    if any(len(text.decode("utf-8", "replace")) > settings.max_input_chars for text in texts):
        raise InvalidField(f"text: at most {settings.max_input_chars} characters", param="text")


def _metadata(model: Model) -> dict[str, Any]:
    def row(spec: TensorSpec) -> dict[str, Any]:
        return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}

    family = model.served.family
    return {
        "name": model.name, "versions": [model.number], "platform": "pytorch_warmserve",
        "inputs": [row(spec) for spec in family.inputs], "outputs": [row(spec) for spec in family.outputs],
    }  # fmt: skip


def _server_version() -> str:
    try:
        return package_version("warmserve")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
