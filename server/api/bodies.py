"""Reading a request's body: bounded, unpacked, strict JSON, and every refusal with its own status."""

from __future__ import annotations

import zlib
from typing import NoReturn, TypeVar

from flask import Request
from pydantic import BaseModel, ValidationError
from werkzeug.exceptions import RequestEntityTooLarge

from server.errors import InvalidBody, InvalidField, TooLarge, UnsupportedMediaType
from weights.strict_json import JsonRefused, loads

MAX_DEPTH = 64
JSON = ("application/json",)
WINDOW_BITS = {"gzip": 31, "deflate": 15}  # zlib's names for RFC 1952 and RFC 1950; RFC 9110 section 8.4.1
M = TypeVar("M", bound=BaseModel)


def read_json(request: Request, model: type[M], *, limit_bytes: int) -> M:
    """Return the body as *model*.

    Raises:
        UnsupportedMediaType, TooLarge, InvalidBody: the body as a whole.
        InvalidField: the first field at fault, by name.
    """
    return parse_json(read_body(request, JSON, limit_bytes=limit_bytes), model)


def read_body(request: Request, media_types: tuple[str, ...], *, limit_bytes: int) -> bytes:
    """Return the whole body, unpacked if it came in gzip or deflate; the limit holds before and after.

    Raises:
        UnsupportedMediaType: it is none of *media_types*, or packed in some other way.
        TooLarge: it is longer than *limit_bytes*, or unpacks to more.
        InvalidBody: it ended early, or is not what its Content-Encoding says.
    """
    if request.mimetype and request.mimetype not in media_types:
        raise UnsupportedMediaType(f"the body must be {' or '.join(media_types)}, not {request.mimetype}")
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding != "identity" and coding not in WINDOW_BITS:  # several codings too: one bomb inside another
        raise UnsupportedMediaType("Content-Encoding must be gzip, deflate or identity")
    raw = _read(request, limit_bytes)
    return raw if coding == "identity" else _unpack(raw, WINDOW_BITS[coding], limit_bytes)


def parse_json(raw: bytes, model: type[M]) -> M:
    """Return *raw* as *model*.

    Raises:
        InvalidBody: it is not one JSON object.
        InvalidField: the first field at fault, by name.
    """
    try:
        table = loads(raw, max_depth=MAX_DEPTH)
    except JsonRefused as error:
        raise InvalidBody(f"the body is not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise InvalidBody("the body must be a JSON object")
    try:
        return model.model_validate(table)
    except ValidationError as error:
        _refuse(error)


def _read(request: Request, limit_bytes: int) -> bytes:
    if (request.content_length or 0) > limit_bytes:
        raise _too_large(limit_bytes)
    try:
        raw = request.stream.read(limit_bytes + 1)
    except RequestEntityTooLarge:
        raise _too_large(limit_bytes) from None
    except Exception as error:
        # Broken chunks and lost connections, in the exceptions of whichever server reads them.
        raise InvalidBody(f"the body could not be read: {type(error).__name__}") from None
    if len(raw) < (request.content_length or 0):
        raise InvalidBody(f"the body ended after {len(raw)} of {request.content_length} bytes")
    if len(raw) > limit_bytes:
        raise _too_large(limit_bytes)
    return raw


def _unpack(raw: bytes, window_bits: int, limit_bytes: int) -> bytes:
    unpacking = zlib.decompressobj(window_bits)
    try:
        unpacked = unpacking.decompress(raw, limit_bytes + 1)  # stops there, whatever a bomb holds
    except zlib.error as error:
        raise InvalidBody(f"the body is not what its Content-Encoding says: {error}") from None
    if len(unpacked) > limit_bytes:
        raise _too_large(limit_bytes)
    # One member only: thousands of empty ones would cost a pass over the rest of the body each.
    if not unpacking.eof or unpacking.unused_data:
        raise InvalidBody("the packed body ends early or goes on after its end")
    return unpacked


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"the body is over the limit of {limit_bytes} bytes")


def _refuse(error: ValidationError) -> NoReturn:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = problem["loc"]
    param = str(where[0]) if where else None
    # Inside a list the number says which; elsewhere the rest would be pydantic's own words for a union.
    path = ".".join(map(str, where)) if any(isinstance(step, int) for step in where) else param
    raise InvalidField(f"{path}: {problem['msg']}" if path else problem["msg"], param=param)
