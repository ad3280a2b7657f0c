"""Embeddings as OpenAI's and NVIDIA's own clients ask for them, against real gunicorn: one server for all."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import tritonclient.http as triton

from benchmarks.service import Server
from tests.minilm import built, publish_minilm

TEXTS = ["Zero copies are better than one.", "Nobody waits.", "word " * 100]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("embeddings")
    publish_minilm(root / "models")
    server = Server(root / "models", root / "run")
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def expected() -> np.ndarray[Any, Any]:
    family, instance = built()
    texts = np.array([text.encode() for text in TEXTS], object)
    with torch.inference_mode():
        return np.asarray(family.infer(instance, {"text": texts}, {})["embedding"])


@pytest.mark.parametrize("encoding", [openai.omit, "float", "base64"])
def test_the_openai_client_gets_vectors(server: Server, encoding: Any) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any") as client:
        answer = client.embeddings.create(model="minilm", input=TEXTS, encoding_format=encoding)
    rows = [row.embedding for row in answer.data]
    if encoding == "base64":  # asked for in so many words, the client hands it on as it came
        rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
    assert np.abs(np.array(rows) - expected()).max() < 1e-6
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 100


def test_a_text_longer_than_the_model_takes_is_the_clients_mistake(server: Server) -> None:
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as error,
    ):
        client.embeddings.create(model="minilm", input=["fine", "word " * 600])
    assert error.value.param == "input" and "number 1" in str(error.value)


def test_the_triton_client_gets_vectors(server: Server) -> None:
    texts = triton.InferInput("text", [len(TEXTS)], "BYTES")
    texts.set_data_from_numpy(np.array([text.encode() for text in TEXTS], object))
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        answer = client.infer("minilm", [texts])
    assert np.abs(answer.as_numpy("embedding") - expected()).max() < 1e-6


def test_reading_the_tokenizer_starts_no_thread_in_the_master(server: Server) -> None:
    assert server.logged("worker_ready")
    assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) == 1
