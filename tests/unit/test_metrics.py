"""Folding keeps sums, every metric is there under a proper name, and state comes from the board alone."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.parser import text_string_to_metric_families

from server import fold as folding
from server import metric_files
from server.board import Board
from server.crew import RESTART_REASONS, Crew
from server.fold import fold
from server.metrics import Instruments, made_for
from server.scrape import expose

EVENT = {
    "model": "tone", "version": "v1", "status": 200, "total_ms": 120.0, "queue_ms": 3.0,
    "inference_ms": 100.0, "first_byte_ms": 50.0, "audio_s": 0.1,
}  # fmt: skip
COUNTED = {
    "requests", "request_duration_seconds", "queue_duration_seconds", "inference_duration_seconds",
    "time_to_first_byte_seconds", "audio_seconds", "rejected", "cancelled", "load_duration_seconds",
    "warmup_duration_seconds",
}  # fmt: skip
STATE = {
    "workers", "model_version_info", "swaps", "swap_duration_seconds", "weights_mapped_bytes",
    "weights_private_bytes", "worker_memory_bytes", "worker_restarts",
}  # fmt: skip
SCRIPTS = Path(__file__).parents[2] / "scripts"
LABELS = {"model", "version", "code", "phase", "reason", "tier", "result", "slot", "kind", "le"}

Make = Callable[[int], Instruments]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """A board as an arbiter keeps it, and its metrics directory."""
    board = Board.create(tmp_path)
    metric_files.create(tmp_path)
    board.arbiter.update(
        swaps={"done": (2, 3.5)}, restarts={"SIGKILL": 1}, mapped={"v1": 1024}, size=1, started=True
    )
    board.slots[0].update(
        phase="ready", model="tone", version="v1", resident_bytes=10, unique_bytes=5, weights_private_bytes=0
    )
    return board


@pytest.fixture
def worker(board: Board, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make the instruments of a worker with the given pid, on files as after a fork."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(directory(board)))

    def make(pid: int) -> Instruments:
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda: pid))
        metric_files.reserve(directory(board), pid)
        return Instruments("tone", "v1")

    yield make
    values.close_all_multiprocess_files()


def directory(board: Board) -> Path:
    return metric_files.metrics_directory(board)


def samples(board: Board) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(expose(board).decode())
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def total(board: Board, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for (found, has), value in samples(board).items() if found == name and wanted <= has)


def test_fold_changes_no_sample(board: Board, worker: Make) -> None:
    """Bit by bit: Prometheus takes a sum that is lower by its last bit for a counter that began again."""
    chance = random.Random(1)
    for pid in range(11, 19):
        instruments = worker(pid)
        for _ in range(50):
            instruments.observe({**EVENT, "total_ms": chance.uniform(0, 90000), "audio_s": chance.random()})
    before = samples(board)
    for alive in ({11, 12, 13, 15, 16}, {11, 13}, {13}):  # in an order that is not the one of reading
        assert fold(directory(board), alive)
        assert samples(board) == before
    assert {p.name for p in directory(board).glob("*.db")} == {
        "counter_retired.db", "histogram_retired.db", "counter_13.db", "histogram_13.db",
    }  # fmt: skip
    assert total(board, "warmserve_requests_total", code="200") == 400


def test_fold_waits_for_a_scrape(board: Board, worker: Make) -> None:
    worker(11).observe(EVENT)
    with metric_files.reading(directory(board)):
        assert not fold(directory(board), set())
    assert (directory(board) / "counter_11.db").exists()
    assert fold(directory(board), set())
    assert not (directory(board) / "counter_11.db").exists()


def test_scrape_waits_for_a_fold(board: Board, worker: Make) -> None:
    worker(11).observe(EVENT)
    with metric_files.folding(directory(board)):
        descriptor = os.open(directory(board) / metric_files.LOCK, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(descriptor)


def test_fold_without_room_loses_nothing(board: Board, worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(11).observe(EVENT)
    before = samples(board)

    def full(path: Path, size_bytes: int) -> None:
        raise OSError(28, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(folding, "allocate", full)
        with pytest.raises(OSError, match="no space left"):
            fold(directory(board), set())
    assert samples(board) == before
    assert fold(directory(board), set())
    assert samples(board) == before


def test_fold_writes_more_series_than_a_file_begins_with(board: Board, worker: Make) -> None:
    instruments = worker(11)
    for code in range(1000):
        instruments.observe({"status": code})
    assert fold(directory(board), set())
    assert total(board, "warmserve_requests_total") == 1000


def test_worker_killed_at_birth_breaks_neither_fold_nor_scrape(board: Board) -> None:
    (directory(board) / "counter_11.db").touch()
    samples(board)
    assert fold(directory(board), set())
    assert not (directory(board) / "counter_11.db").exists()


def test_every_metric_is_exposed(board: Board, worker: Make) -> None:
    instruments = worker(11)
    instruments.warmed("load", 10)
    instruments.warmed("inference", 20)
    instruments.observe({**EVENT, "cancelled": True})
    instruments.observe({"status": 503, "code": "overloaded", "total_ms": 1.0})
    families = {f.name: f for f in text_string_to_metric_families(expose(board).decode())}
    assert {f"warmserve_{name}" for name in COUNTED | STATE} <= families.keys()
    assert "warmserve_batch_size" not in {f.name for f in families.values() if f.samples}
    for name, family in families.items():
        assert name.startswith("warmserve_") and family.documentation.endswith(".")
        assert name.endswith(("_seconds", "_bytes")) or not any(u in name for u in ("_ms", "second", "byte"))
        for sample in family.samples:
            assert sample.labels.keys() <= LABELS
            assert family.type != "counter" or sample.name.endswith("_total")


def test_metrics_begin_at_zero(board: Board, worker: Make) -> None:
    worker(11)
    found = samples(board)
    assert found["warmserve_rejected_total", frozenset({("reason", "queue_full")})] == 0
    assert found["warmserve_cancelled_total", frozenset()] == 0
    assert found["warmserve_request_duration_seconds_count", frozenset({("model", "tone")})] == 0


def test_only_requests_that_reached_the_model_are_timed(board: Board, worker: Make) -> None:
    instruments = worker(11)
    instruments.observe({"status": 404, "total_ms": 0.3})
    instruments.observe(EVENT)
    assert total(board, "warmserve_requests_total") == 2
    assert total(board, "warmserve_request_duration_seconds_count") == 1


def test_rejected_and_cancelled_requests_are_counted_with_their_reason(board: Board, worker: Make) -> None:
    instruments = worker(11)
    instruments.observe({"status": 503, "code": "draining"})
    instruments.reject("queue_full")
    instruments.observe({**EVENT, "cancelled": True})
    assert total(board, "warmserve_rejected_total", reason="draining") == 1
    assert total(board, "warmserve_rejected_total", reason="queue_full") == 1
    assert total(board, "warmserve_cancelled_total") == 1


def test_gauges_of_a_dead_worker_end_with_its_slot(board: Board) -> None:
    assert total(board, "warmserve_workers", phase="ready") == 1
    assert total(board, "warmserve_worker_memory_bytes", kind="resident") == 10
    board.slots[0].clear()
    assert total(board, "warmserve_workers", phase="ready") == 0
    assert not [name for name, _ in samples(board) if name == "warmserve_worker_memory_bytes"]


def test_worker_without_room_counts_in_memory_and_serves(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    made_for("tone", "v1", directory(board) / "missing").observe(EVENT)
    assert not list(directory(board).glob("*.db"))


def test_directories_of_dead_arbiters_are_removed(tmp_path: Path) -> None:
    (tmp_path / "metrics.999999999").mkdir()
    own = metric_files.directory_of(tmp_path, os.getpid())
    own.mkdir()
    (own / "counter_1.db").touch()
    Board.create(tmp_path)
    assert metric_files.create(tmp_path) == own
    assert {p.name for p in tmp_path.glob("metrics.*/*")} == {metric_files.LOCK}
    assert not (tmp_path / "metrics.999999999").exists()


def test_restart_reasons_are_bounded() -> None:
    crew = Crew()
    for number in range(2 * RESTART_REASONS):
        crew.count_restart(f"reason {number}")
    assert len(crew.restarts) == RESTART_REASONS + 1
    assert sum(crew.restarts.values()) == 2 * RESTART_REASONS


def test_instruments_work_without_files() -> None:
    registry = CollectorRegistry()
    Instruments("tone", "v1", registry).observe(EVENT)
    assert b'warmserve_requests_total{code="200",model="tone",version="v1"} 1.0' in generate_latest(registry)


def test_file_of_a_worker_needs_no_growth(board: Board, worker: Make) -> None:
    """What is reserved at birth holds every series that a worker makes without errors."""
    instruments = worker(11)
    instruments.warmed("load", 10)
    instruments.warmed("inference", 20)
    instruments.observe({**EVENT, "batch_size": 4})
    for path in metric_files.readable(directory(board)):
        assert path.stat().st_size == metric_files.FILE_BYTES
        used = sum(len(key) + 32 for key, *_ in MmapedDict.read_all_values_from_file(str(path)))
        assert used < metric_files.FILE_BYTES * 3 / 4


@pytest.mark.parametrize("sample", ["grafana.json", "alerts.yml"])
def test_samples_name_only_metrics_there_are(board: Board, worker: Make, sample: str) -> None:
    worker(11).warmed("load", 10)
    there = {name for name, _ in samples(board)}
    assert set(re.findall(r"warmserve_\w+", (SCRIPTS / sample).read_text())) <= there


def test_alerts_and_dashboard_are_valid_promql(tmp_path: Path) -> None:
    """The dashboard's expressions become rules, which is what promtool can check."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed")
    text = (SCRIPTS / "grafana.json").read_text().replace("$__rate_interval", "5m").replace("$__range", "1h")
    board = json.loads(text)
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [annotation["expr"] for annotation in board["annotations"]["list"]]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "dashboard.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    for path in (SCRIPTS / "alerts.yml", tmp_path / "dashboard.yml"):
        done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
