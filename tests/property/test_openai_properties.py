"""Whatever arrives, the answer is an answer: never a 5xx, always the protocol's error shape."""

from __future__ import annotations

import functools
import json
from typing import Any

from flask.testing import FlaskClient
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.served import app_for_tone


@functools.cache
def client() -> FlaskClient:
    """Return one client for all examples, made by the first: this module's threads end with it."""
    return app_for_tone().test_client()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "model",
    "input",
    "voice",
    "speed",
    "seed",
    "response_format",
    "stream_format",
    "instructions",
    "language",
]


def check(answer: Any) -> None:
    assert answer.status_code < 500
    if answer.status_code != 200:
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_arbitrary_bytes_never_fail_the_server(body: bytes) -> None:
    check(client().post("/v1/audio/speech", data=body, content_type="application/json"))


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), VALUES, max_size=5))
@settings(max_examples=200, deadline=None)
def test_arbitrary_fields_never_fail_the_server(fields: dict[str, Any]) -> None:
    body = {"model": "tone", "input": "hello", "voice": "sine", "response_format": "pcm", **fields}
    check(client().post("/v1/audio/speech", data=json.dumps(body), content_type="application/json"))


@given(
    st.text(min_size=1, max_size=50).filter(lambda text: not text.startswith(("sleep", "seconds", "raise")))
)
@settings(max_examples=50, deadline=None)
def test_any_text_is_spoken_or_refused(text: str) -> None:
    body = {"model": "tone", "input": text, "voice": "sine", "response_format": "pcm"}
    check(client().post("/v1/audio/speech", json=body))
