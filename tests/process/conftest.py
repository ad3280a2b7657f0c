"""Fixtures of the process tests: servers that always end, and print their log when a test failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service import Server
from benchmarks.tones import publish_tone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(str(item.fspath)).parents:
            item.add_marker(pytest.mark.process)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.failed:
        for server in getattr(item, "started_servers", []):
            report.sections.append((f"log of gunicorn {server.pid}", server.log_text()[-8000:]))
    return report  # type: ignore[return-value]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A models directory with one version of the tone family."""
    directory = tmp_path / "models"
    publish_tone(directory)
    return directory


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """Start servers; all of them end with the test."""
    started: list[Server] = []
    request.node.started_servers = started

    def start(models: Path, **options: Any) -> Server:
        server = Server(models, tmp_path / f"run{len(started)}", **options)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()
