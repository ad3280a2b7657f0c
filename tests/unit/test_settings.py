"""Settings: every mistake at once, each naming variable, value and limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from server.settings import PREFIX, Settings, SettingsError, bytes_of


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


def test_defaults_are_valid_and_local() -> None:
    settings = Settings.load()
    assert settings.bind_addresses == ["127.0.0.1:8000"]
    assert settings.admin_bind == "127.0.0.1:8001"
    assert settings.workers == 2


def test_every_mistake_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMSERVE_WORKERS", "0")
    monkeypatch.setenv("WARMSERVE_BOOT_TIMEOUT_S", "soon")
    monkeypatch.setenv("WARMSERVE_LOG_FORMAT", "xml")
    monkeypatch.setenv("WARMSERVE_WORKRES", "4")
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    text = str(caught.value)
    assert len(caught.value.mistakes) == 4
    for part in ("WARMSERVE_WORKERS='0'", "greater than or equal to 1", "BOOT_TIMEOUT_S='soon'",
                 "'text' or 'json'",
                 "WARMSERVE_WORKRES: no such setting; did you mean WARMSERVE_WORKERS?"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    "name", [n for n, f in Settings.model_fields.items() if f.annotation in (int, float)]
)
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e99", "", "0x10", "2 "])
def test_numbers_out_of_range_or_not_numbers_are_refused_or_finite(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(PREFIX + name.upper(), value)
    try:
        found = getattr(Settings.load(), name)
    except SettingsError as error:
        assert name.upper() in str(error)
    else:
        assert 0 <= found < 1e10


@pytest.mark.parametrize(
    ("name", "value"),
    [("BIND", "a:99999"), ("BIND", "fd://x"), ("BIND", "unix:"), ("BIND", ":8000"), ("BIND", "127.0.0.1:1,"),
     ("ADMIN_BIND", "127.0.0.1:8000"), ("ADMIN_BIND", "127.0.0.1:1,127.0.0.1:2"), ("MIN_READY", "3")],
)  # fmt: skip
def test_what_could_never_work_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(SettingsError, match=f"{PREFIX}{name}="):
        Settings.load()


@pytest.mark.parametrize(
    "value", ["[::1]:8000", "unix:run/data.sock", "fd://3", "localhost:0", "h:1, unix:x"]
)
def test_addresses_that_gunicorn_takes_are_taken(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WARMSERVE_BIND", value)
    assert len(Settings.load().bind_addresses) == value.count(",") + 1


def test_a_long_wrong_value_is_shown_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMSERVE_WORKERS", "9" * 5000)
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert len(str(caught.value)) < 300


def test_a_line_of_the_file_that_is_no_pair_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "env"
    file.write_text("WARMSERVE_WORKERS=3\nnonsense\n")
    monkeypatch.setenv("WARMSERVE_ENV_FILE", str(file))
    with pytest.raises(SettingsError, match="line 2 is not KEY=VALUE"):
        Settings.load()


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("# comment\nWARMSERVE_WORKERS=5\nWARMSERVE_MAX_QUEUE=9\n")
    monkeypatch.setenv("WARMSERVE_ENV_FILE", str(file))
    monkeypatch.setenv("WARMSERVE_WORKERS", "3")
    settings = Settings.load()
    assert (settings.workers, settings.max_queue) == (3, 9)


def test_a_named_file_that_is_missing_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WARMSERVE_ENV_FILE", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="WARMSERVE_ENV_FILE"):
        Settings.load()


@pytest.mark.parametrize(("workers", "cores", "threads"), [(2, 8, 4), (4, 2, 1), (1, 2, 2), (3, 8, 2)])
def test_torch_threads_default_to_the_workers_share_of_the_cores(
    workers: int, cores: int, threads: int
) -> None:
    assert Settings().torch_threads_for(workers, cores) == threads


def test_settings_that_need_a_restart_are_named_and_kept() -> None:
    before, after = Settings(), Settings(bind="127.0.0.1:9", max_queue=1)
    assert after.changed_needing_restart(before) == ["BIND"]
    kept = after.with_restart_values_of(before)
    assert (kept.bind, kept.max_queue) == (before.bind, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("0", 0), ("1500", 1500), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("10%", 100), ("0.5%", 5)],
)
def test_memory_limit_of_a_worker_is_bytes_or_a_share(given: str, expected: int) -> None:
    assert bytes_of(Settings(worker_memory_limit=given).worker_memory_limit, 1000) == expected


@pytest.mark.parametrize("given", ["", "much", "-1", "101%", "5 %", "1e3%", "12parsecs"])
def test_memory_limit_that_is_neither_is_refused(given: str) -> None:
    with pytest.raises(ValidationError, match="must be bytes"):
        Settings(worker_memory_limit=given)


@pytest.mark.parametrize("given", ["auto", "cpu", "cuda", "cuda:0", "cuda:0,1"])
def test_devices_that_can_be_asked_for(given: str) -> None:
    assert Settings(device=given).device == given


@pytest.mark.parametrize("given", ["gpu", "cuda:", "cuda:a", "cuda:0,", "CUDA", "cuda:-1", "mps", ""])
def test_other_devices_are_refused(given: str) -> None:
    with pytest.raises(ValidationError):
        Settings(device=given)
