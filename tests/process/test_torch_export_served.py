"""An exported program served without a class of its own: imported, asked by NVIDIA's client, replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from benchmarks.service import Server, eventually, warmserve
from scripts.cli import main
from tests.programs import FEATURES, classifier, inputs, save_classifier


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WARMSERVE_MODELS", str(tmp_path / "models"))
    assert main(["import", "torch-export", str(save_classifier(tmp_path / "classifier.pt2"))]) == 0
    return tmp_path / "models"


def ask(client: Any, x: torch.Tensor, kind: torch.Tensor) -> Any:
    given = [
        triton.InferInput("x", list(x.shape), "FP32"),
        triton.InferInput("kind", list(kind.shape), "INT64"),
    ]
    for one, value in zip(given, (x, kind), strict=True):
        one.set_data_from_numpy(value.numpy())
    return client.infer("classifier", given)


def test_a_program_is_served_and_replaced_without_a_class(
    launch: Callable[..., Server], models: Path, tmp_path: Path
) -> None:
    server = launch(models).wait_ready()
    assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) == 1  # the master read it, with no thread
    x, kind = inputs(5)
    with torch.inference_mode():
        expected = classifier()(x, kind)
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        metadata = client.get_model_metadata("classifier")
        assert [row["shape"] for row in metadata["inputs"]] == [[-1, FEATURES], [-1]]
        answer = ask(client, x, kind)
        assert np.allclose(answer.as_numpy("logits"), expected["logits"], atol=1e-6)
        assert answer.as_numpy("best").tolist() == expected["best"].tolist()
        with pytest.raises(InferenceServerException, match="0 to 16"):
            ask(client, *inputs(17))

        larger = save_classifier(tmp_path / "classifier.pt2", most=32)
        assert warmserve(server, "import", "torch-export", str(larger)).returncode == 0
        assert warmserve(server, "reload", "--wait").returncode == 0
        assert ask(client, *inputs(17)).as_numpy("best").shape == (17,)
    assert len(server.workers()) == 2 and not server.logged("worker_died")


def test_a_program_that_holds_a_pickle_is_refused_and_changes_nothing(
    launch: Callable[..., Server], models: Path
) -> None:
    from weights.store import Store
    from weights.writing import write_version

    server = launch(models).wait_ready()
    good = Store(models).versions()[0].path
    staged = models.parent / "staged"
    write_version(
        staged, {"model.safetensors": {"w": torch.ones(1)}}, name="classifier", family="torch_export",
        config={"inputs": [], "outputs": []}, assets={"program.pt2": models.parent / "classifier.pt2"},
    )  # fmt: skip  # as torch saves it, with example inputs, a pickle
    Store(models).publish(staged)
    assert warmserve(server, "reload", "--wait").returncode == 3
    refused = eventually(lambda: server.logged("swap_finished")[1:], what="the refusal")
    assert "program_refused" in refused[0]
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        assert ask(client, *inputs(2)).as_numpy("best").shape == (2,)
    assert good.exists()
