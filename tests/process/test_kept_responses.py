"""Kept responses over real workers: one store for all, and none of an older version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.service import Server, warmserve
from benchmarks.tones import publish_tone

SPEECH = {"model": "tone", "input": "hello", "voice": "sine", "response_format": "pcm", "seed": 1}


def test_what_one_worker_computed_all_give_again_until_the_next_version(
    launch: Callable[..., Server], models: Path
) -> None:
    server = launch(models, workers=3, env={"WARMSERVE_CACHE_BYTES": str(4 << 20)}).wait_ready()

    def ask() -> tuple[str, bytes]:
        with server.client() as client:
            answer: Any = client.post("/v1/audio/speech", json=SPEECH)
        answer.raise_for_status()
        return answer.headers["X-Cache"], answer.content

    first = ask()
    assert first[0] == "MISS"
    assert [ask() for _ in range(20)] == [("HIT", first[1])] * 20
    assert warmserve(server, "reload", "--wait").returncode == 0
    assert [ask() for _ in range(3)] == [("HIT", first[1])] * 3, "other processes, the same version"

    publish_tone(models)
    assert warmserve(server, "reload", "--wait").returncode == 0
    assert ask()[0] == "MISS"
    assert ask()[0] == "HIT"
    assert len(server.logged("request_served")) == 26
    assert sum(" cache=hit " in line for line in server.logged("request_served")) == 24
