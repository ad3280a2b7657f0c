"""What holds when publishers race, are killed, or a master with a lease dies. Real processes, no server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.version_samples import make_version
from weights import errors
from weights.lease import leased_by
from weights.store import Store

SCRIPTS = Path(__file__).parents[1] / "store_scripts.py"

pytestmark = pytest.mark.process


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "models")


@pytest.fixture
def source(tmp_path):
    return make_version(tmp_path / "source")


@pytest.fixture
def filled(store):
    for name in ("v1", "v2", "v3"):
        make_version(store.root / name)
    return store


def start(*arguments):
    path = os.pathsep.join([str(SCRIPTS.parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, SCRIPTS, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def numbers(store):
    return [version.number for version in store.versions()]


def test_two_publishers_at_once_get_different_numbers(store, source):
    publishers = [start("publish_many", store.root, source, 5) for _ in range(2)]
    found = [int(word) for publisher in publishers for word in publisher.communicate(timeout=30)[0].split()]
    assert sorted(found) == list(range(1, 11)) == numbers(store)


@pytest.mark.parametrize("move", ["copy", "move"])
def test_publisher_killed_at_any_step_leaves_no_half_version(store, source, move):
    publisher = start("publish_killed", store.root, source, move)
    output, _ = publisher.communicate(timeout=60)
    assert publisher.returncode == 0
    assert int(output) > 20
    assert numbers(store)  # each one was verified by the script after each kill
    store.sweep()
    assert store.leftovers() == []


def test_lease_outlives_a_killed_master_in_its_forked_child(filled):
    master = start("lease_and_fork", filled.root / "v1")
    child = int(master.stdout.readline())
    assert leased_by(filled.root / "v1") == sorted([master.pid, child])
    os.kill(master.pid, signal.SIGKILL)
    master.wait()
    with pytest.raises(errors.VersionInUse):
        filled.delete(1)
    assert leased_by(filled.root / "v1") == [child]
    os.kill(child, signal.SIGKILL)
    master.stdin.close()
    master.stdout.read()  # ends with the child
    master.stdout.close()
    deadline = time.monotonic() + 10
    while leased_by(filled.root / "v1") and time.monotonic() < deadline:
        os.sched_yield()  # the kernel closes the child's files one after another
    filled.delete(1)
    assert numbers(filled) == [2, 3]
