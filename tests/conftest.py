"""In CI a skipped test is a failure: what should run there must run. No module leaves threads to the next."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") and _skipped and session.exitstatus == 0:
        print(f"\nskipped in CI, which counts as failed: {', '.join(_skipped)}")
        session.exitstatus = 1


@pytest.fixture(autouse=True, scope="module")
def _no_threads_left() -> Iterator[None]:
    yield
    if (served := sys.modules.get("tests.unit.served")) is not None:
        served.end_threads()
