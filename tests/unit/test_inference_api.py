"""The Open Inference Protocol on a Flask test client: every route, both forms of tensors, every refusal."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.unit.served import app_for_affine, app_for_tone

INFER = "/v2/models/affine/infer"
MATRIX: dict[str, Any] = {"name": "matrix", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
SCALED = [{"name": "scaled"}]
BINARY_MATRIX = {
    **{k: MATRIX[k] for k in ("name", "shape", "datatype")},
    "parameters": {"binary_data_size": 12},
}
FLOATS = struct.pack("<3f", 1, 2, 3)


@pytest.fixture(scope="module")
def client() -> FlaskClient:
    return app_for_affine().test_client()


@pytest.fixture(scope="module")
def tone() -> FlaskClient:
    return app_for_tone().test_client()


def infer(client: FlaskClient, *more: dict[str, Any], model: str = "affine", **fields: Any) -> Any:
    body = {"inputs": [MATRIX, *more], "outputs": SCALED, **fields}
    return client.post(f"/v2/models/{model}/infer", json=body)


def infer_binary(client: FlaskClient, body: dict[str, Any], content: bytes = b"", **headers: str) -> Any:
    head = json.dumps(body).encode()
    given = {"Inference-Header-Content-Length": str(len(head)), **headers}
    return client.post(INFER, data=head + content, headers=given, content_type="application/octet-stream")


def speak(client: FlaskClient, **inputs: tuple[str, Any]) -> Any:
    rows = [{"name": name, "shape": [1], "datatype": datatype, "data": [value]}
            for name, (datatype, value) in inputs.items()]  # fmt: skip
    return client.post("/v2/models/tone/infer", json={"inputs": rows})


def refused(answer: Any, status: int, reason: str = "") -> None:
    assert (answer.status_code, list(answer.json)) == (status, ["error"])
    assert isinstance(answer.json["error"], str) and reason in answer.json["error"]


def test_the_server_and_its_health_are_told(client: FlaskClient) -> None:
    server = client.get("/v2").json
    assert (set(server), server["name"]) == ({"name", "version", "extensions"}, "warmserve")
    assert "binary_tensor_data" in server["extensions"]
    assert client.get("/v2/health/live").json == {"live": True}
    assert client.get("/v2/health/ready").json == {"ready": True}


@pytest.mark.parametrize("path", ["", "/versions/1", "/versions/v1"])
def test_a_model_is_described_whole_and_by_version(tone: FlaskClient, path: str) -> None:
    assert tone.get("/v2/models").json == {"models": ["tone"]}
    model = tone.get(f"/v2/models/tone{path}").json
    assert (model["name"], model["versions"]) == ("tone", ["1"])
    assert model["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": [1]}
    assert model["outputs"][0] == {"name": "audio", "datatype": "FP32", "shape": [-1]}
    assert tone.get(f"/v2/models/tone{path}/ready").json == {"name": "tone", "ready": True}
    assert tone.get(f"/v2/models/tone{path}/stats").status_code == 200


@pytest.mark.parametrize("path", ["other", "affine/versions/2", "affine/versions/v01", "other/versions/1"])
def test_an_unknown_model_or_version_is_404_on_every_route(client: FlaskClient, path: str) -> None:
    for route in ("", "/ready", "/stats"):
        refused(client.get(f"/v2/models/{path}{route}"), 404)
    refused(client.post(f"/v2/models/{path}/infer", json={"inputs": [MATRIX]}), 404)


def test_json_inference_answers_in_json(client: FlaskClient) -> None:
    answer = infer(client, id="mine")
    assert answer.mimetype == "application/json"
    assert answer.json == {
        "model_name": "affine", "model_version": "1", "id": "mine",
        "outputs": [{"name": "scaled", "shape": [1, 3], "datatype": "FP32", "data": [2.0, 4.0, 6.0]}],
    }  # fmt: skip


def test_every_output_comes_when_none_is_named_and_those_named_come_in_order(client: FlaskClient) -> None:
    parameters = {"binary_data_output": True}
    head = infer(client, outputs=[], parameters=parameters)
    length = int(head.headers["Inference-Header-Content-Length"])
    assert len(json.loads(head.data[:length])["outputs"]) == 14
    two = infer(client, outputs=[{"name": "out_BYTES"}, {"name": "scaled"}])
    assert [row["name"] for row in two.json["outputs"]] == ["out_BYTES", "scaled"]


def test_binary_tensors_go_in_and_come_out_in_order(client: FlaskClient) -> None:
    text = {"name": "in_BYTES", "shape": [1, 2], "datatype": "BYTES", "parameters": {"binary_data_size": 10}}
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in ("out_BYTES", "scaled")]
    body = {"inputs": [BINARY_MATRIX, text], "outputs": outputs}
    answer = infer_binary(client, body, FLOATS + b"\1\0\0\0a\1\0\0\0b")
    length = int(answer.headers["Inference-Header-Content-Length"])
    assert answer.mimetype == "application/octet-stream"
    rows = json.loads(answer.data[:length])["outputs"]
    assert [row["parameters"]["binary_data_size"] for row in rows] == [10, 12]
    assert answer.data[length:] == b"\1\0\0\0A\1\0\0\0B" + struct.pack("<3f", 2, 4, 6)


def test_json_and_binary_may_be_mixed_both_ways(client: FlaskClient) -> None:
    small = {"name": "in_UINT8", "shape": [1, 2], "datatype": "UINT8", "data": [[7, 8]]}
    outputs = [{"name": "scaled", "parameters": {"binary_data": False}}, {"name": "out_UINT8"}]
    body = {"inputs": [small, BINARY_MATRIX], "outputs": outputs, "parameters": {"binary_data_output": True}}
    answer = infer_binary(client, body, FLOATS)
    length = int(answer.headers["Inference-Header-Content-Length"])
    first, second = json.loads(answer.data[:length])["outputs"]
    assert (first["data"], second["parameters"]) == ([2.0, 4.0, 6.0], {"binary_data_size": 2})
    assert answer.data[length:] == b"\x07\x08"


def test_header_value_0_is_one_raw_input(client: FlaskClient, tone: FlaskClient) -> None:
    raw = {"headers": {"Inference-Header-Content-Length": "0"}, "content_type": "application/octet-stream"}
    answer = client.post(INFER, data=FLOATS * 2, **raw)
    assert b'"name":"scaled","shape":[2,3]' in answer.data
    refused(client.post(INFER, data=FLOATS[:-1], **raw), 400, "needs")
    spoken = tone.post("/v2/models/tone/infer", data=b"hello", **raw)
    assert len(spoken.data) > 4 * 2400


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_packed_bodies_are_unpacked_on_both_protocols(client: FlaskClient, tone: FlaskClient, coding: str,
                                                      pack: Any) -> None:  # fmt: skip
    headers = {"Content-Encoding": coding}
    body = pack(json.dumps({"inputs": [MATRIX], "outputs": SCALED}).encode())
    assert client.post(INFER, data=body, headers=headers).status_code == 200
    speech = pack(json.dumps({"model": "tone", "input": "hello", "voice": "sine"}).encode())
    path = "/v1/audio/speech"
    assert tone.post(path, data=speech, headers=headers, content_type="application/json").status_code == 200
    refused(client.post(INFER, data=body[:-1], headers=headers), 400, "early")
    refused(client.post(INFER, data=body + body, headers=headers), 400, "after its end")
    refused(client.post(INFER, data=b"plain", headers=headers), 400, "Content-Encoding")
    bomb = pack(b" " * (64 << 20))
    assert len(bomb) < 1 << 20
    refused(client.post(INFER, data=bomb, headers=headers), 413)


def test_what_cannot_be_unpacked_and_other_media_types_are_415(client: FlaskClient) -> None:
    for coding in ("br", "gzip, gzip", "zip"):
        refused(client.post(INFER, data=b"x", headers={"Content-Encoding": coding}), 415)
    refused(client.post(INFER, data=b"x", content_type="text/plain"), 415)


def test_a_body_over_the_limit_is_413(client: FlaskClient) -> None:
    refused(client.post(INFER, data=b" " * ((1 << 20) + 1)), 413)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"inputs": []}, "missing inputs: matrix"),
        ({"inputs": None}, "inputs"),
        ({"inputs": [MATRIX, MATRIX]}, "twice"),
        ({"inputs": [{**MATRIX, "name": "other"}]}, "'other' is not one of"),
        ({"inputs": [{**MATRIX, "name": ""}]}, "inputs.0.name"),
        ({"inputs": [{**MATRIX, "datatype": "FP64"}]}, "the datatype is FP32"),
        ({"inputs": [{**MATRIX, "shape": [3]}]}, "does not match"),
        ({"inputs": [{**MATRIX, "shape": [-1, 3]}]}, "below 0"),
        ({"inputs": [{**MATRIX, "shape": [2**64, 3]}]}, "above"),
        ({"inputs": [{**MATRIX, "shape": [True, 3]}]}, "inputs.0.shape.0"),
        ({"inputs": [{**MATRIX, "shape": [2, 3]}]}, "3 elements"),
        ({"inputs": [{**MATRIX, "data": 3}]}, "inputs.0.data"),
        ({"inputs": [{**MATRIX, "data": None}]}, "either data or binary_data_size"),
        ({"inputs": [{**MATRIX, "parameters": {"binary_data_size": 0}}]}, "either data or binary_data_size"),
        ({"inputs": [BINARY_MATRIX]}, "0 bytes are left"),
        ({"outputs": [{"name": "other"}]}, "outputs: each once"),
        ({"outputs": SCALED * 2}, "outputs: each once"),
        ({"outputs": [{"name": "out_BF16"}]}, "BF16"),
        ({"outputs": []}, "BF16"),
        ({"outputs": [{"name": "scaled", "parameters": {"binary_data": 1}}]}, "binary_data: true or false"),
        ({"parameters": {"binary_data_output": "yes"}}, "binary_data_output: true or false"),
        ({"parameters": {"timeout": -1}}, "timeout"),
        ({"parameters": {"timeout": 1.5}}, "timeout"),
        ({"parameters": {"priority": True}}, "priority"),
        ({"parameters": {"x": [1]}}, "parameters"),
        ({"parameters": {"fail": "other"}}, "fail: one of"),
        ({"id": 7}, "id"),
    ],
)
def test_a_bad_request_is_400_and_says_what(client: FlaskClient, fields: dict[str, Any], reason: str) -> None:
    refused(infer(client, **fields), 400, reason)


@pytest.mark.parametrize("size", [-1, 13, True, "12", 12.0, 2**70])
def test_a_lying_binary_data_size_is_400(client: FlaskClient, size: Any) -> None:
    body = {"inputs": [{**BINARY_MATRIX, "parameters": {"binary_data_size": size}}]}
    refused(infer_binary(client, body, FLOATS), 400, "binary_data_size")


def test_bytes_left_over_or_missing_are_400(client: FlaskClient) -> None:
    refused(infer_binary(client, {"inputs": [BINARY_MATRIX]}, FLOATS + b"x"), 400, "left over")
    refused(infer_binary(client, {"inputs": [BINARY_MATRIX]}, FLOATS[:-1]), 400, "11 bytes are left")


@pytest.mark.parametrize("length", ["", "-1", "1.0", "x", "9" * 30, "100000", "٣"])
def test_a_bad_header_length_is_400(client: FlaskClient, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length.encode().decode("latin-1")}
    refused(client.post(INFER, data=b"{}", headers=headers), 400)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"inputs":[],"inputs":[]}', b'{"inputs":NaN}', b'{"inputs":' * 999, b"\xff"]
)
def test_a_body_that_is_no_good_json_is_400(client: FlaskClient, body: bytes) -> None:
    refused(client.post(INFER, data=body, content_type="application/json"), 400)


@pytest.mark.parametrize("name", ["sequence_id", "classification", "shared_memory_region"])
def test_extensions_that_would_change_the_answer_are_501(client: FlaskClient, name: str) -> None:
    refused(infer(client, parameters={name: 1}), 501, name)
    refused(infer(client, outputs=[{"name": "scaled", "parameters": {name: 1}}]), 501, name)


def test_an_answer_that_json_cannot_hold_is_400_and_comes_as_binary(client: FlaskClient) -> None:
    body = {"inputs": [BINARY_MATRIX], "outputs": SCALED}
    content = struct.pack("<3f", 1, float("nan"), 3e38)
    refused(infer_binary(client, body, content), 400, "binary_data")
    body["parameters"] = {"binary_data_output": True}
    assert infer_binary(client, body, content).data.endswith(struct.pack("<f", float("inf")))


@pytest.mark.parametrize("mode", ["raise", "wrong datatype", "missing output"])
def test_a_family_that_breaks_its_promises_is_500_and_its_instance_comes_back(mode: str) -> None:
    client = app_for_affine(request_timeout_s=1).test_client()
    refused(infer(client, parameters={"fail": mode}), 500, "the model failed on this request")
    assert infer(client).status_code == 200


def test_a_request_whose_time_is_over_never_reaches_the_model() -> None:
    app = app_for_affine(request_timeout_s=0.05)
    client = app.test_client()
    refused(infer(client, parameters={"timeout": 1, "fail": "raise"}), 504, "timeout")
    with app.config["SERVED"].pool.lease(timeout_s=1):
        refused(infer(client, parameters={"timeout": 10_000}), 504, "timeout")
        late = infer(client, parameters={"timeout": 10_000_000})
        refused(late, 503)
        assert late.headers["Retry-After"] == "1"
    for timeout in (0, 10_000_000, 10**400):
        assert infer(client, parameters={"timeout": timeout, "priority": 3}).status_code == 200


def test_statistics_count_what_went_well_and_what_did_not() -> None:
    client = app_for_affine().test_client()
    for fields in ({}, {}, {"id": 1}):
        infer(client, **fields)
    (row,) = client.get("/v2/models/affine/stats").json["model_stats"]
    assert (row["name"], row["version"], row["inference_count"], row["execution_count"]) == (
        "affine",
        "1",
        2,
        2,
    )
    counts = {kind: entry["count"] for kind, entry in row["inference_stats"].items()}
    assert counts == {"success": 2, "fail": 1, "queue": 2, "compute_input": 2, "compute_infer": 2,
                      "compute_output": 2, "cache_hit": 0, "cache_miss": 0}  # fmt: skip
    parts = sum(row["inference_stats"][part]["ns"] for part in ("queue", "compute_infer"))
    assert 0 < parts < row["inference_stats"]["success"]["ns"]
    assert client.get("/v2/models/stats").json["model_stats"] == [row]


def test_the_repository_is_listed_and_not_changed(client: FlaskClient) -> None:
    for body in (b"", b"{}", b'{"ready":true}'):
        answer = client.post("/v2/repository/index", data=body)
        assert answer.json == [{"name": "affine", "version": "1", "state": "READY", "reason": ""}]
    refused(client.post("/v2/repository/index", data=b'{"ready":1}'), 400)
    for action in ("load", "unload"):
        refused(client.post(f"/v2/repository/models/affine/{action}", data=b"{}"), 501)
        refused(client.post(f"/v2/repository/models/other/{action}", data=b"{}"), 404)
    refused(client.get(INFER), 405)


def test_speech_is_offered_as_tensors(tone: FlaskClient) -> None:
    slow = speak(
        tone, text=("BYTES", "hello"), voice=("BYTES", "soft"), speed=("FP32", 0.5), seed=("INT64", 7)
    )
    audio, rate = slow.json["outputs"]
    assert (audio["name"], audio["shape"], rate["data"]) == ("audio", [4800], [24000])
    assert max(audio["data"]) == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ({"text": ("BYTES", "")}, "text"),
        ({"voice": ("BYTES", "nobody")}, "voice"),
        ({"speed": ("FP32", 0.2)}, "speed"),
        ({"speed": ("FP32", 4.1)}, "speed"),
        ({"seed": ("INT64", -1)}, "seed"),
        ({"text": ("BYTES", "x" * 4097)}, "text"),
    ],
)
def test_speech_has_the_limits_of_the_speech_route(tone: FlaskClient, inputs: Any, field: str) -> None:
    refused(speak(tone, **{"text": ("BYTES", "hello"), **inputs}), 400, f"{field}: ")


def test_speech_refuses_what_only_binary_can_carry(tone: FlaskClient) -> None:
    headers = {"Inference-Header-Content-Length": "0"}
    refused(tone.post("/v2/models/tone/infer", data=b"\xff", headers=headers), 400, "text: not UTF-8")


def test_a_family_without_tensors_is_not_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_for_affine()
    monkeypatch.setattr(app.config["SERVED"].family, "inputs", ())
    refused(infer(app.test_client()), 404, "takes no tensors")
