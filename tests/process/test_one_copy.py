"""Invariant: N processes cost one copy of the weights, and no weight page is private."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.version_samples import WEIGHTS
from weights.writing import write_version

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("one_copy_script.py")


def test_forked_processes_cost_one_copy_of_the_weights(tmp_path):
    state = torch.nn.Linear(512, 512).state_dict()
    write_version(tmp_path / "v1", {WEIGHTS: state}, name="tiny", family="tiny", config={})
    path = os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    output = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "v1"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    ).stdout
    found = json.loads(output)
    assert found["processes"] == 5
    assert found["anonymous"] == 0
    assert found["mapped"] * 0.95 <= found["pss"] <= found["mapped"] * 1.05
