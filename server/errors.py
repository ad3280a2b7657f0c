"""What a request can end with besides an answer: one class a condition, one table of statuses.

Renderings for each protocol are here too: a shape is never built in a route. Standard library only.
"""

from __future__ import annotations

import math
from typing import Any


class ServingError(Exception):
    """Root of the conditions a client is told about.

    ``status`` is the HTTP status, ``code`` one snake_case word for clients and logs, ``param`` the field
    at fault.
    """

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidField(ServingError):
    """A field is missing, of the wrong type or out of range; ``param`` names it."""

    status, code = 400, "invalid_field"


class InvalidBody(ServingError):
    """The body as a whole cannot be read."""

    status, code = 400, "invalid_body"


class InvalidKey(ServingError):
    """The service asks for an API key, and this is none of its."""

    status, code = 401, "invalid_api_key"


class RateLimited(ServingError):
    """The key has asked too often; ``retry_after_s`` says when it may ask again."""

    status, code = 429, "rate_limited"


class TooManyAtOnce(ServingError):
    """The key has as many requests under way as it may."""

    status, code = 429, "concurrency_limited"


class UnknownModel(ServingError):
    """No such model is served here."""

    status, code = 404, "model_not_found"


class NotFound(ServingError):
    """No such path."""

    status, code = 404, "not_found"


class MethodNotAllowed(ServingError):
    """The path exists, the method on it does not."""

    status, code = 405, "method_not_allowed"


class TooLarge(ServingError):
    """The body is over the limit."""

    status, code = 413, "body_too_large"


class UnsupportedMediaType(ServingError):
    """The body is not what the path takes."""

    status, code = 415, "unsupported_media_type"


class InstanceFailed(ServingError):
    """The model failed on this request. The log has the trace; the client does not."""

    status, code = 500, "inference_failed"


class Unsupported(ServingError):
    """The protocol has it, this server does not."""

    status, code = 501, "not_supported"


class Overloaded(ServingError):
    """The queue is full, or no instance became free in time."""

    status, code = 503, "overloaded"


class Draining(ServingError):
    """This worker is leaving; another one takes the next try."""

    status, code = 503, "draining"


class DeviceOutOfMemory(ServingError):
    """The device had no memory for this request, also once it was alone there; a smaller one may fit."""

    status, code = 503, "device_out_of_memory"


class DeviceFailed(ServingError):
    """The device failed under this worker, which is replaced; another one takes the next try."""

    status, code = 503, "device_failed"


class DeadlineExceeded(ServingError):
    """The request could not be answered within its time."""

    status, code = 504, "deadline_exceeded"


class ClientLeft(ServingError):
    """The client hung up first; nobody reads this answer. 499 is nginx's status for it, for logs only."""

    status, code = 499, "client_left"


class ResponseAborted(ConnectionAbortedError):
    """A response has begun and cannot be finished: the connection has to end so that its client sees it.

    A connection error, because for whoever sends the response that is what it is.
    """


KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error",
         405: "invalid_request_error", 413: "invalid_request_error", 415: "invalid_request_error",
         429: "rate_limit_error"}  # fmt: skip


def openai_error(error: ServingError) -> dict[str, Any]:
    """Return the body of an error on /v1: all four keys, always."""
    kind = KINDS.get(error.status, "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def inference_error(error: ServingError) -> dict[str, Any]:
    """Return the body of an error on /v2 (Open Inference Protocol)."""
    return {"error": error.message}


def retry_headers(error: ServingError) -> dict[str, str]:
    """Return Retry-After in whole seconds and retry-after-ms, for errors that say when to come back.

    Rounded up: who comes back when it was told to is not refused again.
    """
    if error.retry_after_s is None:
        return {}
    whole = max(1, math.ceil(error.retry_after_s))
    return {"Retry-After": str(whole), "retry-after-ms": str(math.ceil(error.retry_after_s * 1000))}


def headers_of(error: ServingError) -> dict[str, str]:
    """Return the headers that an error's response carries."""
    challenge = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return {**retry_headers(error), **challenge}
