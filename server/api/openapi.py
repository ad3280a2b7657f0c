"""The description of the interface, made from the routes and the models that check their bodies.

A route says in one line what it does and gives; the rest follows from its URL and its models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flask import Blueprint, Flask, Response, current_app, jsonify, render_template_string
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.api.answers import InferenceError, OpenAIError, OpenAPIDocument
from server.api.deadline import LONGEST_TIMEOUT_S, TIMEOUT
from server.api.exchange import Served
from server.api.models import Models
from server.families.base import SpeechFamily

JSON = "application/json"
SCHEMAS = "#/components/schemas/"
OF_COMPUTING = (400, 404, 413, 415, 429, 500, 501, 503, 504)
OF_READING = (400, 404)
MEANINGS = {
    400: "something in the request is wrong; the message names it", 401: "no API key, or an unknown one",
    404: "no such model, version or path", 413: "the body is too large", 415: "the body is of another type",
    429: "this key has reached its limit; Retry-After says when to come back",
    500: "the model failed on this request", 501: "the protocol has it, this server does not",
    503: "not now; Retry-After says when to come back", 504: "not computed within its time",
}  # fmt: skip
PAGE = Path(__file__).with_name("docs.html")
View = TypeVar("View", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What one route does. ``answer`` is its JSON, ``media_types`` what it gives besides or instead."""

    summary: str
    answer: type[BaseModel] | None = None
    many: bool = False  # a list of answers
    media_types: tuple[str, ...] = ()
    body: type[BaseModel] | None = None
    body_types: tuple[str, ...] = ()  # besides JSON
    body_optional: bool = False
    only_refuses: bool = False


def described(**operation: Any) -> Callable[[View], View]:
    """Put an `Operation` on a view, for `create_document`."""

    def put(view: View) -> View:
        view.operation = Operation(**operation)  # type: ignore[attr-defined]
        return view

    return put


def create_blueprint(models: Models, *, with_keys: bool) -> Blueprint:
    """Return the routes of the description: as JSON, and as a page that needs nothing from elsewhere."""
    blueprint = Blueprint("openapi", __name__)
    made: list[dict[str, Any]] = []  # at the first request: by then all routes are there

    def document() -> dict[str, Any]:
        if not made:
            made.append(create_document(current_app, [model.served for model in models], with_keys=with_keys))
        return made[0]

    @blueprint.get("/openapi.json")
    @described(summary="This description", answer=OpenAPIDocument)
    def openapi() -> Response:
        return jsonify(document())

    @blueprint.get("/docs")
    @described(summary="This description as a page", media_types=("text/html",))
    def docs() -> str:
        return render_template_string(PAGE.read_text("utf-8"), document=document())

    return blueprint


def create_document(app: Flask, served: Sequence[Served], *, with_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of *app*."""
    routes = list(_routes(app))
    models = {OpenAIError, InferenceError}
    models |= {m for *_, operation in routes for m in (operation.body, operation.answer) if m is not None}
    listed = [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)]
    _, found = models_json_schema(listed, ref_template=SCHEMAS + "{model}")  # type: ignore[arg-type]
    schemas = found.get("$defs", {})
    _name_choices(schemas, served)
    paths: dict[str, Any] = {}
    for path, method, endpoint, parameters, operation in routes:
        paths.setdefault(path, {})[method] = _operation(
            path, endpoint, parameters, operation, served, with_keys
        )
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": f"warmserve: {', '.join(one.name for one in served)}",
            "version": ", ".join(one.version for one in served),
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _routes(app: Flask) -> Iterator[tuple[str, str, str, list[str], Operation]]:
    """Yield each described route: its path, method, endpoint, the path's parameters, and its operation."""
    for rule in sorted(app.url_map.iter_rules(), key=lambda rule: rule.rule):
        operation = getattr(app.view_functions[rule.endpoint], "operation", None)
        if operation is not None:
            path = re.sub(r"<(?:any\([^)]*\):)?_?(\w+)>", r"{\1}", rule.rule)
            method = "post" if "POST" in (rule.methods or ()) else "get"
            yield path, method, rule.endpoint, re.findall(r"{(\w+)}", path), operation


def _operation(
    path: str,
    endpoint: str,
    parameters: Iterable[str],
    operation: Operation,
    served: Sequence[Served],
    with_keys: bool,
) -> dict[str, Any]:
    computes = operation.body is not None or operation.only_refuses
    error = InferenceError if path.startswith("/v2") else OpenAIError
    statuses = sorted({*(OF_COMPUTING if computes else OF_READING), *((401,) if with_keys else ())})
    answers: dict[str, Any] = {} if operation.only_refuses else {"200": _answer(operation)}
    answers |= {
        str(status): {"description": MEANINGS[status], "content": _json(error)} for status in statuses
    }
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{endpoint} {path}").strip("_"),
        "summary": operation.summary,
        "parameters": [*(_in_path(name, served) for name in parameters), *([_timeout()] if computes else [])],
        "responses": answers,
    }
    if operation.body is not None:
        content: dict[str, Any] = _json(operation.body)
        content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in operation.body_types}
        found["requestBody"] = {"required": not operation.body_optional, "content": content}
    return found


def _answer(operation: Operation) -> dict[str, Any]:
    content = _json(operation.answer, many=operation.many) if operation.answer is not None else {}
    binary = {"schema": {"type": "string", "format": "binary"}}
    content |= {kind: binary if kind != "text/html" else {"schema": {"type": "string"}}
                for kind in operation.media_types}  # fmt: skip
    return {"description": "done", "content": content}


def _json(model: type[BaseModel], *, many: bool = False) -> dict[str, Any]:
    reference = {"$ref": SCHEMAS + model.__name__}
    return {JSON: {"schema": {"type": "array", "items": reference} if many else reference}}


def _in_path(name: str, served: Sequence[Served]) -> dict[str, Any]:
    choices = {
        "model": [one.name for one in served],
        "version": sorted({v for one in served for v in (one.version, one.version.removeprefix("v"))}),
        "action": ["load", "unload"],
    }
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "enum": choices[name]}}


def _timeout() -> dict[str, Any]:
    return {
        "name": TIMEOUT, "in": "header", "required": False,
        "description": "seconds the client waits, from when its proxy took the request",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_TIMEOUT_S},
    }  # fmt: skip


def _name_choices(schemas: dict[str, Any], served: Sequence[Served]) -> None:
    """Say by name which models and which voices there are."""
    for name in ("SpeechBody", "EmbeddingsBody"):
        if name in schemas:
            schemas[name]["properties"]["model"]["enum"] = [one.name for one in served]
    speaking = [one.family for one in served if isinstance(one.family, SpeechFamily)]
    if "SpeechBody" in schemas and speaking:
        voices = sorted({voice.id for family in speaking for voice in family.voices()})
        schemas["VoiceObject"]["properties"]["id"]["enum"] = voices
        for one in schemas["SpeechBody"]["properties"]["voice"]["anyOf"]:
            if one.get("type") == "string":
                one["enum"] = voices
