"""A bad version changes nothing, whatever is wrong with it: one case a kind."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import Load
from benchmarks.service import Server, eventually, warmserve
from benchmarks.tones import damage_weights, publish_tone
from server.quarantine import Quarantine
from tests.process.test_swap_fails_nobody import finish_swap
from weights.store import Store, Version

Launch = Callable[..., Server]

IN_THE_FILES = {
    "truncated": "file_size_wrong",
    "checksum": "checksum_wrong",
    "missing": "file_missing",
    "manifest": "manifest_invalid",
    "format": "format_unknown",
}
IN_THE_FAMILY: dict[str, tuple[dict[str, Any], str]] = {
    "unknown family": ({"family": "no-such-family"}, "family_unknown"),
    "wrong shape": ({"size": 3}, "attach_mismatch"),
    "exception": ({"fail": "raise"}, "warmup_failed"),
    "build": ({"fail": "build"}, "warmup_failed"),
    "configuration": ({"fail": "init"}, "prepare_failed"),
    "NaN": ({"fail": "nan"}, "warmup_not_finite"),
    "silence": ({"fail": "silence"}, "warmup_silent"),
    "nothing": ({"fail": "empty"}, "warmup_empty"),
    "sample rate": ({"sample_rate": 16000}, "warmup_sample_rate"),
    "exit": ({"fail": "exit"}, "exit_7"),
    "SIGKILL": ({"fail": "kill"}, "SIGKILL"),
    "SIGSEGV": ({"fail": "segv"}, "SIGSEGV"),
    "SIGBUS": ({"fail": "bus"}, "SIGBUS"),
    "device context": ({"fail": "context"}, "device_context"),
    "too slow": ({"fail": "hang"}, "boot_timeout"),
}


def check_nothing_changed(
    server: Server, load: Load, version: Version, last: dict[str, Any], reason: str
) -> None:
    """The four places an operator looks, and what clients saw."""
    assert last["reason"] == reason, last
    assert last["serving"] == "v1"
    assert not load.bad()
    assert set(load.versions()) == {"v1"}
    assert server.process.poll() is None
    assert any(
        f"version={version.name}" in line and f"reason={reason}" in line
        for line in server.logged("version_refused")
    )
    eventually(lambda: len(server.status()["workers"]) == 2, what="no worker of the refused generation")
    assert {w["version"] for w in server.workers()} == {"v1"}
    refusal = Quarantine(server.run_dir, Store(server.models)).refusal_of(version)
    assert refusal is not None
    assert refusal.reason == reason


@pytest.mark.parametrize("how", IN_THE_FILES)
def test_a_version_with_bad_files_changes_nothing(launch: Launch, models: Path, how: str) -> None:
    server = launch(models, workers=2).wait_ready()
    version = publish_tone(models)
    damage_weights(version, how)
    with Load(server.url, 2) as load:
        last = finish_swap(server)
        load.wait_for(10)
    check_nothing_changed(server, load, version, last, IN_THE_FILES[how])


@pytest.mark.parametrize("kind", IN_THE_FAMILY)
def test_a_version_that_cannot_warm_up_changes_nothing(launch: Launch, models: Path, kind: str) -> None:
    config, reason = IN_THE_FAMILY[kind]
    server = launch(models, workers=2, env={"WARMSERVE_BOOT_TIMEOUT_S": "4"}).wait_ready()
    version = publish_tone(models, **config)
    with Load(server.url, 2) as load:
        last = finish_swap(server)
        load.wait_for(10)
    check_nothing_changed(server, load, version, last, reason)


def test_old_and_new_over_the_memory_limit_changes_nothing(launch: Launch, models: Path) -> None:
    server = launch(models, workers=2, env={"WARMSERVE_MEMORY_LIMIT_BYTES": str(900 << 20)}).wait_ready()
    version = publish_tone(models, ballast_mb=1000)
    with Load(server.url, 2) as load:
        last = finish_swap(server)
        load.wait_for(10)
    check_nothing_changed(server, load, version, last, "memory_would_not_fit")


def test_a_quarantined_version_is_not_tried_again_until_something_changes(
    launch: Launch, models: Path
) -> None:
    server = launch(models, workers=2).wait_ready()
    version = publish_tone(models, fail="nan")
    assert finish_swap(server)["result"] == "rolled_back"
    spawned = len(server.logged("worker_spawned"))
    last = finish_swap(server)
    assert (last["result"], last["reason"]) == ("refused", "quarantined")
    assert len(server.logged("worker_spawned")) == spawned
    # The operator insists: it is tried, and refused on its own merits.
    forced = warmserve(server, "reload", "--wait", "--force")
    assert forced.returncode == 3
    assert "warmup_not_finite" in forced.stderr
    # The pin changes: tried again.
    Store(models).pin(version.number)
    assert finish_swap(server)["reason"] == "warmup_not_finite"


def test_a_version_that_keeps_crashing_under_traffic_is_rolled_back(launch: Launch, models: Path) -> None:
    server = launch(models, workers=2, env={"WARMSERVE_CRASH_LIMIT": "3"}).wait_ready()
    publish_tone(models, dies_on_request=True)
    assert finish_swap(server)["serving"] == "v2"
    before = server.status()["last_swap"]

    def rolled_back() -> bool:
        with server.client(timeout=5) as client:
            try:
                client.post("/v1/audio/speech", json={"model": "tone", "input": "hello", "voice": "sine"})
            except Exception:
                pass
        last = server.status()["last_swap"]
        return last != before and last["serving"] == "v1"

    eventually(rolled_back, within_s=60)
    last = server.status()["last_swap"]
    assert (last["result"], last["reason"]) == ("rolled_back", "crashing")
    eventually(lambda: len(server.workers()) == 2)
    with Load(server.url, 2) as load:
        eventually(lambda: len(load.answers) > 10)
    assert not load.bad()
    assert finish_swap(server)["reason"] == "quarantined"


def test_broken_settings_at_hup_leave_the_old_ones(launch: Launch, models: Path, tmp_path: Path) -> None:
    file = tmp_path / "warmserve.env"
    file.write_text("WARMSERVE_MAX_QUEUE=7\n")
    server = launch(models, workers=2, env={"WARMSERVE_ENV_FILE": str(file)}).wait_ready()
    publish_tone(models)
    file.write_text("WARMSERVE_MAX_QUEUE=many\nWARMSERVE_MAX_QEUE=7\n")
    last = finish_swap(server)
    assert (last["result"], last["reason"], last["serving"]) == ("refused", "settings_refused", "v1")
    assert "MAX_QEUE" in str(last["detail"])
    file.write_text("WARMSERVE_MAX_QUEUE=9\n")
    assert finish_swap(server)["serving"] == "v2"


def test_a_setting_that_needs_a_restart_says_so(launch: Launch, models: Path, tmp_path: Path) -> None:
    file = tmp_path / "warmserve.env"
    file.write_text("")
    server = launch(models, workers=2, env={"WARMSERVE_ENV_FILE": str(file)}).wait_ready()
    file.write_text("WARMSERVE_BIND=127.0.0.1:9\n")
    assert finish_swap(server)["result"] == "done"
    assert any("setting=BIND" in line for line in server.logged("setting_needs_restart"))


def test_a_new_worker_killed_from_outside_rolls_back(launch: Launch, models: Path) -> None:
    """As the OOM killer would: the version is not blamed less for it."""
    import os

    server = launch(models, workers=2).wait_ready()
    version = publish_tone(models, warmup_delay_s=5)
    with Load(server.url, 2) as load:
        load.wait_for(10)
        server.signal(signal.SIGHUP)
        (warming,) = eventually(lambda: server.workers("warming"))
        os.kill(warming["pid"], signal.SIGKILL)
        last = eventually(
            lambda: (server.status()["last_swap"] or {}).get("covers") == 1 and server.status()["last_swap"]
        )
    check_nothing_changed(server, load, version, last, "SIGKILL")


def test_no_worker_is_forked_from_a_master_with_a_device_context(launch: Launch, tmp_path: Path) -> None:
    publish_tone(tmp_path / "models", fail="context")
    server = launch(tmp_path / "models")
    assert server.process.wait(60) == 3
    assert any("reason=device_context" in line for line in server.logged("arbiter_gave_up"))
    assert not server.logged("worker_spawned")


def test_a_device_that_is_not_there_is_named_at_the_start(launch: Launch, models: Path) -> None:
    server = launch(models, env={"WARMSERVE_DEVICE": "cuda:7"})
    assert server.process.wait(60) == 1
    assert "DEVICE=cuda:7" in server.log_text()
