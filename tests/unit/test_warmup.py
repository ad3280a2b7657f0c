"""What a version's outputs have to be before a client may get one."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from server.families.base import Family, Instance
from server.warmup import WarmupFailed, warm_up

ONE = {"text": "one"}
LONG = {"text": "one two three"}


class Scripted(Family):
    """Gives what its script says, by text."""

    name = "scripted"

    def __init__(self, outputs: Mapping[str, Any], **config: Any) -> None:
        super().__init__(Path(), config)
        self.outputs = outputs
        self.ran: list[tuple[int, str]] = []
        self.threads: set[int] = set()

    def build(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def warmup_inputs(self) -> tuple[Mapping[str, Any], ...]:
        return ()

    def rehearse(self, instance: Instance, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        self.threads.add(threading.get_ident())
        self.ran.append((instance.number, inputs["text"]))
        return {"audio": torch.as_tensor(self.outputs[inputs["text"]])}


def warmed(family: Family, count: int, *inputs: Mapping[str, Any]) -> float:
    with ThreadPoolExecutor(count) as threads:
        return warm_up(family, instances(count), inputs, threads)


def instances(count: int) -> list[Instance]:
    return [Instance(torch.nn.Identity(), torch.device("cpu"), n) for n in range(count)]


def test_every_input_runs_on_every_instance() -> None:
    family = Scripted({"one": [0.5], "one two three": [0.5, 0.5]})
    assert warmed(family, 2, ONE, LONG) > 0
    assert sorted(family.ran) == [(n, i["text"]) for n in range(2) for i in (ONE, LONG)]
    assert len(family.threads) == 2, "each thread that computes warms an instance"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ([], "warmup_empty"),
        ([0.5, math.nan], "warmup_not_finite"),
        ([0.5, math.inf], "warmup_not_finite"),
        ([0.0, 1e-5], "warmup_silent"),
    ],
)
def test_an_output_no_client_should_get_is_refused(output: list[float], reason: str) -> None:
    with pytest.raises(WarmupFailed) as caught:
        warmed(Scripted({"one": output}), 1, ONE)
    assert caught.value.reason == reason


def test_more_text_that_is_less_sound_is_refused() -> None:
    with pytest.raises(WarmupFailed, match="input 1 has more text than 0, but 1 samples where 0 has 2") as e:
        warmed(Scripted({"one": [0.5, 0.5], "one two three": [0.5]}), 1, ONE, LONG)
    assert e.value.reason == "warmup_length"


def test_lengths_of_different_voices_or_speeds_are_not_compared() -> None:
    family = Scripted({"one": [0.5, 0.5], "one two three": [0.5]})
    warmed(family, 1, ONE, {**LONG, "speed": 4.0})


def test_sample_rate_other_than_declared_is_refused() -> None:
    family = Scripted({"one": [0.5]}, sample_rate=24000)
    family.sample_rate = 16000  # type: ignore[attr-defined]
    with pytest.raises(WarmupFailed) as caught:
        warmed(family, 1, ONE)
    assert caught.value.reason == "warmup_sample_rate"
