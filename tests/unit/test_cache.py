"""Finished responses given again: to whom, what never, and a store that fails."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flask import Flask
from flask.testing import FlaskClient

from server.api.cache_store import open_store
from server.settings import Settings, SettingsError
from tests.minilm import built
from tests.unit.served import app_for, app_for_tone, end_threads

SIZE = 4 << 20
SPEECH = {"model": "tone", "input": "hello", "voice": "sine", "response_format": "pcm", "seed": 1}


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    end_threads()


@pytest.fixture
def app(tmp_path: Path) -> Flask:
    return app_for_tone(cache_bytes=SIZE, run_dir=tmp_path)


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


def speak(client: FlaskClient, **fields: Any) -> tuple[str | None, bytes]:
    with client.post("/v1/audio/speech", json=SPEECH | fields) as answer:
        assert answer.status_code == 200, answer.text
        return answer.headers.get("X-Cache"), answer.data


@pytest.mark.parametrize("text", ["hello", "pieces:3:0.02"])
@pytest.mark.parametrize("how", [{}, {"response_format": "mp3"}, {"stream_format": "sse"}])
def test_the_same_request_gets_the_same_bytes(client: FlaskClient, text: str, how: dict[str, str]) -> None:
    first = speak(client, input=text, **how)
    again = speak(client, input=text, **how)
    assert (first[0], again[0]) == ("MISS", "HIT")
    assert first[1] == again[1] and first[1]


def test_a_hit_has_the_type_of_its_response_and_an_id_of_its_own(client: FlaskClient) -> None:
    first, again = (
        client.post("/v1/audio/speech", json=SPEECH | {"response_format": "mp3"}) for _ in range(2)
    )
    assert first.mimetype == again.mimetype == "audio/mpeg"
    assert first.headers["X-Request-ID"] != again.headers["X-Request-ID"]
    assert again.headers["X-Model-Version"] == "v1"
    first.close()


@pytest.mark.parametrize(
    "other",
    [{"seed": 2}, {"input": "hello "}, {"speed": 1.5}, {"response_format": "wav"}, {"stream_format": "sse"},
     {"language": "en"}, {"instructions": "softly"}],
)  # fmt: skip
def test_every_parameter_counts(client: FlaskClient, other: dict[str, Any]) -> None:
    speak(client)
    assert speak(client, **other)[0] == "MISS"


def test_what_need_not_be_the_same_is_not_kept(client: FlaskClient) -> None:
    without = {name: value for name, value in SPEECH.items() if name != "seed"}
    for _ in range(2):
        with client.post("/v1/audio/speech", json=without) as answer:
            assert answer.headers["X-Cache"] == "BYPASS"


def test_a_deterministic_family_needs_no_seed(tmp_path: Path) -> None:
    family, instance = built()
    client = app_for("minilm", family, instance.module, cache_bytes=SIZE, run_dir=tmp_path).test_client()
    body = {"model": "minilm", "input": ["one", "two"], "encoding_format": "float"}
    first, again = (client.post("/v1/embeddings", json=body) for _ in range(2))
    assert [a.headers["X-Cache"] for a in (first, again)] == ["MISS", "HIT"]
    assert first.json == again.json
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["one"]}
    asked = {"inputs": [tensor], "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}]}
    packed, same = (client.post("/v2/models/minilm/infer", json=asked) for _ in range(2))
    assert [a.headers["X-Cache"] for a in (packed, same)] == ["MISS", "HIT"]
    assert packed.data == same.data
    length = int(same.headers["Inference-Header-Content-Length"])
    vector = np.frombuffer(same.data[length:], "<f4")
    assert np.allclose(vector, first.json["data"][0]["embedding"], atol=1e-6)  # type: ignore[index]
    (stats,) = client.get("/v2/models/minilm/stats").json["model_stats"]  # type: ignore[index]
    counts = {kind: row["count"] for kind, row in stats["inference_stats"].items()}
    assert (counts["success"], counts["cache_hit"], counts["cache_miss"]) == (2, 1, 1)
    assert stats["execution_count"] == 1


def test_errors_are_not_kept(client: FlaskClient) -> None:
    for _ in range(2):
        answer = client.post("/v1/audio/speech", json=SPEECH | {"input": "raise!"})
        assert answer.status_code == 500 and "X-Cache" not in answer.headers


def test_half_a_response_is_not_kept(client: FlaskClient) -> None:
    asked = SPEECH | {"input": "pieces:3:0.05"}
    left = client.post("/v1/audio/speech", json=asked, buffered=False)
    next(iter(left.response))
    left.close()
    assert speak(client, input="pieces:3:0.05")[0] == "MISS"


def test_another_version_of_the_same_name_is_another_answer(tmp_path: Path) -> None:
    clients = []
    for digest in ("a", "b"):
        app = app_for_tone(cache_bytes=SIZE, run_dir=tmp_path, manifest_sha256=digest)
        clients.append(app.test_client())
    assert [speak(client)[0] for client in clients] == ["MISS", "MISS"]
    assert [speak(client)[0] for client in clients] == ["HIT", "HIT"]


def test_the_store_keeps_to_its_size(tmp_path: Path) -> None:
    store = open_store(tmp_path, size_bytes=1 << 20, busy_s=1)
    for number in range(300):
        store.set(number.to_bytes(4, "little"), bytes(60_000) if number % 2 else bytes(900))
        assert store.get((0).to_bytes(4, "little")) is not None or number > 30
        assert store.volume_bytes < (1 << 20) + 200_000
    assert store.get((299).to_bytes(4, "little")) is not None


def test_a_response_too_large_for_it_is_not_kept(client: FlaskClient) -> None:
    long = "pieces:100:0.0001"  # 480 kB, over a sixteenth of the store
    assert [speak(client, input=long)[0] for _ in range(2)] == ["MISS", "MISS"]


def test_a_store_that_fails_costs_nobody_an_answer(
    app: Flask, client: FlaskClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    speak(client)
    with sqlite3.connect(tmp_path / "cache" / "cache.db") as database:
        database.execute("DROP TABLE Cache")
    assert speak(client)[1]
    assert speak(client)[0] is None, "this worker does without it from now on"
    assert [getattr(entry, "event", "") for entry in caplog.records].count("cache_unavailable") == 1


def test_nothing_in_the_store_is_ever_unpickled(app: Flask, client: FlaskClient, tmp_path: Path) -> None:
    speak(client)
    bomb = tmp_path / "exploded"
    pickled = b"cpathlib\nPath.touch\n(cpathlib\nPath\n(V" + str(bomb).encode() + b"\ntRtR."
    with sqlite3.connect(tmp_path / "cache" / "cache.db") as database:
        database.execute("UPDATE Cache SET mode = 4, filename = NULL, value = ?", (pickled,))
    assert speak(client)[1]
    assert not bomb.exists()


def test_a_cache_too_small_to_be_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMSERVE_CACHE_BYTES", "1000")
    with pytest.raises(SettingsError, match="0 or at least"):
        Settings.load()
    assert json.dumps(Settings(cache_bytes=0).cache_bytes) == "0"
