"""Speaking: refusals, sound that begins and ends in silence, and nothing shared between requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import numpy as np
import pytest
import torch

from server.families.base import InputError, SpeechRequest
from server.families.hibari.shape import PEAK, finish, pause
from tests.hibari import attach, save, spoken

RATE = 24_000


@pytest.fixture(scope="module")
def voice(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    family = save(tmp_path_factory.mktemp("hibari"))
    yield family, attach(family)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "... 漢字"}, "input"),
        ({"text": "Hi.", "speed": 0.2}, "speed"),
        ({"text": "Hi.", "speed": 4.1}, "speed"),
        ({"text": "Hi.", "speed": float("nan")}, "speed"),
        ({"text": "Hi.", "language": "fr"}, "language"),
    ],
)
def test_refusal_comes_before_the_first_piece(voice, fields, field):
    family, instance = voice
    with pytest.raises(InputError) as refusal:
        family.speak(instance, SpeechRequest(voice="heart", **fields))
    assert refusal.value.field == field


def test_tensors_speak_the_same_bytes_and_a_refusal_names_the_tensor(voice):
    family, instance = voice
    inputs = {"text": np.array([b"Hello."], object), "seed": torch.tensor([7])}
    outputs = family.infer(instance, inputs, {})
    assert torch.equal(outputs["audio"], spoken(family, instance, "Hello.", seed=7))
    assert outputs["sample_rate"].tolist() == [RATE]
    with pytest.raises(InputError) as refusal:
        family.infer(instance, {"text": np.array(["漢字".encode()], object)}, {})
    assert refusal.value.field == "text"


def test_one_piece_a_sentence_in_range_and_quiet_at_both_ends(voice):
    family, instance = voice
    pieces = list(family.speak(instance, SpeechRequest(text="No. Why? Go!", voice="heart")))
    assert len(pieces) == 3
    for piece in pieces:
        assert piece.dtype == torch.float32
        assert piece.ndim == 1
        assert 0.05 < piece.abs().max() <= 1.0
        assert max(abs(piece[0]), abs(piece[-1])) < 1e-3
    assert all(abs(float(before[-1] - after[0])) < 1e-3 for before, after in pairwise(pieces))


def test_speed_changes_the_duration(voice):
    family, instance = voice
    slow, fast = (spoken(family, instance, "Good morning.", speed=speed).numel() for speed in (0.8, 1.6))
    assert slow > 1.5 * fast


def test_same_seed_gives_the_same_bytes_whatever_ran_before(voice):
    family, instance = voice
    first = spoken(family, instance, "Hello.", seed=7)
    other = spoken(family, instance, "Hello.", seed=8)
    np.random.default_rng()
    torch.manual_seed(1)
    assert torch.equal(first, spoken(family, instance, "Hello.", seed=7))
    assert not torch.equal(first, other)


def test_negative_seed_is_a_seed(voice):
    family, instance = voice
    assert torch.equal(*(spoken(family, instance, "Hi.", seed=-5) for _ in range(2)))


def test_two_threads_on_two_instances_give_the_bytes_each_gives_alone(voice):
    family, first = voice
    instances = (first, attach(family, number=1))
    texts = ("Zorblax is here.", "Kubernetes is not.")
    alone = [spoken(family, i, text) for i, text in zip(instances, texts, strict=True)]
    start = Barrier(2)

    def speak(number: int) -> list[torch.Tensor]:
        start.wait(timeout=10)
        return [spoken(family, instances[number], texts[number]) for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        for expected, answers in zip(alone, pool.map(speak, range(2)), strict=True):
            assert all(torch.equal(expected, answer) for answer in answers)


def test_warmup_speaks_with_the_first_voice(voice):
    family, instance = voice
    for inputs in family.warmup_inputs():
        audio = family.rehearse(instance, inputs)["audio"]
        assert audio.abs().max() > 0.05


def test_the_one_voice_is_heart(voice):
    assert [(v.id, v.language) for v in voice[0].voices()] == [("heart", "en-US")]


def test_finish_cuts_silence_and_fades_both_edges():
    samples = np.concatenate((np.zeros(RATE), np.full(RATE, 0.5), np.zeros(RATE))).astype(np.float32)
    shaped = finish(samples, RATE)
    assert shaped.size == RATE + round(0.15 * RATE)
    assert shaped[0] == 0.0
    assert samples.max() == shaped.max()


def test_finish_scales_what_is_too_loud():
    assert float(np.abs(finish(np.full(RATE, 3.0, np.float32), RATE)).max()) == pytest.approx(PEAK)


@pytest.mark.parametrize("size", [0, 1, 2, 100])
def test_finish_takes_any_length(size):
    assert finish(np.zeros(size, np.float32), RATE).size == size


def test_pause_depends_on_the_mark_and_the_speed():
    assert pause(".", 1.0, RATE).size > pause(",", 1.0, RATE).size > pause("a", 1.0, RATE).size == 0
    assert pause(".", 2.0, RATE).size * 2 == pause(".", 1.0, RATE).size
