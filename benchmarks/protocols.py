"""What protocols, batches and refusals cost and buy, each against the plain way in the same run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks import serving
from benchmarks.hammer import Shot, Target, by_the_clock, closed
from benchmarks.mlp import FEATURES, create_mlp, export_mlp
from benchmarks.report import Figure, median, percentile
from benchmarks.service import GUNICORN, ROOT, Server, eventually

SECONDS = 3.0
JSON = {"Content-Type": "application/json"}
SENTENCES = " ".join(f"This is sentence number {n} of a text that is read aloud." for n in range(1, 11))
BUSY_MS = 50
OVERLOAD = 3


def tiny_model(scratch: Path) -> list[Figure]:
    """A tiny network by the Open Inference Protocol, against a bare Flask route on the same gunicorn."""
    module = create_mlp()
    file, weights = scratch / "mlp.pt2", scratch / "mlp.pt"
    torch.export.save(export_mlp(module), file)
    torch.save(module.state_dict(), weights)
    models = scratch / "mlp"
    environment = {**os.environ, "WARMSERVE_MODELS": str(models)}
    subprocess.run(
        [str(GUNICORN.with_name("warmserve")), "import", "torch-export", "--batch", str(file)],
        env=environment, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    server = Server(models, scratch / "mlp-run", workers=2).wait_ready()
    found = {name: _sweep(target) for name, target in _inference(server.port).items()}
    server.stop()
    bare, port = _start_bare(weights)
    rows = json.dumps({"x": _rows().tolist()}).encode()
    found["bare Flask route"] = _sweep(Target(port, "/predict", rows, JSON))
    bare.terminate()
    bare.wait(30)
    figures = []
    for clients in (1, 8, 32):
        base = len(_good(found["bare Flask route"][clients]))
        for name, shots in found.items():
            good = _good(shots[clients])
            times = [shot.whole_s * 1000 for shot in good]
            rate = f"{len(good) / SECONDS:.0f} requests/s"
            value = f"{rate}, {median(times):.1f} ms, {percentile(times, 0.99):.1f} ms"
            ratio = "" if name.startswith("bare") else f" ({len(good) / base:.2f} of the bare route)"
            figures.append(Figure(f"tiny network, {clients} clients, {name}: rate, p50, p99", value + ratio))
    return figures


def _sweep(target: Target) -> dict[int, list[Shot]]:
    closed(target, clients=8, seconds=1)
    return {clients: closed(target, clients=clients, seconds=SECONDS) for clients in (1, 8, 32)}


def _good(shots: list[Shot]) -> list[Shot]:
    good = [shot for shot in shots if shot.status == 200]
    assert len(good) == len(shots), "some requests failed"
    return good


def _rows() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(0).random((1, FEATURES), np.float32)


def _inference(port: int) -> dict[str, Target]:
    path = "/v2/models/mlp/infer"
    tensor = {"name": "input", "shape": [1, FEATURES], "datatype": "FP32"}
    head = {"inputs": [{**tensor, "data": _rows().ravel().tolist()}]}
    raw = _rows().tobytes()
    binary = {**tensor, "parameters": {"binary_data_size": len(raw)}}
    front = json.dumps({"inputs": [binary], "parameters": {"binary_data_output": True}}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(front)),
    }
    return {
        "JSON": Target(port, path, json.dumps(head).encode(), JSON),
        "binary": Target(port, path, front + raw, headers),
    }


def _start_bare(weights: Path) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    process = subprocess.Popen(
        [str(GUNICORN), "--config", "python:benchmarks.bare_settings", "--bind", f"127.0.0.1:{port}",
         "benchmarks.bare:app"],
        cwd=ROOT, env={**os.environ, "BARE_WEIGHTS": str(weights)},
    )  # fmt: skip
    probe = Target(port, "/predict", json.dumps({"x": _rows().tolist()}).encode(), JSON)
    eventually(lambda: probe.ask().status == 200, within_s=60)
    time.sleep(3)  # the other worker loads too
    return process, port


def batching(models: Path, scratch: Path) -> list[Figure]:
    """Sentence embeddings with 16 clients and one worker, one by one and in passes of up to eight."""
    body = json.dumps({"model": "minilm", "input": "The quick brown fox jumps over the lazy dog."}).encode()
    rates = {}
    for limit in (1, 8):
        env = {"WARMSERVE_MAX_BATCH": str(limit)}
        server = Server(models, scratch / f"batch{limit}", workers=1, env=env).wait_ready()
        target = Target(server.port, "/v1/embeddings", body, JSON)
        closed(target, clients=16, seconds=1)
        rates[limit] = len(_good(closed(target, clients=16, seconds=2 * SECONDS))) / (2 * SECONDS)
        server.stop()
    return [
        Figure("minilm, 16 clients of 1 worker, one by one", f"{rates[1]:.0f} requests/s"),
        Figure("the same in passes of up to 8", f"{rates[8]:.0f} requests/s = {rates[8] / rates[1]:.2f} x"),
    ]


def first_audio(models: Path, scratch: Path) -> list[Figure]:
    """Ten sentences of speech: the first byte of audio, against the whole."""
    server = Server(models, scratch / "first-audio", workers=1).wait_ready()
    body = json.dumps({**serving.SENTENCE, "input": SENTENCES, "response_format": "pcm"}).encode()
    target = Target(server.port, "/v1/audio/speech", body, JSON)
    shots = _good([target.ask() for _ in range(10)])
    server.stop()
    first, whole = median([s.first_s * 1000 for s in shots]), median([s.whole_s * 1000 for s in shots])
    value = f"{first:.0f} ms of {whole:.0f} ms = {first / whole:.2f}"
    return [Figure("ten sentences, hibari, first byte of audio, of the whole", value)]


def overload(models: Path, scratch: Path) -> list[Figure]:
    """Three times what the service can do: how much of it is still done, how soon, and how soon refused."""
    env = {"WARMSERVE_MAX_QUEUE": "16"}
    server = Server(models, scratch / "overload", workers=2, env=env).wait_ready()
    body = {"model": "tone", "voice": "sine", "input": f"sleep:{BUSY_MS / 1000}", "response_format": "pcm"}
    target = Target(server.port, "/v1/audio/speech", json.dumps(body).encode(), JSON)
    capacity = len(_good(closed(target, clients=4, seconds=2 * SECONDS))) / (2 * SECONDS)
    shots = by_the_clock(target, rate=OVERLOAD * capacity, seconds=2 * SECONDS)
    server.stop()
    done = [shot.whole_s * 1000 for shot in shots if shot.status == 200]
    refused = [shot.whole_s * 1000 for shot in shots if shot.status == 503]
    rest = len(shots) - len(done) - len(refused)
    goodput = len(done) / (2 * SECONDS + max(done) / 1000)
    return [
        Figure(f"overload, {OVERLOAD} x {capacity:.0f} requests/s: done / capacity",
               f"{goodput / capacity:.2f}", "0.90"),
        Figure("the same, p99 of those done", f"{percentile(done, 0.99):.0f} ms"),
        Figure("the same, refused: median, p99 from being sent",
               f"{median(refused):.0f} ms, {percentile(refused, 0.99):.0f} ms"),
        Figure("the same, neither done nor refused with 503", f"{rest} of {len(shots)}", "0"),
    ]  # fmt: skip
