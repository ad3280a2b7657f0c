"""What an operator types, and the exit code it ends with."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.service import Server, eventually, warmserve
from benchmarks.tones import damage_weights, publish_tone
from tests.process.nginx import Nginx
from weights.store import Store

Launch = Callable[..., Server]


def test_status_works_before_anything_listens(launch: Launch, tmp_path: Path) -> None:
    publish_tone(tmp_path / "models", warmup_delay_s=3)
    server = launch(tmp_path / "models")
    eventually(lambda: server.workers("warming"))
    found = warmserve(server, "status", "--json")
    assert found.returncode == 0
    assert json.loads(found.stdout)["status"] == "STARTING"
    assert "warming" in warmserve(server, "status").stdout


def test_status_says_first_what_is_wrong(launch: Launch, models: Path) -> None:
    server = launch(models).wait_ready()
    publish_tone(models, fail="silence")
    warmserve(server, "reload", "--wait")
    lines = warmserve(server, "status").stdout.splitlines()
    assert lines[0] == "READY"
    assert lines[1].startswith("! the last swap, to v2, was rolled back (warmup_silent")


def test_status_watches_until_it_is_interrupted(launch: Launch, models: Path) -> None:
    server = launch(models).wait_ready()
    ours, theirs = pty.openpty()
    command = [str(Path(sys.executable).with_name("warmserve")), "status", "--watch"]
    watching = subprocess.Popen(command, env=server.env | {"TERM": "xterm"}, stdin=theirs, stdout=theirs)
    seen = b""
    try:
        while seen.count(b"workers wanted") < 2:
            assert select.select([ours], [], [], 20)[0], seen
            seen += os.read(ours, 4096)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)
        os.close(theirs)


def test_wait_says_how_it_went(launch: Launch, models: Path, tmp_path: Path) -> None:
    server = launch(models)
    assert warmserve(server, "wait").returncode == 0
    server.stop()
    assert warmserve(server, "wait", "--timeout", "0.2").returncode == 2
    publish_tone(tmp_path / "bad", fail="nan")
    bad = launch(tmp_path / "bad")
    waited = warmserve(bad, "wait")
    assert waited.returncode == 3
    assert "warmup_not_finite" in waited.stderr
    publish_tone(tmp_path / "slow", warmup_delay_s=60)
    slow = launch(tmp_path / "slow")
    eventually(slow.status, within_s=60, what="a master, however slowly it comes up")
    assert warmserve(slow, "wait", "--timeout", "1").returncode == 4


def test_publish_reload_rollback(launch: Launch, models: Path, tmp_path: Path) -> None:
    server = launch(models).wait_ready()
    shutil.copytree(models / "v1", tmp_path / "new")
    published = warmserve(server, "publish", str(tmp_path / "new"))
    assert (published.returncode, published.stdout) == (0, "v2\n")
    reloaded = warmserve(server, "reload", "--wait")
    assert reloaded.returncode == 0
    assert reloaded.stdout.startswith("serving v2")
    back = warmserve(server, "rollback", "--wait")
    assert back.returncode == 0, back.stderr
    assert server.status()["current"] == "v1"
    assert Store(models).pinned() == 1
    unpinned = warmserve(server, "unpin")
    assert unpinned.stdout == "v2\n"
    assert warmserve(server, "pin", "v9").returncode == 1


def test_reload_exits_3_when_the_version_is_refused_and_4_when_it_takes_too_long(
    launch: Launch, models: Path
) -> None:
    server = launch(models).wait_ready()
    publish_tone(models, fail="nan")
    refused = warmserve(server, "reload", "--wait")
    assert refused.returncode == 3
    assert "warmup_not_finite" in refused.stderr
    publish_tone(models, warmup_delay_s=20)
    assert warmserve(server, "reload", "--wait", "--timeout", "1").returncode == 4


def test_commands_that_need_a_running_service_exit_2_without_one(tmp_path: Path, models: Path) -> None:
    env = {**os.environ, "WARMSERVE_MODELS": str(models), "WARMSERVE_RUN_DIR": str(tmp_path / "empty")}
    for command in (["status"], ["reload"], ["rollback"]):
        binary = str(Path(sys.executable).with_name("warmserve"))
        assert subprocess.run([binary, *command], env=env, capture_output=True, check=False).returncode == 2


def test_usage_errors_exit_1(launch: Launch, models: Path) -> None:
    server = launch(models)
    assert warmserve(server, "pin", "seven").returncode == 1
    assert warmserve(server, "no-such-command").returncode == 1
    assert warmserve(server, "publish", "/no/such/directory").returncode == 1


def test_verify_names_the_file_and_the_reason(launch: Launch, models: Path) -> None:
    server = launch(models)
    assert warmserve(server, "verify").returncode == 0
    damage_weights(Store(models).versions()[0], "checksum")
    refused = warmserve(server, "verify", "v1")
    assert refused.returncode == 1
    assert "model.safetensors" in refused.stderr


def test_versions_shows_what_is_current_pinned_previous_leased_and_quarantined(
    launch: Launch, models: Path
) -> None:
    server = launch(models).wait_ready()
    publish_tone(models)
    assert warmserve(server, "reload", "--wait").returncode == 0
    publish_tone(models, fail="nan")
    assert warmserve(server, "reload", "--wait").returncode == 3
    rows = {line.split()[0]: line for line in warmserve(server, "versions").stdout.splitlines()[1:]}
    assert "previous" in rows["v1"]
    assert "leased by" in rows["v2"]
    assert "quarantined (warmup_not_finite" in rows["v3"]
    assert "current" in rows["v3"]


def test_nginx_accepts_the_printed_configuration(launch: Launch, models: Path, tmp_path: Path) -> None:
    server = launch(models).wait_ready()
    nginx = Nginx(tmp_path / "nginx", server)
    checked = nginx.check()
    assert checked.returncode == 0, checked.stderr
    with nginx, server.client() as client:
        client.base_url = nginx.url
        answer = client.post("/v1/audio/speech", json={"model": "tone", "input": "hello", "voice": "sine"})
        assert answer.status_code == 200
        assert answer.headers["x-request-id"]
        for path in ("/status", "/readyz", "/metrics", "/livez"):
            assert client.get(path).status_code == 404, "the admin address is not reachable through nginx"
