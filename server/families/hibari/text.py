"""Text to the symbol numbers that the networks read, one bounded piece of speech at a time.

Knows phonemes and alphabets; knows nothing of tensors. Nothing here changes after it is
built, so threads share it; what spells unknown words is handed in by each instance.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hibari.g2p import G2P

from server.families.hibari.sentences import bounded, sentences, tidy

# Longest stretch read at once. The front end's patterns are quadratic in it at worst; the networks'
# memory and the time to the first sound grow with the second (300 symbols are about 20 s of speech).
MAX_CHARACTERS = 400
MAX_SYMBOLS = 300
# What the vocabulary holds besides sounds: punctuation, stress and intonation.
SILENT = frozenset(' ;:,.!?—…"()“”ˈˌː↓→↗↘')

Speller = Callable[[str], str | None]


@dataclass(frozen=True)
class Piece:
    """A stretch of speech for one run of the networks: symbol numbers between two pads, and its last mark."""

    symbols: tuple[int, ...]
    ending: str


@lru_cache(maxsize=1)
def load_front_end() -> Any:
    """Load the American lexicons and the tagger once a process; forks share the pages.

    Plain dictionaries, read only, so versions of one process share them too. Collecting garbage while
    270,000 entries are built is a third of the time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return G2P(oov=False)
    finally:
        if collecting:
            gc.enable()


class SpellingAlphabet:
    """The letters and phonemes of the spelling network, as numbers from 1; 0 is its blank."""

    def __init__(self, *, letters: str, phonemes: str, max_letters: int, slots: int) -> None:
        self.letters = {letter: number for number, letter in enumerate(letters, 1)}
        self.phonemes = phonemes
        self.max_letters = max_letters
        self.slots = slots

    def encode(self, word: str) -> list[int]:
        """Return the numbers of the letters it knows, at most ``max_letters`` of them."""
        return [self.letters[c] for c in word if c in self.letters][: self.max_letters]

    def decode(self, slots: Sequence[int]) -> str:
        """Read the network's answer: a repeat is one phoneme, a blank none (CTC)."""
        previous = [0, *slots]
        return "".join(
            self.phonemes[n - 1] for n, before in zip(slots, previous, strict=False) if n not in (0, before)
        )


class TextReader:
    """Reads text for one version: its symbols, and the front end that all versions share."""

    def __init__(self, symbols: Mapping[str, int]) -> None:
        self.symbols = symbols
        self._front_end = load_front_end()

    def pieces(self, text: str, spell: Speller) -> Iterator[Piece]:
        """Yield what can be spoken of *text*, in order; nothing if nothing can.

        Args:
            spell: phonemes of a word that is in no lexicon, or None.
        """
        # A copy holds the same tables; only what spells unknown words is this caller's own.
        front_end = copy.copy(self._front_end)
        front_end._oov = spell
        for sentence in sentences(tidy(text)):
            for part in bounded(sentence, MAX_CHARACTERS):
                for phonemes in bounded(_phonemes(front_end, part), MAX_SYMBOLS):
                    known = [c for c in phonemes if c in self.symbols]
                    if not SILENT.issuperset(known):
                        yield Piece((0, *(self.symbols[c] for c in known), 0), known[-1])


def _phonemes(front_end: Any, text: str) -> str:
    """Return the phonemes of *text*; a word that the front end trips over is left out, not the rest."""
    try:
        phonemes: str = front_end(text)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        words = text.split()
        if len(words) < 2:
            return ""
        middle = len(words) // 2
        halves = (_phonemes(front_end, " ".join(half)) for half in (words[:middle], words[middle:]))
        return " ".join(filter(None, halves))
    return phonemes
