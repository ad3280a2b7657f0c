"""Several models behind one address: each is asked by its name, and nothing of one is another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flask import Flask
from flask.testing import FlaskClient
from openapi_spec_validator import validate

from server.api.exchange import Served
from server.app import create_app
from server.families.base import Family, Instance
from server.pool import InstancePool
from server.settings import Settings
from tests.apps.affine.affine import Affine, Scale
from tests.apps.tone.tone import Oscillator, Tone
from tests.minilm import built

SPEECH = {"model": "tone", "input": "hello", "voice": "sine", "response_format": "pcm"}
MATRIX = {"name": "matrix", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
SCALED = {"inputs": [MATRIX], "outputs": [{"name": "scaled"}]}


def served(name: str, version: str, family: Family, module: torch.nn.Module) -> Served:
    instance = Instance(module=module, device=torch.device("cpu"), number=0)
    pool = InstancePool([instance], version=version)
    return Served(name=name, version=version, family=family, pool=pool, created=1)


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def app(seen: list[Any]) -> Iterator[Flask]:
    tone, scale = Oscillator(16, 0), Scale()
    tone.gain = torch.nn.Parameter(torch.full((16,), 0.5), requires_grad=False)
    scale.factor = torch.nn.Parameter(torch.full((1,), 2.0), requires_grad=False)
    family, instance = built()
    models = [
        served("tone", "v3", Tone(Path(), {}), tone),
        served("affine", "v1", Affine(Path(), {}), scale),
        served("minilm", "v12", family, instance.module),
    ]
    yield create_app(Settings(), models, seen.append)
    for model in models:
        model.threads.shutdown()


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


def test_each_is_asked_by_its_name(client: FlaskClient, seen: list[Any]) -> None:
    answers = [
        client.post("/v1/audio/speech", json=SPEECH),
        client.post("/v2/models/affine/infer", json=SCALED),
        client.post("/v1/embeddings", json={"model": "minilm", "input": "hello"}),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert [answer.headers["X-Model-Version"] for answer in answers] == ["v3", "v1", "v12"]
    for answer in answers:
        answer.close()
    told = sorted((event["model"], event["version"]) for event in seen)
    assert told == [("affine", "v1"), ("minilm", "v12"), ("tone", "v3")]


def test_all_are_listed_in_the_order_of_their_names(client: FlaskClient) -> None:
    names = ["affine", "minilm", "tone"]
    assert [row["id"] for row in client.get("/v1/models").json["data"]] == names  # type: ignore[index]
    assert client.get("/v2/models").json == {"models": names}
    index = client.post("/v2/repository/index").json
    assert [(row["name"], row["version"]) for row in index] == [  # type: ignore[union-attr]
        ("affine", "1"), ("minilm", "12"), ("tone", "3")]  # fmt: skip
    assert [row["name"] for row in client.get("/v2/models/stats").json["model_stats"]] == names  # type: ignore[index]
    assert client.get("/v2/models/minilm/versions/12").json["name"] == "minilm"  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/audio/speech", {**SPEECH, "model": "minilm"}),
        ("/v1/audio/speech", {**SPEECH, "model": "other"}),
        ("/v1/embeddings", {"model": "tone", "input": "hello"}),
        ("/v2/models/other/infer", SCALED),
        ("/v2/models/affine/versions/3/infer", SCALED),
    ],
)
def test_what_a_model_does_not_do_is_404_and_names_it(client: FlaskClient, path: str, body: Any) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 404
    asked = "affine" if "affine" in path else body.get("model", "other")
    assert asked in answer.text


def test_a_request_that_names_no_model_has_no_version(client: FlaskClient, seen: list[Any]) -> None:
    answer = client.get("/v1/models")
    assert "X-Model-Version" not in answer.headers
    answer.close()
    assert "model" not in seen[0]


def test_statistics_are_each_models_own(client: FlaskClient) -> None:
    client.post("/v2/models/affine/infer", json=SCALED)
    rows = client.get("/v2/models/stats").json["model_stats"]  # type: ignore[index]
    assert {row["name"]: row["inference_count"] for row in rows} == {"affine": 1, "minilm": 0, "tone": 0}


def test_a_busy_model_makes_no_other_wait(app: Flask, client: FlaskClient) -> None:
    """Each has a pool of its own."""
    body = {**SPEECH, "input": "pieces:2:0.2"}
    speaking = client.post("/v1/audio/speech", json=body)
    assert client.post("/v2/models/affine/infer", json=SCALED).status_code == 200
    assert speaking.data


def test_the_voices_are_those_of_the_model_that_speaks(client: FlaskClient) -> None:
    voices = client.get("/v1/audio/voices").json
    assert voices == client.get("/v1/audio/voices?model=tone").json and voices["voices"]  # type: ignore[index]
    assert client.get("/v1/audio/voices?model=minilm").status_code == 404


def test_all_are_described(client: FlaskClient) -> None:
    document = client.get("/openapi.json").json
    validate(document)
    assert document["info"]["title"] == "warmserve: affine, minilm, tone"  # type: ignore[index]
    assert client.get("/docs").status_code == 200
