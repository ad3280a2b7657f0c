"""The data application: routes of every protocol, errors in each protocol's shape, one event a request."""

from __future__ import annotations

import functools
import logging
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flask import Flask, Response, g, request
from werkzeug.exceptions import HTTPException
from werkzeug.exceptions import MethodNotAllowed as WerkzeugMethodNotAllowed

from server.api import embeddings, inference, openai, openapi
from server.api.admission import add_admission
from server.api.exchange import Served
from server.api.models import Models, note_asked
from server.api.record import Record, Recorder, Tracer
from server.errors import (
    InstanceFailed,
    InvalidBody,
    MethodNotAllowed,
    NotFound,
    ServingError,
)
from server.settings import Settings

LOG = logging.getLogger("warmserve")
SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


def _nobody(_fields: Mapping[str, Any]) -> None:
    """Stand in for whoever counts requests where nobody does."""


def create_app(
    settings: Settings,
    served: Sequence[Served],
    observe: Callable[[Mapping[str, Any]], None] = _nobody,
    trace: Tracer | None = None,
) -> Flask:
    """Return the application that the data listeners serve; see `Recorder` for the two last."""
    app = Flask("warmserve")
    app.json.sort_keys = False  # type: ignore[attr-defined]
    models = Models(settings, served)
    app.before_request(functools.partial(_begin, models))
    add_admission(app, settings)
    app.register_blueprint(openai.create_blueprint(settings, models))
    app.register_blueprint(embeddings.create_blueprint(settings, models))
    app.register_blueprint(inference.create_blueprint(settings, models))
    app.register_blueprint(openapi.create_blueprint(models, with_keys=bool(settings.api_keys)))
    app.register_error_handler(ServingError, _render)
    app.register_error_handler(Exception, _render_unexpected)

    @app.after_request
    def finish(response: Response) -> Response:
        response.headers["X-Request-ID"] = g.record.request_id
        if (version := g.record.fields.get("version")) is not None:
            response.headers["X-Model-Version"] = version
        return response

    recorder = Recorder(app.wsgi_app, observe, trace, generation=max(one.generation for one in served))
    app.wsgi_app = recorder  # type: ignore[method-assign]
    return app


def _begin(models: Models) -> None:
    g.record = Record.of(request.environ)
    g.record.route = request.url_rule.rule if request.url_rule else ""
    if models.only is not None:  # whatever is asked
        note_asked(models.only.served)
    given = request.headers.get("X-Request-ID", "")
    g.record.request_id = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _render(error: ServingError) -> Response:
    g.record.fields["code"] = error.code
    if re.match(r"/v2(/|$)", request.path):
        return inference.render_error(error)
    return openai.render_error(error)


def _render_unexpected(error: Exception) -> Response:
    """Give framework errors and our own mistakes the protocol's shape; only the log gets a trace."""
    if isinstance(error, WerkzeugMethodNotAllowed):
        response = _render(MethodNotAllowed(f"{request.method} is not allowed here"))
        response.headers["Allow"] = ", ".join(error.valid_methods or ())
        return response
    if isinstance(error, HTTPException) and error.code == 404:
        return _render(NotFound(f"there is nothing at {request.path[:200]}"))
    if isinstance(error, HTTPException) and error.code is not None and error.code < 500:
        return _render(InvalidBody(error.description or error.name))
    LOG.error("request failed", exc_info=error)
    return _render(InstanceFailed("the server failed on this request"))
