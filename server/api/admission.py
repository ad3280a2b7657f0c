"""Who gets in: the request's time, its key and that key's limits, before anything is read or computed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from flask import Flask, Response, g, request

from server.api.deadline import START, TIMEOUT, timeout_of, waited_s
from server.api.limits import KeyLimits
from server.errors import InvalidKey
from server.keys import find_key
from server.settings import Settings

OPEN_TO_ALL = ("/v2/health/",)  # probes have no key


def add_admission(app: Flask, settings: Settings) -> None:
    """Make *app* ask every request for its time and, where there are keys, for one."""
    app.before_request(_note_time)
    if keys := settings.api_keys:
        limits = KeyLimits(settings.run_dir / "limits")

        @app.before_request
        def check_key() -> None:
            if request.path.startswith(OPEN_TO_ALL):
                return
            key = find_key(keys, _given_key())
            if key is None:
                raise InvalidKey("the API key is missing or unknown: send Authorization: Bearer KEY")
            g.record.fields["key"] = key.name
            if request.method == "POST":  # what computes
                g.held = limits.enter(key)

        app.after_request(_release_at_end)


def _note_time() -> None:
    record = g.record
    record.asked = record.began - waited_s(request.headers.get(START), time.time())
    if request.routing_exception is None:  # else there is nothing to be in time with
        record.own_timeout_s = timeout_of(request.headers.get(TIMEOUT))


def _given_key() -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("X-API-Key", "")


def _release_at_end(response: Response) -> Response:
    """Give the key's place back when the response has been sent, or given up."""
    held = g.pop("held", None)
    if held is not None:
        response.call_on_close(_once(lambda: os.close(held)))
    return response


def _once(run: Callable[[], Any]) -> Callable[[], None]:
    pending = [run]

    def run_once() -> None:
        if pending:
            pending.pop()()

    return run_once
