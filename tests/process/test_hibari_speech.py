"""The hibari family against the package it comes from, and against what a recogniser hears."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hibari import Hibari as Package
from hypothesis import given, settings
from hypothesis import strategies as st

from server.families.base import InputError, Instance
from server.families.hibari import Hibari
from tests.hibari import attach, imported, save, spoken
from tests.speech import overlap, words_heard

pytestmark = pytest.mark.speech

# What is written, and what is to be heard where the two differ.
SENTENCES = (
    ("The quick brown fox jumps over the lazy dog.", None),
    ("Dr. Smith lives on St. James Street with Mrs. Brown.", None),
    ("The U.S. president flew to Paris on Monday.", "the u s president flew to paris on monday"),
    ("The meeting is on March 3rd, 2024, in London.",
     "the meeting is on march third twenty twenty four in london"),
    ("She paid $9.99 for a ticket to Chicago.", "she paid nine dollars ninety nine for a ticket to chicago"),
    ("There were 1,250 people in the old theater.", None),
    ("The train leaves at 7:30 pm from platform 12.",
     "the train leaves at seven thirty p m from platform twelve"),
    ("About 45% of the students passed the final exam.", None),
    ("Michael and Elizabeth moved to San Francisco in 1999.", None),
    ("My favorite books are old, heavy, and full of pictures.", None),
    ("Is it going to rain tomorrow? I hope not!", None),
    ("Two plus two equals four, and ten minus three equals seven.", None),
    ("Please call me back before the end of the week; it is important.", None),
)  # fmt: skip


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hibari, Instance]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    family = save(tmp_path_factory.mktemp("hibari"))
    yield family, attach(family)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def package() -> Package:
    return Package()


@pytest.mark.parametrize("text", [sentence for sentence, _ in SENTENCES[:6]])
@pytest.mark.parametrize("speed", [1.0, 1.5])
def test_spectra_and_length_agree_with_the_package(voice, package, text, speed):
    """onnxruntime quantises activations as well, so a duration may round the other way."""
    _, instance = voice
    symbols = package.ids(package.g2p(text))
    inputs = {"ids": np.asarray([symbols], np.int64), "speed": np.asarray([speed], np.float32)}
    theirs = package.sess.run(None, inputs)
    ours = instance.module(symbols, speed)
    frames = ours.f0_hz.shape[0]
    assert frames == pytest.approx(theirs[-1].shape[1], rel=0.03)
    if frames == theirs[-1].shape[1]:
        for expected, got in zip(theirs[:4], ours, strict=False):
            assert np.corrcoef(expected[0].ravel(), got.numpy().ravel())[0, 1] > 0.998


@pytest.mark.parametrize("word", ["Zorblaxian", "Xiaomi", "Kubernetes", "ñandú", "qwrtz", "Brobdingnag"])
def test_spelling_agrees_with_the_package(voice, package, word):
    family, instance = voice
    assert family._spell(instance, word) == package.g2p.oov(word)


@pytest.mark.parametrize(("text", "expected"), SENTENCES)
def test_words_are_heard(voice, text, expected):
    family, instance = voice
    heard = words_heard(spoken(family, instance, text), family.sample_rate)
    assert overlap(expected or text, heard) >= 0.8, heard


def test_long_text_is_heard_to_its_end(voice):
    """A hundred words without a full stop are cut at clauses and words, and none is lost."""
    family, instance = voice
    text = "the old man walked slowly to the harbor and looked at the boats " * 8
    samples = spoken(family, instance, text)
    assert overlap(text, words_heard(samples, family.sample_rate)) >= 0.8


@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=40), seed=st.integers())
def test_any_text_is_spoken_or_refused(voice, text, seed):
    family, instance = voice
    with suppress(InputError):
        samples = spoken(family, instance, text, seed=seed, speed=4.0)
        assert torch.isfinite(samples).all()
        assert samples.abs().max() <= 1.0


STARTED = """
import os, sys, torch
before = len(os.listdir("/proc/self/task"))
from contextlib import suppress
from pathlib import Path
from server.families.hibari import Hibari
import json
Hibari(Path(), json.load(sys.stdin)).build()
print(len(os.listdir("/proc/self/task")) - before)
print([name for name in ("onnx", "onnxruntime", "torch._dynamo") if name in sys.modules])
"""


@pytest.mark.process
def test_starting_takes_no_thread_and_no_importer():
    """The master builds the family before it forks: a thread there would be lost in the workers."""
    root = Path(__file__).parents[2]
    # Where scipy is installed the package takes its FFT, and with it an OpenBLAS, which like numpy's ends
    # its own threads before a fork: those are not counted.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", STARTED], input=json.dumps(imported().config), cwd=root, env=environment,
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == ["0", "[]"]
