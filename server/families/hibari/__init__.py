"""The family ``hibari``: English speech at 24 kHz, small enough for one CPU thread.

Joins the reader (text.py), the networks (network.py) and the package's signal synthesis, and shapes the
sound of each piece: silence cut, edges faded, pauses put between. Holds nothing that a request changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hibari import dsp

from server.families.base import InputError, Instance, SpeechFamily, SpeechRequest, Voice
from server.families.hibari.network import HibariNetwork
from server.families.hibari.shape import finish, pause
from server.families.hibari.text import Piece, SpellingAlphabet, TextReader

MIN_SPEED, MAX_SPEED = 0.25, 4.0

# Two sentences, an amount of money, a word in no lexicon, another speed: every network and every rule that
# is not plain dictionaries. Fast, because a replaced worker waits for it: a run costs 20 ms plus its length.
WARMUP = ({"text": "Zorblax: $9. OK?", "speed": MAX_SPEED},)


class Hibari(SpeechFamily):
    """The voice of hibari-tts, American English.

    Made in the master before it forks: it loads the lexicons (plain dictionaries, which forks share)
    and computes nothing, so that no thread pool starts there.
    """

    name = "hibari"
    deterministic = True  # its noise comes from the request's seed
    sample_rate: int = dsp.SR

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        super().__init__(directory, config)
        self._reader = TextReader(config["symbols"])
        self._alphabet = SpellingAlphabet(**config["spelling"])
        self._voice = Voice(**config["voice"])

    def build(self) -> torch.nn.Module:
        """Return the three networks, every parameter on the meta device; they have no buffers."""
        return HibariNetwork(
            letters=len(self._alphabet.letters),
            phonemes=len(self._alphabet.phonemes),
            slots=self._alphabet.slots,
            max_letters=self._alphabet.max_letters,
        )

    def voices(self) -> tuple[Voice, ...]:
        """List the one voice of this version."""
        return (self._voice,)

    def warmup_inputs(self) -> tuple[Mapping[str, Any], ...]:
        """Return texts that reach every network and every rule of the reader."""
        return tuple({"voice": self._voice.id, **inputs} for inputs in WARMUP)

    def speak(self, instance: Instance, request: SpeechRequest) -> Iterator[torch.Tensor]:
        """Yield one (samples,) float32 tensor a sentence, on the CPU; a long sentence is several.

        The first piece is read before this returns, so a text without speech fails here.

        Raises:
            InputError: nothing in the text can be spoken, or speed or language is out of range.
        """
        _check(request)
        pieces = self._reader.pieces(request.text, lambda word: self._spell(instance, word))
        first = next(pieces, None)
        if first is None:
            raise InputError("input", "holds nothing that can be spoken in English")
        return self._sounds(instance, request, chain((first,), pieces))

    def _spell(self, instance: Instance, word: str) -> str | None:
        letters = self._alphabet.encode(word)
        network: Any = instance.module
        return self._alphabet.decode(network.spell(letters)) if letters else None

    def _sounds(
        self, instance: Instance, request: SpeechRequest, pieces: Iterator[Piece]
    ) -> Iterator[torch.Tensor]:
        # The request's own generator: the synthesis shapes noise, and numpy's global one is shared.
        noise = np.random.default_rng(request.seed % 2**64)
        silence = np.zeros(0, np.float32)
        for piece in pieces:
            spectra = instance.module(piece.symbols, request.speed)
            samples = dsp.synth(*(part.numpy() for part in spectra), noise)
            yield torch.from_numpy(np.concatenate((silence, finish(samples, self.sample_rate))))
            silence = pause(piece.ending, request.speed, self.sample_rate)


def _check(request: SpeechRequest) -> None:
    if not MIN_SPEED <= request.speed <= MAX_SPEED:
        raise InputError("speed", f"is {request.speed}; this voice speaks at {MIN_SPEED} to {MAX_SPEED}")
    if request.language is not None and request.language.lower().partition("-")[0] != "en":
        raise InputError("language", f"is {request.language!r}; this voice speaks English")
