"""Speech as a response: encoded while it is computed, as audio or as server-sent events.

Takes the pieces from `server.api.computing` and knows nothing of instances; formats are `server.audio`'s.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from flask import Response

from server.api.computing import Computing
from server.api.record import Record
from server.audio import FORMATS, Samples, create_encoder

# What is computed by then goes out whole, with its length and an exact WAV header: the end of a text of
# one sentence follows its only piece at once, and a longer one starts these milliseconds later.
GRACE_S = 0.01
# Of audio in one event: a multiple of 3, so that events decode alone and joined; base64 makes 32 KiB of it,
# and line readers give up at 64 KiB.
DELTA_BYTES = 24 * 1024
NO_BUFFER = {"X-Accel-Buffering": "no"}  # nginx would collect the response before it hands anything on


def speech_response(
    computing: Computing[Samples], *, name: str, sse: bool, chars: int, sample_rate: int, record: Record
) -> Response:
    """Return the response in format *name*, as soon as its first bytes are there.

    The response ends *computing* when it is closed. *chars* is the input's length, for the usage.

    Raises: as `Computing.pieces`, for what goes wrong before the response begins.
    """
    try:
        pieces = computing.pieces()
        head = next(pieces, np.empty(0, np.float32))
        whole = computing.ended.wait(GRACE_S)
        if whole:
            head = np.concatenate([head, *pieces])
        voice = _Encoder(name, sample_rate, record, streamed=sse or not whole)
        chunks = voice.chunks(head, pieces)
        first = next(chunks)  # here, so that a codec's refusal has a status of its own
    except BaseException:
        computing.cancel()
        raise
    if sse:
        response = _events(_joined(first, chunks), chars)
    elif whole:
        response = Response(b"".join(_joined(first, chunks)), mimetype=FORMATS[name].media_type)
    else:
        response = Response(_joined(first, chunks), mimetype=FORMATS[name].media_type, headers=NO_BUFFER)
    response.call_on_close(computing.cancel)
    return response


class _Encoder:
    """Samples in, bytes out; keeps the record's account of both."""

    def __init__(self, name: str, sample_rate: int, record: Record, *, streamed: bool) -> None:
        self._encoder = create_encoder(name, sample_rate, streamed=streamed)
        self._sample_rate = sample_rate
        self._record, self._began = record, time.monotonic()
        self._fields = record.fields
        self._fields |= {"audio_s": 0.0, "encode_ms": 0.0}

    def chunks(self, head: Samples, pieces: Iterable[Samples]) -> Iterator[bytes]:
        """Yield the bytes of *head*, of each of *pieces*, and the rest."""
        yield self._feed(head)
        for piece in pieces:
            yield self._feed(piece)
        yield self._encoder.finish()

    def _feed(self, samples: Samples) -> bytes:
        began = time.monotonic()
        encoded = self._encoder.feed(samples)
        self._fields["encode_ms"] += (time.monotonic() - began) * 1000
        self._record.part("encode", self._began)
        self._fields["audio_s"] += len(samples) / self._sample_rate
        return encoded


def _joined(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _events(chunks: Iterator[bytes], chars: int) -> Response:
    headers = {**NO_BUFFER, "Cache-Control": "no-cache"}
    return Response(_event_lines(chunks, chars), mimetype="text/event-stream", headers=headers)


def _event_lines(chunks: Iterator[bytes], chars: int) -> Iterator[bytes]:
    """Yield one event a chunk and the last with the usage.

    A family has no tokens: the input is counted in characters, the output, which is samples, as 0.
    """
    for chunk in chunks:
        for start in range(0, len(chunk), DELTA_BYTES):
            audio = base64.b64encode(chunk[start : start + DELTA_BYTES]).decode()
            yield _event({"type": "speech.audio.delta", "audio": audio})
    usage = {"input_tokens": chars, "output_tokens": 0, "total_tokens": chars}
    yield _event({"type": "speech.audio.done", "usage": usage})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
