"""Metrics of real workers: right across a swap and a kill, never going backwards, files never piling up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.service import Server, eventually
from benchmarks.tones import publish_tone
from server.metric_files import directory_of

SPEECH = {"model": "tone", "input": "hello", "voice": "sine", "response_format": "pcm"}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scraper(threading.Thread):
    """Scrapes all the time and remembers every sample of a counter that went backwards or away."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.over = threading.Event()
        self.scrapes = 0
        self.wrong: list[object] = []

    def run(self) -> None:
        before: Samples = {}
        with self.server.admin() as admin:
            while not self.over.is_set():
                try:
                    now = counters(admin.get("/metrics").raise_for_status().text)
                except Exception as error:  # a worker was killed while it answered
                    self.wrong.append(error)
                    continue
                self.wrong += [(key, value, now.get(key)) for key, value in before.items()
                               if now.get(key, -1) < value]  # fmt: skip
                before, self.scrapes = now, self.scrapes + 1

    def stop(self) -> list[object]:
        """End; return what was wrong."""
        self.over.set()
        self.join(30)
        return self.wrong


def counters(text: str) -> Samples:
    """Return every sample that must only grow."""
    families = text_string_to_metric_families(text)
    grow = [f for f in families if f.type in ("counter", "histogram", "summary")]
    return {(s.name, frozenset(s.labels.items())): s.value for f in grow for s in f.samples}


def scrape(server: Server) -> str:
    with server.admin() as admin:
        answer = admin.get("/metrics").raise_for_status()
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return answer.text


def value(server: Server, name: str, **labels: str) -> float:
    """Return the sum of the samples of *name* that have *labels*."""
    families = text_string_to_metric_families(scrape(server))
    return sum(s.value for f in families for s in f.samples
               if s.name == f"warmserve_{name}" and labels.items() <= s.labels.items())  # fmt: skip


def check_with_promtool(text: str) -> None:
    """Run Prometheus's own linter where it is installed."""
    if promtool := shutil.which("promtool"):
        done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def speak(server: Server, count: int) -> None:
    with server.client() as client:
        for _ in range(count):
            client.post("/v1/audio/speech", json=SPEECH).raise_for_status()


def kill_a_worker(server: Server) -> None:
    pid = server.workers()[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: pid not in [w["pid"] for w in server.workers()] and len(server.workers()) == 2)


def swap(server: Server) -> None:
    asked = server.status()["requests"]
    server.signal(signal.SIGHUP)
    eventually(lambda: (server.status()["last_swap"] or {}).get("covers", 0) > asked, within_s=60)


def test_counters_are_right_across_a_swap_and_a_kill(launch: Callable[..., Server], models: Path) -> None:
    server = launch(models).wait_ready()
    directory = directory_of(server.run_dir, server.pid)
    check_with_promtool(scrape(server))
    scraper = Scraper(server)
    scraper.start()
    speak(server, 20)
    publish_tone(models)
    swap(server)
    speak(server, 20)
    wrong = scraper.stop()
    assert wrong == [] and scraper.scrapes > 10

    kill_a_worker(server)
    speak(server, 10)
    with server.client() as client:
        assert client.get("/v1/nothing").status_code == 404
        assert client.post("/v1/audio/speech", json=SPEECH | {"input": "raise!"}).status_code == 500

    check_with_promtool(scrape(server))
    assert value(server, "requests_total", version="v1", code="200", model="tone") == 20
    assert value(server, "requests_total", version="v2", code="200", model="tone") == 30
    assert value(server, "requests_total", code="404") == 1
    assert value(server, "requests_total", code="500") == 1
    assert value(server, "inference_duration_seconds_count") == 51  # the one that failed took time too
    assert abs(value(server, "audio_seconds_total") - 5.0) < 1e-3
    assert value(server, "swaps_total", result="done") == 2
    assert value(server, "worker_restarts_total", reason="SIGKILL") == 1
    assert value(server, "load_duration_seconds_count") == 5
    # Only what is true now, of the two workers there are.
    assert value(server, "workers") == value(server, "workers", phase="ready") == 2
    assert value(server, "model_version_info", version="v2") == value(server, "model_version_info") == 1
    assert value(server, "weights_mapped_bytes", version="v2") == value(server, "weights_mapped_bytes") > 0
    assert value(server, "weights_private_bytes") == 0
    eventually(lambda: value(server, "worker_memory_bytes", kind="unique") > 2 << 20)
    # One file a kind for each live worker and one for all the dead; none of the arbiter's own.
    alive = {str(w["pid"]) for w in server.workers()}
    eventually(lambda: owners(directory) == alive | {"retired"}, what="the dead workers' files folded")


def owners(directory: Path) -> set[str]:
    return {path.stem.rpartition("_")[2] for path in directory.glob("*.db")}


def test_files_stay_few_and_counters_grow_under_scrapes_and_crashes(
    launch: Callable[..., Server], models: Path
) -> None:
    server = launch(models, env={"WARMSERVE_CRASH_LIMIT": "100"}).wait_ready()
    directory = directory_of(server.run_dir, server.pid)
    scrapers = [Scraper(server) for _ in range(3)]
    for scraper in scrapers:
        scraper.start()
    for _ in range(4):
        speak(server, 5)
        kill_a_worker(server)
    for scraper in scrapers:
        # A scrape that its worker's death cut off is no answer; an answer that went backwards is wrong.
        assert [w for w in scraper.stop() if isinstance(w, tuple)] == []
        assert scraper.scrapes > 5
    eventually(
        lambda: len(list(directory.iterdir())) == 7, what="two files for each of two, two retired, a lock"
    )
    assert value(server, "requests_total", code="200") == 20
    assert value(server, "worker_restarts_total", reason="SIGKILL") == 4
