"""The Open Inference Protocol as NVIDIA's own client speaks it, against real gunicorn: one server for all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from benchmarks.service import Server
from weights.store import Store
from weights.writing import write_version

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("inference")
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch) / "version"
        tensors = {"model.safetensors": {"factor": torch.full((1,), 2.0)}}
        write_version(staged, tensors, name="affine", family="affine", config={})
        Store(root / "models").publish(staged)
    server = Server(root / "models", root / "run")
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=4) as client:
        yield client


def tensor(name: str, datatype: str, array: Any, *, binary: bool = True) -> triton.InferInput:
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def matrix(*, binary: bool = True) -> triton.InferInput:
    return tensor("matrix", "FP32", MATRIX, binary=binary)


def test_it_finds_the_server_and_its_model(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("affine") and client.is_model_ready("affine", "1")
    assert not client.is_model_ready("affine", "2")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    model = client.get_model_metadata("affine")
    assert model["inputs"][0] == {"name": "matrix", "datatype": "FP32", "shape": [-1, 3]}
    assert [row["state"] for row in client.get_model_repository_index()] == ["READY"]


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("returned", [True, False])
def test_numbers_go_both_ways_in_both_forms(client: Any, sent: bool, returned: bool) -> None:
    outputs = [triton.InferRequestedOutput("scaled", binary_data=returned)]
    answer = client.infer("affine", [matrix(binary=sent)], outputs=outputs, request_id="mine")
    assert np.array_equal(answer.as_numpy("scaled"), MATRIX * 2)
    assert answer.get_response()["id"] == "mine"


@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("BYTES", np.array([["naïve".encode(), b"\xff\0"]], np.object_)),
        ("FP16", np.array([[0.5, np.inf, 65504]], np.float16)),
        ("BF16", np.array([[0.5, 3e38]], ml_dtypes.bfloat16)),
        ("BOOL", np.array([[True], [False]])),
        ("UINT64", np.array([[2**64 - 1]], np.uint64)),
        ("INT8", np.empty((0, 4), np.int8)),
    ],
)
def test_each_datatype_comes_back(client: Any, datatype: str, array: Any) -> None:
    """All outputs, as the client asks for when none is named: in binary."""
    answer = client.infer("affine", [matrix(), tensor(f"in_{datatype}", datatype, array)])
    back = answer.as_numpy(f"out_{datatype}")
    if datatype == "BYTES":
        array = np.array([[item.upper() for item in array.ravel()]], np.object_)
    assert np.array_equal(np.asarray(back, array.dtype), array)
    assert back.shape == array.shape


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_it_may_pack_its_requests(client: Any, coding: str) -> None:
    big = np.ones((50_000, 3), np.float32)
    answer = client.infer("affine", [tensor("matrix", "FP32", big)], request_compression_algorithm=coding,
                          response_compression_algorithm=coding)  # fmt: skip
    assert np.array_equal(answer.as_numpy("scaled"), big * 2)
    bomb = np.zeros((500_000, 3), np.float32)
    with pytest.raises(InferenceServerException, match="over the limit"):
        client.infer("affine", [tensor("matrix", "FP32", bomb)], request_compression_algorithm=coding)


def test_several_requests_may_be_under_way(client: Any) -> None:
    pending = [client.async_infer("affine", [matrix()]) for _ in range(8)]
    for request in pending:
        assert np.array_equal(request.get_result().as_numpy("scaled"), MATRIX * 2)


def test_time_limits_priorities_and_statistics_are_understood(client: Any) -> None:
    outputs = [triton.InferRequestedOutput("scaled")]
    client.infer("affine", [matrix()], outputs=outputs, priority=1, timeout=5_000_000, model_version="1")
    with pytest.raises(InferenceServerException) as caught:
        client.infer("affine", [matrix()], timeout=1)
    assert caught.value.status() == "504"
    (row,) = client.get_inference_statistics("affine")["model_stats"]
    assert row["inference_stats"]["success"]["count"] == row["inference_count"]


def test_it_understands_the_errors(client: Any) -> None:
    def status(call: Any) -> tuple[str, str]:
        with pytest.raises(InferenceServerException) as caught:
            call()
        return caught.value.status(), caught.value.message()

    assert status(lambda: client.get_model_metadata("other"))[0] == "404"
    assert status(lambda: client.infer("affine", [tensor("matrix", "FP32", MATRIX.T)])) == (
        "400", "matrix: the shape [3, 2] does not match [-1, 3]"
    )  # fmt: skip
    assert status(lambda: client.infer("affine", [matrix()], sequence_id=1))[0] == "501"
    assert status(lambda: client.load_model("affine"))[0] == "501"
    assert status(lambda: client.infer("affine", [matrix()], parameters={"fail": "raise"})) == (
        "500", "the model failed on this request"
    )  # fmt: skip
