"""Clients of other makers, unmodified: npm's openai and KServe's InferenceRESTClient."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

from benchmarks.service import Server
from tests.minilm import publish_minilm
from weights.store import Store
from weights.writing import write_version

Launch = Callable[..., Server]
NODE_MODULES = Path(sys.prefix) / "node" / "node_modules"  # where make installs it
SCRIPT = Path(__file__).with_name("openai_client.cjs")


def node(server: Server, *arguments: str) -> Any:
    done = subprocess.run(
        ["node", str(SCRIPT), f"{server.url}/v1", *arguments],
        env={**os.environ, "NODE_PATH": str(NODE_MODULES)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_npms_openai_speaks_and_understands_the_errors(launch: Launch, models: Path) -> None:
    found = node(launch(models).wait_ready())
    assert found["type"] == "audio/pcm" and found["whole"] > 0
    assert found["streamed"] == 3 * 2 * 2400
    assert found["models"] == ["tone"]
    assert found["refused"] == ["BadRequestError", 400, "speed", "invalid_field"]
    assert found["unknown"] == ["NotFoundError", 404, "model_not_found"]
    assert found["requestId"] == "string"


def test_npms_openai_embeds(launch: Launch, tmp_path: Path) -> None:
    publish_minilm(tmp_path / "models")
    found = node(launch(tmp_path / "models", workers=1).wait_ready(), "embed")
    assert found == {"lengths": [384, 384], "tokens": 7}


@pytest.mark.parametrize("binary", [False, True])
def test_kserves_client_infers_and_understands_the_errors(
    launch: Launch, tmp_path: Path, binary: bool
) -> None:
    staged = tmp_path / "staged"
    tensors = {"model.safetensors": {"factor": torch.full((1,), 2.0)}}
    write_version(staged, tensors, name="affine", family="affine", config={})
    Store(tmp_path / "models").publish(staged)
    server = launch(tmp_path / "models", workers=1).wait_ready()
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)

    async def ask() -> Any:
        client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
        assert await client.is_server_live(server.url) and await client.is_server_ready(server.url)
        assert await client.is_model_ready(server.url, "affine")
        given = InferInput("matrix", [2, 3], "FP32")
        given.set_data_from_numpy(matrix, binary_data=binary)
        wanted = InferRequest(
            "affine",
            [given],
            request_id="mine",
            request_outputs=[RequestedOutput("scaled", {"binary_data": binary})],
        )
        answer = await client.infer(server.url, wanted, model_name="affine")
        with pytest.raises(httpx.HTTPStatusError, match="does not exist"):
            await client.infer(server.url, wanted, model_name="other")
        await client.close()
        return answer

    answer = asyncio.run(ask())
    assert answer.id == "mine" and answer.model_name == "affine"
    assert np.array_equal(answer.outputs[0].as_numpy(), matrix * 2)
