"""The OpenAI speech protocol on a Flask test client: every field's limit, every refusal's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.unit.served import app_for_tone

GOOD = {"model": "tone", "input": "hello", "voice": "sine"}


@pytest.fixture(scope="module")
def client() -> FlaskClient:
    return app_for_tone().test_client()


def speak(client: FlaskClient, **fields: Any) -> Any:
    return client.post("/v1/audio/speech", json={**GOOD, **fields})


@pytest.mark.parametrize(
    ("name", "media_type"),
    [("mp3", "audio/mpeg"), ("opus", "audio/ogg"), ("aac", "audio/aac"), ("flac", "audio/flac"),
     ("wav", "audio/wav"), ("pcm", "audio/pcm")],
)  # fmt: skip
def test_each_format_has_its_media_type(client: FlaskClient, name: str, media_type: str) -> None:
    answer = speak(client, response_format=name)
    assert answer.status_code == 200
    assert answer.mimetype == media_type
    assert len(answer.data) > 100


def test_mp3_is_the_default_and_voice_may_be_an_object(client: FlaskClient) -> None:
    answer = speak(client, voice={"id": "sine"})
    assert (answer.status_code, answer.mimetype) == (200, "audio/mpeg")


def test_speed_shortens_the_audio(client: FlaskClient) -> None:
    slow, fast = (len(speak(client, response_format="pcm", speed=speed).data) for speed in (0.5, 2.0))
    assert slow == 4 * fast


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": "x" * 4097}, "input"),
        ({"input": 7}, "input"),
        ({"input": None}, "input"),
        ({"voice": "nobody"}, "voice"),
        ({"voice": {"id": "sine", "x": 1}}, "voice"),
        ({"voice": 3}, "voice"),
        ({"speed": 0.24}, "speed"),
        ({"speed": 4.01}, "speed"),
        ({"speed": "1"}, "speed"),
        ({"speed": True}, "speed"),
        ({"response_format": "mp4"}, "response_format"),
        ({"stream_format": "carrier pigeon"}, "stream_format"),
        ({"instructions": "x" * 4097}, "instructions"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"language": "x" * 36}, "language"),
        ({"emotion": "happy"}, "emotion"),
    ],
)
def test_a_bad_field_is_400_and_named(client: FlaskClient, fields: dict[str, Any], param: str) -> None:
    answer = speak(client, **fields)
    assert answer.status_code == 400
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"]


@pytest.mark.parametrize("missing", GOOD)
def test_a_missing_field_is_400_and_named(client: FlaskClient, missing: str) -> None:
    answer = client.post("/v1/audio/speech", json={k: v for k, v in GOOD.items() if k != missing})
    assert (answer.status_code, answer.json["error"]["param"]) == (400, missing)


def test_an_unknown_model_is_404(client: FlaskClient) -> None:
    for answer in (speak(client, model="other"), client.get("/v1/models/other")):
        assert (answer.status_code, answer.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"model":NaN}', b'{"a":1,"a":2}', b"[" * 5000,
     b'{"a":' * 5000,
     b'{"input":"\\ud800"}', b'{"speed":1e999}', b'{"seed":' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_body_that_is_no_good_json_is_400(client: FlaskClient, body: bytes) -> None:
    answer = client.post("/v1/audio/speech", data=body, content_type="application/json")
    assert answer.status_code == 400
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}


def test_a_body_over_the_limit_is_413_whether_its_length_is_told_or_not(client: FlaskClient) -> None:
    body = json.dumps({**GOOD, "instructions": "x" * (2 << 20)}).encode()
    told = client.post("/v1/audio/speech", data=body, content_type="application/json")
    assert (told.status_code, told.json["error"]["code"]) == (413, "body_too_large")


def test_a_body_that_breaks_off_is_400_and_not_an_error_of_ours(client: FlaskClient) -> None:
    class Broken:
        def read(self, *_: int) -> bytes:
            raise ConnectionResetError

        readline = read

    body = json.dumps(GOOD).encode()
    broken = {"wsgi.input": Broken(), "CONTENT_LENGTH": "50", "wsgi.input_terminated": True}
    short = {"CONTENT_LENGTH": str(len(body) + 5), "wsgi.input_terminated": True}
    for environ in (broken, short):
        answer = client.post(
            "/v1/audio/speech", data=body, content_type="application/json", environ_overrides=environ
        )
        assert (answer.status_code, answer.json["error"]["code"]) == (400, "invalid_body")


def test_another_media_type_is_415(client: FlaskClient) -> None:
    assert client.post("/v1/audio/speech", data=b"x", content_type="text/plain").status_code == 415


def test_a_failing_model_is_500_without_its_trace_and_the_instance_comes_back(client: FlaskClient) -> None:
    for _ in range(3):
        answer = speak(client, input="raise!")
        assert answer.status_code == 500
        assert answer.json["error"]["code"] == "inference_failed"
        assert "asked to fail" not in answer.text
    assert speak(client).status_code == 200


def test_sound_that_is_not_finite_is_a_failure_and_never_sent(client: FlaskClient) -> None:
    answer = speak(client, input="nan!")
    assert (answer.status_code, answer.json["error"]["code"]) == (500, "inference_failed")


def test_every_answer_carries_request_id_and_version(client: FlaskClient) -> None:
    paths = [("GET", "/v1/models"), ("GET", "/nowhere"), ("PUT", "/v1/models"), ("POST", "/v1/audio/speech")]
    for method, path in paths:
        answer = client.open(path, method=method, headers={"X-Request-ID": "mine-1.2_3"})
        assert answer.headers["X-Request-ID"] == "mine-1.2_3"
        assert answer.headers["X-Model-Version"] == "v1"


@pytest.mark.parametrize("given", ["", "has space", "x" * 129, "naïve", 'quo"te'])
def test_an_insane_request_id_is_replaced(client: FlaskClient, given: str) -> None:
    found = client.get("/v1/models", headers={"X-Request-ID": given.encode().decode("latin-1")}).headers[
        "X-Request-ID"
    ]
    assert found != given
    assert len(found) == 32


def test_unknown_paths_and_methods_have_the_protocols_shape(client: FlaskClient) -> None:
    assert client.get("/nowhere").json["error"]["code"] == "not_found"
    answer = client.get("/v1/audio/speech")
    assert (answer.status_code, answer.json["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in answer.headers["Allow"]
    assert client.get("/v2/nowhere").json == {"error": "there is nothing at /v2/nowhere"}


def test_models_and_voices_are_listed(client: FlaskClient) -> None:
    (row,) = client.get("/v1/models").json["data"]
    assert row == client.get("/v1/models/tone").json
    assert set(row) == {"id", "object", "created", "owned_by"}
    assert [voice["id"] for voice in client.get("/v1/audio/voices").json["voices"]] == ["sine", "soft"]


def test_a_lower_limit_on_the_text_is_kept() -> None:
    short = app_for_tone(max_input_chars=10).test_client()
    assert speak(short, input="x" * 11).status_code == 400
    assert speak(short, input="x" * 10).status_code == 200


def test_a_busy_pool_is_503_with_retry_after() -> None:
    app = app_for_tone(request_timeout_s=0.01)
    with app.config["SERVED"].pool.lease(timeout_s=1):
        answer = speak(app.test_client())
    assert answer.status_code == 503
    assert (answer.headers["Retry-After"], answer.headers["retry-after-ms"]) == ("1", "1000")
