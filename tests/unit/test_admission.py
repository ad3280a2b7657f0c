"""Time, keys and limits: what is refused before it is read or computed, and what it is told."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import given
from hypothesis import strategies as st

from scripts.cli import main
from server.api import limits
from server.api.deadline import timeout_of, waited_s, within
from server.api.limits import KeyLimits
from server.api.record import Record
from server.errors import DeadlineExceeded, InvalidField, Overloaded, RateLimited, TooManyAtOnce
from server.keys import ApiKey, KeysInvalid, Rate, find_key, read_keys
from server.settings import Settings, SettingsError
from tests.unit.served import app_for_affine, app_for_tone, end_threads

NOW = 1_800_000_000.0
SPEECH = {"model": "tone", "input": "hello", "voice": "sine", "response_format": "pcm"}


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    end_threads()


# ---- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["t=1799999998.5", "1799999998.5", "1799999998500", "1799999998500000"])
def test_the_proxys_start_is_read_in_each_proxys_unit(header: str) -> None:
    assert waited_s(header, NOW) == pytest.approx(1.5)


@pytest.mark.parametrize(
    "header", [None, "", "t=", "soon", "-5", "nan", "1e9", "t=1800000060", "t=1", "9" * 50]
)
def test_a_start_that_tells_nothing_is_no_wait(header: str | None) -> None:
    assert waited_s(header, NOW) == 0.0


@given(st.text())
def test_no_start_breaks_a_request(header: str) -> None:
    assert 0 <= waited_s(header, NOW) <= 3600


@pytest.mark.parametrize(
    "header", ["", "0", "-1", "soon", "nan", "inf", "t=3", "1e5", "1e999", "90000", "5s"]
)
def test_a_timeout_that_is_no_number_of_seconds_is_refused(header: str) -> None:
    with pytest.raises(InvalidField) as error:
        timeout_of(header)
    assert error.value.param == "X-Request-Timeout"


def late(age_s: float, own_timeout_s: float) -> Record:
    record = Record()
    record.asked = record.began - age_s
    record.own_timeout_s = own_timeout_s
    return record


def test_expired_work_is_never_computed() -> None:
    ran: list[float] = []
    with pytest.raises(DeadlineExceeded):
        within(late(5, 4), 60, ran.append)
    assert ran == []


def test_the_clients_time_counts_from_its_proxy_and_never_beyond_the_servers() -> None:
    assert within(late(5, 35), 60, lambda timeout_s: timeout_s) == pytest.approx(30, abs=1)
    assert within(late(5, 300), 60, lambda timeout_s: timeout_s) == 60
    assert within(Record(), 60, lambda timeout_s: timeout_s) == 60


def test_no_instance_within_the_clients_time_is_its_deadline_not_our_overload() -> None:
    def run(_timeout_s: float) -> None:
        raise Overloaded("no instance became free in time")

    with pytest.raises(DeadlineExceeded):
        within(late(0, 5), 60, run)
    with pytest.raises(Overloaded):
        within(Record(), 60, run)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/audio/speech", SPEECH),
        ("/v2/models/tone/infer",
         {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["hello"]}]}),
    ],
)  # fmt: skip
def test_every_route_that_computes_keeps_the_clients_time(path: str, body: Any) -> None:
    client = app_for_tone().test_client()
    started = {"X-Request-Start": f"t={time.time() - 10:.3f}"}
    answer = client.post(path, json=body, headers={**started, "X-Request-Timeout": "5"})
    assert answer.status_code == 504
    assert client.post(path, json=body, headers={**started, "X-Request-Timeout": "50"}).status_code == 200
    assert client.post(path, json=body, headers={"X-Request-Timeout": "now"}).status_code == 400


def test_the_wait_for_a_worker_is_part_of_the_time_in_queue() -> None:
    seen: list[Any] = []
    app = app_for_affine()
    app.wsgi_app._observe = seen.append  # type: ignore[attr-defined]
    matrix = {"name": "matrix", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    started = {"X-Request-Start": f"t={time.time() - 10:.3f}"}
    body = {"inputs": [matrix], "outputs": [{"name": "scaled"}]}
    answer = app.test_client().post("/v2/models/affine/infer", json=body, headers=started)
    assert answer.status_code == 200, answer.text
    answer.close()
    assert 9_000 < seen[0]["queue_ms"] < 60_000


# ---- keys -----------------------------------------------------------------------------------------


def test_a_file_of_keys_is_read_with_its_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        f"# ours\nalice {digest('a')} concurrency=4 rate=60/min\n\nbob@example.org {digest('b')} # no limit\n"
    )
    alice, bob = read_keys(file)
    assert alice == ApiKey("alice", hashlib.sha256(b"a").digest(), 4, Rate(60, 60))
    assert (bob.concurrency, bob.rate) == (None, None)
    assert find_key((alice, bob), "b") is bob
    assert find_key((alice, bob), "c") is None
    assert find_key((alice, bob), "") is None
    assert find_key((alice, bob), "\udcff") is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no key"),
        ("# nothing\n", "no key"),
        ("alice", "line 1"),
        ("alice secret", "SHA-256"),
        (f"alice {digest('a').upper()}", "SHA-256"),
        (f"../alice {digest('a')}", "name"),
        (f"alice {digest('a')} rate=5", "rate=5"),
        (f"alice {digest('a')} concurrency=0", "concurrency=0"),
        (f"alice {digest('a')}\nalice {digest('b')}", "line 2"),
        (f"alice {digest('a')}\nbob {digest('a')}", "line 2"),
    ],
)
def test_a_wrong_file_of_keys_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(KeysInvalid, match=told):
        read_keys(file)
    monkeypatch.setenv("WARMSERVE_API_KEYS_FILE", str(file))
    with pytest.raises(SettingsError, match=r"WARMSERVE_API_KEYS_FILE=.*" + told):
        Settings.load()


def test_a_missing_file_of_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysInvalid, match="No such file"):
        read_keys(tmp_path / "none")


def test_a_new_key_opens_what_its_line_describes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "alice"]) == 0
    shown = capsys.readouterr()
    file = tmp_path / "keys"
    file.write_text(shown.out)
    secret = shown.err.split()[-1]
    key = find_key(read_keys(file), secret)
    assert key is not None and key.name == "alice"
    assert secret not in shown.out
    assert main(["key", "not a name"]) == 1


@pytest.fixture
def client(tmp_path: Path) -> FlaskClient:
    file = tmp_path / "keys"
    file.write_text(f"alice {digest('a')} rate=2/h\nbob {digest('b')} concurrency=1\n")
    return app_for_tone(api_keys_file=file, run_dir=tmp_path / "run").test_client()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-API-Key": ""},
        *({"Authorization": given} for given in ("Bearer x", "a", "Basic a", "Bearer", "Bearer a b")),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v2/models/tone", "/v1/audio/speech", "/nowhere"])
def test_without_a_key_nothing_is_told(client: FlaskClient, path: str, headers: dict[str, str]) -> None:
    answer = (
        client.post(path, json=SPEECH, headers=headers)
        if "speech" in path
        else client.get(path, headers=headers)
    )
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    error = answer.json["error"]  # type: ignore[index]
    if path.startswith("/v2"):
        assert "API key" in error
    else:
        assert error["code"] == "invalid_api_key" and error["type"] == "authentication_error"


def test_probes_need_no_key(client: FlaskClient) -> None:
    assert client.get("/v2/health/ready").status_code == 200


@pytest.mark.parametrize(
    "headers", [{"Authorization": "Bearer b"}, {"authorization": "bearer b"}, {"X-API-Key": "b"}]
)
def test_a_key_opens_by_either_header(client: FlaskClient, headers: dict[str, str]) -> None:
    assert client.get("/v1/models", headers=headers).status_code == 200


def test_a_rate_is_kept_with_the_time_to_come_back(client: FlaskClient) -> None:
    alice = {"Authorization": "Bearer a"}
    codes = [client.post("/v1/audio/speech", json=SPEECH, headers=alice).status_code for _ in range(3)]
    assert codes == [200, 200, 429]
    refused = client.post("/v1/audio/speech", json=SPEECH, headers=alice)
    assert refused.json["error"]["code"] == "rate_limited"  # type: ignore[index]
    assert 0 < int(refused.headers["Retry-After"]) <= 1800
    assert client.get("/v1/models", headers=alice).status_code == 200, "what computes nothing is not counted"
    assert client.post("/v1/audio/speech", json=SPEECH, headers={"X-API-Key": "b"}).status_code == 200


def test_a_place_lasts_until_the_response_is_over(client: FlaskClient) -> None:
    bob = {"Authorization": "Bearer b"}
    held = client.post("/v1/audio/speech", json=SPEECH, headers=bob)
    second = client.post("/v1/audio/speech", json=SPEECH, headers=bob)
    assert second.status_code == 429 and second.json["error"]["code"] == "concurrency_limited"  # type: ignore[index]
    held.close()
    again = client.post("/v1/audio/speech", json=SPEECH, headers=bob)
    assert again.status_code == 200
    again.close()
    wrong = client.post("/v1/audio/speech", json={}, headers=bob)
    assert wrong.status_code == 400
    wrong.close()
    assert client.post("/v1/audio/speech", json=SPEECH, headers=bob).status_code == 200


# ---- limits over processes ------------------------------------------------------------------------


def test_places_are_counted_over_processes_and_a_dead_ones_come_back(tmp_path: Path) -> None:
    key = ApiKey("alice", b"", concurrency=2)
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        KeyLimits(tmp_path).enter(key)
        os.write(told, b"x")
        time.sleep(60)  # until it is killed
        os._exit(0)
    assert os.read(ready, 1) == b"x"
    found = KeyLimits(tmp_path)
    mine = found.enter(key)
    with pytest.raises(TooManyAtOnce):
        found.enter(key)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.close(found.enter(key))
    os.close(mine)


def test_a_refused_request_holds_nothing(tmp_path: Path) -> None:
    found = KeyLimits(tmp_path)
    key = ApiKey("alice", b"", concurrency=1, rate=Rate(1, 3600))
    os.close(found.enter(key))
    for _ in range(3):
        with pytest.raises(RateLimited):  # each has had the place, and has given it back
            found.enter(key)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_rate_spreads_after_its_burst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: clock[0])
    found, key = KeyLimits(tmp_path), ApiKey("alice", b"", rate=Rate(3, 60))

    def may_ask() -> bool:
        try:
            os.close(found.enter(key))
        except RateLimited as error:
            assert error.retry_after_s is not None
            return False
        return True

    assert [may_ask() for _ in range(5)] == [True, True, True, False, False]
    clock[0] += 20
    assert [may_ask(), may_ask()] == [True, False]
    clock[0] += 3600
    assert [may_ask() for _ in range(4)] == [True, True, True, False]
    clock[0] = 5.0  # the machine has started again: its clock too
    clock[0] += 61
    assert may_ask()


@given(st.lists(st.floats(0, 30), min_size=1, max_size=60), st.integers(1, 5), st.sampled_from([1, 60]))
def test_no_span_of_a_rate_holds_more_than_twice_its_count(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[float], count: int, seconds: int
) -> None:
    """The burst after a pause, and what falls due meanwhile; over long times the rate itself."""
    clock, let = 0.0, []
    key, found = ApiKey("k", b"", rate=Rate(count, seconds)), KeyLimits(tmp_path_factory.mktemp("rate"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits.time, "monotonic", lambda: clock)
        for gap in gaps:
            clock += gap
            try:
                os.close(found.enter(key))
                let.append(clock)
            except RateLimited as error:
                assert error.retry_after_s is not None and error.retry_after_s < seconds + 1e-6
    for start in let:
        assert sum(start <= one < start + seconds for one in let) <= 2 * count
    assert len(let) <= count + (clock / seconds) * count + 1


def test_the_lock_is_of_the_open_file(tmp_path: Path) -> None:
    """Two requests of one worker are two holders: a lock of the process would let both through."""
    found, key = KeyLimits(tmp_path), ApiKey("alice", b"", concurrency=1)
    held = found.enter(key)
    with pytest.raises(TooManyAtOnce):
        found.enter(key)
    assert fcntl.fcntl(held, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(held)
    os.close(found.enter(key))
