"""Steady load from threads, every answer kept: what clients saw during whatever the test does."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from benchmarks.service import eventually

RATE = 24000


@dataclass(frozen=True)
class Answer:
    """One request from the client's side. ``version`` is the header; times are monotonic seconds."""

    started: float
    ended: float
    status: int
    version: str
    whole: bool
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether the client got all of what it asked for."""
        return self.status == 200 and self.whole and not self.error


@dataclass
class Load:
    """Clients that ask again as soon as they have been answered, until told to stop."""

    url: str
    clients: int = 3
    texts: tuple[str, ...] = ("hello", "sleep:0.05", "seconds:2", "pieces:4:0.1", "sleep:0.4")
    answers: list[Answer] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        turn = number
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self._stop.is_set():
                turn += 1
                self.answers.append(self._ask(client, self.texts[turn % len(self.texts)]))

    def _ask(self, client: httpx.Client, text: str) -> Answer:
        body = {"model": "tone", "input": text, "voice": "sine", "response_format": "wav"}
        started = time.monotonic()
        try:
            response = client.post("/v1/audio/speech", json=body)
        except httpx.HTTPError as error:
            return Answer(started, time.monotonic(), 0, "", False, repr(error))
        version = response.headers.get("x-model-version", "")
        return Answer(
            started, time.monotonic(), response.status_code, version, _is_whole(response.content, text)
        )

    def wait_for(self, count: int, *, within_s: float = 30.0) -> None:
        """Return once *count* more answers have come."""
        target = len(self.answers) + count
        eventually(lambda: len(self.answers) >= target, within_s=within_s, what=f"{count} more answers")

    def bad(self) -> list[Answer]:
        """Return the answers that were not good."""
        return [answer for answer in self.answers if not answer.good]

    def versions(self) -> Counter[str]:
        """Count the answers by version."""
        return Counter(answer.version for answer in self.answers)


def _is_whole(content: bytes, text: str) -> bool:
    """Tell whether a WAV, streamed or not, has a header and as many samples as *text* is long."""
    word, _, rest = text.partition(":")
    seconds = {"seconds": rest, "pieces": rest.partition(":")[0]}.get(word, "")
    expected = 0.1 * float(seconds) if word == "pieces" else float(seconds or 0.1)
    return content[:4] == b"RIFF" and math.isclose(len(content) - 44, 2 * RATE * expected, abs_tol=8)
