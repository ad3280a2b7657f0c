"""Requests of many clients share passes, and each client gets what it would have got alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.service import Server, eventually
from tests.minilm import built, publish_minilm


def test_clients_of_one_worker_share_passes_and_get_their_own_answers(
    launch: Callable[..., Server], tmp_path: Path
) -> None:
    publish_minilm(tmp_path / "models")
    server = launch(tmp_path / "models", workers=1).wait_ready()
    texts = [f"Number {n} " + "counts, " * (n % 20) for n in range(96)]
    texts[40] = "word " * 600  # more than the model takes: it fails, and nobody else

    def ask(text: str) -> np.ndarray | None:
        body = {"model": "minilm", "input": text}
        with server.client() as client:
            answer = client.post("/v1/embeddings", json=body)
        if answer.status_code == 400:
            return None
        answer.raise_for_status()
        return np.array(answer.json()["data"][0]["embedding"])

    with ThreadPoolExecutor(24) as clients:
        given = list(clients.map(ask, texts))
    assert [n for n, vector in enumerate(given) if vector is None] == [40]
    family, instance = built()
    good = [text for n, text in enumerate(texts) if n != 40]
    with instance.computing():
        raw = np.array([text.encode() for text in good], object)
        expected = np.asarray(family.infer(instance, {"text": raw}, {})["embedding"])
    assert np.abs(np.array([v for v in given if v is not None]) - expected).max() < 1e-5

    sizes = [int(line.split(" batch_size=")[1].split()[0]) for line in server.logged("request_served")
             if " batch_size=" in line]  # fmt: skip
    assert len(sizes) == 95
    assert 1 < max(sizes) <= 8, "with 24 clients of one worker some have to share a pass"
    with server.admin() as admin:
        metrics = admin.get("/metrics").text
    assert 'warmserve_batch_size_count{model="minilm"} 95.0' in metrics
    with server.client() as client:
        row = client.get("/v2/models/minilm/stats").json()["model_stats"][0]
    assert row["inference_count"] == 0, "that route was not asked"


def test_a_worker_gathers_only_what_no_idle_worker_takes(
    launch: Callable[..., Server], tmp_path: Path
) -> None:
    publish_minilm(tmp_path / "models")
    server = launch(tmp_path / "models", workers=2).wait_ready()

    def ask(text: str | list[str]) -> None:
        with server.client() as client:
            client.post("/v1/embeddings", json={"model": "minilm", "input": text}).raise_for_status()

    with ThreadPoolExecutor(1) as clients:
        long = clients.submit(ask, ["word " * 200] * 60)  # seconds
        (busy,) = eventually(lambda: [w for w in server.workers() if w["in_flight"]], what="a busy worker")
        answered = 0
        while answered < 20 and not long.done():
            ask("short")
            answered += 1
        served = {w["pid"]: w["served"] for w in server.workers()}
    assert answered == 20, "none of them waited for the long one"
    assert served[busy["pid"]] == 0
