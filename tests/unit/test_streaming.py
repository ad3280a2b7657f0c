"""Streamed speech on the Flask client: the same audio, early and late errors, clients that leave."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from server.api import streaming
from server.api.exchange import Exchange
from server.audio import FORMATS, PCM_RATE
from server.errors import ResponseAborted
from server.families.base import InputError
from tests.unit.scripted import PIECE, Script
from tests.unit.served import app_for_tone
from tests.unit.test_audio import decode, pitch


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Script]:
    return lambda **settings: Script(app_for_tone(**settings), monkeypatch)


@pytest.fixture
def script(make: Callable[..., Script]) -> Script:
    return make()


@pytest.fixture
def served_events(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    caplog.set_level(logging.INFO, "warmserve")
    return lambda: [r.fields for r in caplog.records if getattr(r, "event", "") == "request_served"]


def stream(script: Script, **fields: Any) -> tuple[Any, bytes]:
    """Ask for three pieces, of which the last two come only once the response has begun."""
    script.say(PIECE)
    answer = script.ask(**fields)
    assert (script.begun, script.pool.lent) == (1, 1)
    script.say(PIECE, PIECE, 0)
    return answer, answer.data


def ask_whole(script: Script, monkeypatch: pytest.MonkeyPatch, *pieces: int, **fields: Any) -> Any:
    """Ask for pieces that are all there before the response begins, however busy this machine is."""
    monkeypatch.setattr(streaming, "GRACE_S", 20)
    script.begun = 0
    script.say(*pieces, 0)
    return script.ask(**fields)


@pytest.mark.parametrize("name", FORMATS)
def test_streamed_audio_is_the_audio(script: Script, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, streamed = stream(script, response_format=name)
    assert "Content-Length" not in answer.headers
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert answer.mimetype == FORMATS[name].media_type
    whole = ask_whole(script, monkeypatch, PIECE, PIECE, PIECE, response_format=name)
    assert whole.content_length == len(whole.data)
    heard, rate = decode(name, streamed)
    expected, _ = decode(name, whole.data)
    assert abs(len(heard) - len(expected)) <= 0.06 * rate  # a whole MP3's header cuts the encoder's silence
    if len(heard) == len(expected) and name != "opus":
        assert np.abs(heard - expected).max() < 1e-3
    for number, third in enumerate(np.array_split(heard[-len(expected) :], 3), start=1):
        middle = third[len(third) // 4 : -len(third) // 4]
        assert pitch(middle, rate) == pytest.approx(number * 0.1 * PCM_RATE / (2 * np.pi), abs=15)


def test_a_streamed_wav_has_one_header_of_unknown_length_and_a_whole_one_says_it(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, streamed = stream(script, response_format="wav")
    assert streamed.count(b"RIFF") == 1
    assert streamed[4:8] == streamed[40:44] == b"\xff" * 4
    whole = ask_whole(script, monkeypatch, PIECE, response_format="wav").data
    assert int.from_bytes(whole[40:44], "little") == len(whole) - 44 == 2 * PIECE


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InputError("input", "holds nothing"), 400, "invalid_field"),
        (ValueError("x"), 500, "inference_failed"),
    ],
)
def test_an_error_before_the_first_piece_has_its_status(
    script: Script, error: Exception, status: int, code: str
) -> None:
    for how in ("audio", "sse"):
        script.say(error)
        answer = script.ask(stream_format=how)
        assert (answer.status_code, answer.json["error"]["code"]) == (status, code)
        assert script.idle()


def test_an_error_after_the_response_began_aborts_it_and_is_logged(
    script: Script, caplog: pytest.LogCaptureFixture, served_events: Any
) -> None:
    script.say(PIECE)
    answer = script.ask(response_format="pcm")
    script.say(ValueError("late"))
    with pytest.raises(ResponseAborted):
        _ = answer.data
    assert script.idle()
    answer.close()
    request_id = answer.headers["X-Request-ID"]
    logged = {r.event: r.fields for r in caplog.records if hasattr(r, "event")}
    assert logged["request_failed"]["request_id"] == logged["response_aborted"]["request_id"] == request_id
    (event,) = served_events()
    assert (event["request_id"], event["code"], event["bytes"]) == (request_id, "inference_failed", 2 * PIECE)
    assert "cancelled" not in event


def test_an_error_in_the_codec_after_the_response_began_aborts_it(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.say(PIECE)
    answer = script.ask(response_format="pcm")
    monkeypatch.setattr("server.audio._Plain.feed", lambda *_: 1 / 0)
    script.say(PIECE)
    with pytest.raises(ResponseAborted):
        _ = answer.data
    answer.close()
    script.say(PIECE)
    assert script.closed.wait(10)
    assert script.begun == 3


def test_a_client_that_leaves_stops_the_computing_at_the_next_piece(
    script: Script, served_events: Any
) -> None:
    script.say(PIECE)
    answer = script.ask(response_format="pcm")
    answer.close()
    script.say(PIECE, PIECE, PIECE)
    assert script.closed.wait(10)
    assert script.idle()
    assert script.begun == 2
    (event,) = served_events()
    assert event["cancelled"] is True
    assert event["request_id"] == answer.headers["X-Request-ID"]


def test_a_client_that_leaves_before_the_first_piece_is_noticed(script: Script, served_events: Any) -> None:
    freed = threading.Event()
    exchange = Exchange(free_place=freed.set, client_left=lambda: True)
    environ = {Exchange.KEY: exchange}
    body = {"model": "tone", "input": "hello", "voice": "sine"}
    answer = script.app.test_client().post("/v1/audio/speech", json=body, environ_overrides=environ)
    assert answer.status_code == 499
    assert not freed.is_set(), "the place was free while the instance was not"
    script.say(PIECE, PIECE)
    assert freed.wait(10)
    assert script.begun == 1
    answer.close()
    assert served_events()[0]["cancelled"] is True


def test_the_place_is_free_once_all_is_computed_and_nothing_is_read(script: Script) -> None:
    freed = threading.Event()
    script.say(PIECE)
    body = {"model": "tone", "input": "hello", "voice": "sine"}
    environ = {Exchange.KEY: Exchange(free_place=freed.set)}
    answer = script.app.test_client().post("/v1/audio/speech", json=body, environ_overrides=environ)
    script.say(*[PIECE] * 50, 0)
    assert freed.wait(10)
    assert script.pool.lent == 0
    assert len(answer.data) > 1000


@pytest.mark.parametrize("began", [False, True])
def test_a_stuck_family_ends_at_the_request_timeout(
    make: Callable[..., Script], served_events: Any, began: bool
) -> None:
    script = make(request_timeout_s=0.2)
    if began:
        script.say(PIECE)
    answer = script.ask(response_format="pcm")
    if began:
        with pytest.raises(ResponseAborted):
            _ = answer.data
    else:
        assert (answer.status_code, answer.json["error"]["code"]) == (504, "deadline_exceeded")
    answer.close()
    assert served_events()[0]["code"] == "deadline_exceeded"
    assert script.pool.lent == 1
    script.say(PIECE, PIECE)
    assert script.idle()


def test_sse_events_are_deltas_and_one_done_with_usage(script: Script) -> None:
    answer, payload = stream(script, response_format="pcm", stream_format="sse")
    assert answer.mimetype == "text/event-stream"
    assert (answer.headers["X-Accel-Buffering"], answer.headers["Cache-Control"]) == ("no", "no-cache")
    blocks = payload.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and len(block) < 1 << 16 for block in blocks)
    *deltas, done = [json.loads(block.removeprefix("data: ")) for block in blocks]
    assert {frozenset(delta) for delta in deltas} == {frozenset({"type", "audio"})}
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert len(b"".join(base64.b64decode(delta["audio"]) for delta in deltas)) == 3 * 2 * PIECE
    usage = {"input_tokens": 16, "output_tokens": 0, "total_tokens": 16}
    assert done == {"type": "speech.audio.done", "usage": usage}


def test_one_event_for_a_streamed_response_when_it_has_ended(script: Script, served_events: Any) -> None:
    script.say(PIECE)
    answer = script.ask(response_format="pcm")
    assert served_events() == []
    script.say(PIECE, 0)
    _ = answer.data
    answer.close()
    (event,) = served_events()
    assert event["request_id"] == answer.headers["X-Request-ID"]
    assert event["bytes"] == 2 * 2 * PIECE
    assert event["audio_s"] == pytest.approx(0.2)
    assert 0 < event["first_byte_ms"] < event["total_ms"]
    assert event["queue_ms"] + event["inference_ms"] < event["total_ms"]


def test_one_event_for_every_other_request_too(script: Script, served_events: Any) -> None:
    client = script.app.test_client()
    for method, path in (("HEAD", "/v1/models"), ("GET", "/v1/models"), ("GET", "/nowhere")):
        client.open(path, method=method, buffered=True)
    assert [(e["method"], e["status"]) for e in served_events()] == [
        ("HEAD", 200), ("GET", 200), ("GET", 404),
    ]  # fmt: skip
