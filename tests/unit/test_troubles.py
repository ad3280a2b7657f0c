"""What `warmserve status` says first."""

from __future__ import annotations

from typing import Any

import pytest

from server.troubles import by_urgency, troubles

WELL: dict[str, Any] = {"slot": 0, "pid": 7, "phase": "ready", "beat_age_s": 0.3, "weights_private_bytes": 0}


def status(*workers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"status": "READY", "reason": "", "last_swap": None, "restarts": {}, "workers": workers, **fields}


def test_nothing_is_said_when_all_is_well() -> None:
    done = {"to": "v1", "result": "done", "reason": None, "detail": None}
    assert troubles(status(WELL, WELL, last_swap=done)) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"beat_age_s": 9.0}, "worker 7 has not been heard of for 9 s"),
        (
            {"worn": "memory_limit", "detail": "too much"},
            "worker 7 is to be replaced: memory_limit (too much)",
        ),
        ({"weights_private_bytes": 25_000_000}, "worker 7 holds 25 MB of weights outside the shared mapping"),
    ],
)
def test_a_worker_in_trouble_is_named(fields: dict[str, Any], said: str) -> None:
    assert troubles(status(WELL | fields)) == [said]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"status": "DEGRADED", "reason": "1 of 2 ready"}, "DEGRADED: 1 of 2 ready"),
        (
            {
                "last_swap": {
                    "to": "v2",
                    "result": "rolled_back",
                    "reason": "warmup_silent",
                    "detail": "quiet",
                }
            },
            "the last swap, to v2, was rolled back (warmup_silent: quiet)",
        ),
        ({"restarts": {"SIGSEGV": 2}}, "workers replaced since the start: 2 x SIGSEGV"),
    ],
)
def test_the_service_in_trouble_says_why(fields: dict[str, Any], said: str) -> None:
    assert troubles(status(WELL, **fields)) == [said]


def test_workers_in_trouble_come_first_and_those_that_work_last() -> None:
    warming = WELL | {"slot": 1, "phase": "warming"}
    silent = WELL | {"slot": 2, "beat_age_s": 5.0}
    broken = WELL | {"slot": 3, "phase": "defunct", "worn": "instance_stuck", "detail": "60 s"}
    ordered = sorted([WELL, warming, silent, broken], key=by_urgency)
    assert [worker["slot"] for worker in ordered] == [3, 2, 1, 0]
