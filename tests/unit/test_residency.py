"""What /proc and cgroups say, read from samples where the machine has no such limit."""

from __future__ import annotations

import os

import pytest

from weights.residency import Residency, memory_limit_bytes, residency

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def limit(tmp_path):
    def read(membership, files):
        for name, text in files.items():
            (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "root" / name).write_text(text)
        (tmp_path / "cgroup").write_text(membership)
        return memory_limit_bytes(tmp_path / "cgroup", tmp_path / "root")

    return read


def test_file_that_is_not_mapped_costs_nothing(tmp_path):
    assert residency([tmp_path / "a"]) == {tmp_path / "a": Residency()}


def test_tightest_limit_of_all_ancestors_counts(limit):
    files = {"a/b/memory.max": "4096\n", "a/memory.max": "max\n", "memory.max": "8192\n"}
    assert limit("0::/a/b\n", files) == 4096
    assert limit("0::/a/b\n", files | {"a/memory.max": "2048\n"}) == 2048


def test_limit_of_the_old_hierarchy_counts(limit):
    files = {"memory/a/memory.limit_in_bytes": "4096\n"}
    assert limit("5:cpu,memory:/a\n4:pids:/a\n", files) == 4096


def test_without_a_limit_the_machine_is_the_limit(limit, tmp_path):
    assert limit("0::/\n", {"memory.max": "max\n"}) == MACHINE
    assert memory_limit_bytes(tmp_path / "none") == MACHINE
