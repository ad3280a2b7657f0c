"""The check for machines with a GPU goes its whole way on one without."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import gpu
from benchmarks.service import ROOT


def test_gpu_check_runs_to_its_table_on_the_main_processor() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--cpu", "--megabytes", "64"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    failed = [row for row in rows if "failed requests" in row[0]]
    assert len(failed) == 2 and all(row[1] == "0" for row in failed)


def test_gpu_check_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "read_accelerators", lambda: ())
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu.main() == 2
    assert capsys.readouterr().err == "gpu_check: NVML shows no device\n"
