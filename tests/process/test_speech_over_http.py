"""The main job, end to end: import the embedded default, serve it, and hear what clients asked for."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest

from benchmarks.service import ROOT, Server
from tests.speech import overlap, words_heard
from weights.residency import residency

RATE = 24000
FORMATS = ("mp3", "opus", "aac", "flac", "wav")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The service as `make serve` starts it: the imported default, two workers."""
    base = tmp_path_factory.mktemp("speech")
    env = {**os.environ, "WARMSERVE_MODELS": str(base / "models")}
    command = [str(Path(sys.executable).with_name("warmserve")), "import", "hibari"]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "v1\n"), done.stderr
    started = Server(base / "models", base / "run")
    try:
        yield started.wait_ready()
    finally:
        started.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    """The official client, as its users configure it."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="not-needed")


def decoded(payload: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    with av.open(io.BytesIO(payload)) as container:
        convert = av.AudioResampler(format="flt", layout="mono", rate=RATE)
        frames = [
            f.to_ndarray().reshape(-1) for frame in container.decode(audio=0) for f in convert.resample(frame)
        ]
        frames += [f.to_ndarray().reshape(-1) for f in convert.resample(None)]
    joined: np.ndarray[Any, np.dtype[np.float32]] = np.concatenate(frames).astype(np.float32)
    return joined


@pytest.mark.speech
@pytest.mark.parametrize("name", FORMATS)
def test_the_official_client_gets_speech_that_says_the_text(client: openai.OpenAI, name: Any) -> None:
    text = "Doctor Brown paid twelve dollars for the old red bicycle."
    answer = client.audio.speech.create(model="hibari", voice="heart", input=text, response_format=name)
    assert overlap(text, words_heard(decoded(answer.content), RATE)) >= 0.8


@pytest.mark.speech
def test_pcm_is_24_khz_16_bit_mono(client: openai.OpenAI) -> None:
    text = "The weather is nice and the sky is blue."
    answer = client.audio.speech.create(model="hibari", voice="heart", input=text, response_format="pcm")
    samples = np.frombuffer(answer.content, "<i2").astype(np.float32) / 32768
    assert overlap(text, words_heard(samples, RATE)) >= 0.8


@pytest.mark.speech
def test_long_text_is_spoken_to_its_end(client: openai.OpenAI) -> None:
    sentences = [
        "My brother lives in a small house near the river.",
        "Every morning he walks to the market and buys fresh bread.",
        "In the evening his neighbors come over to play cards.",
        "They talk about the weather, the news and their children.",
    ]
    text = " ".join(sentences)
    answer = client.audio.speech.create(model="hibari", voice="heart", input=text, response_format="wav")
    assert overlap(text, words_heard(decoded(answer.content), RATE)) >= 0.8


def test_the_same_seed_gives_the_same_bytes_from_any_worker(server: Server) -> None:
    body = {"model": "hibari", "voice": "heart", "input": "Same words, same sound.", "response_format": "pcm"}
    with server.client() as client:
        answers = {client.post("/v1/audio/speech", json={**body, "seed": 5}).content for _ in range(8)}
        other = client.post("/v1/audio/speech", json={**body, "seed": 6}).content
    assert len(answers) == 1
    assert other not in answers


def test_the_official_client_raises_what_its_users_catch(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.audio.speech.create(model="nobody", voice="heart", input="Hello.")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.audio.speech.create(model="hibari", voice="nobody", input="Hello.")
    assert bad.value.param == "voice"
    with pytest.raises(openai.BadRequestError):
        client.audio.speech.create(model="hibari", voice="heart", input="")
    assert [model.id for model in client.models.list()] == ["hibari"]
    assert client.models.retrieve("hibari").id == "hibari"


def test_text_with_nothing_to_say_is_a_bad_request(server: Server) -> None:
    with server.client() as client:
        answer = client.post("/v1/audio/speech", json={"model": "hibari", "voice": "heart", "input": "   "})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_serving_imports_neither_onnx_nor_onnxruntime(server: Server) -> None:
    for worker in server.workers():
        maps = Path(f"/proc/{worker['pid']}/maps").read_text()
        assert "onnx" not in maps


def test_no_weight_page_is_private_after_real_speech(server: Server) -> None:
    """One copy, on the real model: the summed share of all processes is the file."""
    files = list((server.models / "v1").glob("*.safetensors"))
    pids = [server.pid, *(worker["pid"] for worker in server.workers())]
    usages = [usage for pid in pids for usage in residency(files, pid).values()]
    assert sum(usage.anonymous_bytes for usage in usages) == 0
    assert 0 < sum(usage.pss_bytes for usage in usages) <= 1.05 * sum(file.stat().st_size for file in files)


def test_plain_gunicorn_with_its_own_flags(server: Server, tmp_path: Path) -> None:
    """`gunicorn -w 1 -b ...` on the command line counts more than the settings."""
    run_dir = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    other = Server(server.models, run_dir, workers=4, args=("-w", "1", "-b", f"127.0.0.1:{port}"))
    try:
        other.wait_ready()
        assert len(other.workers()) == 1
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200
    finally:
        other.stop()
