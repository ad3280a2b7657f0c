"""How one piece of speech begins, ends and joins the next, as numpy arrays of samples.

The synthesis leaves about 0.3 s of silence before a sentence and 0.45 s after it (measured); uncut, that
is slow to the first sound and halting between sentences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

# Quieter than this is silence: the floor between words is below 4e-4, speech peaks at 0.2 to 0.5.
SILENCE = 2e-3
# Kept around what is louder: a soft onset ("h", "th") and the decay of a last fricative.
BEFORE_S, AFTER_S = 0.05, 0.10
FADE_S = 0.005
PEAK = 0.99
# Added to the 0.15 s kept around the seam, so that a full stop is about 0.35 s of silence; s at speed 1.
PAUSES_S = {**dict.fromkeys(".!?…", 0.20), **dict.fromkeys(",;:—", 0.08)}


def pause(ending: str, speed: float, sample_rate: int) -> Samples:
    """Return the silence after a piece that ends with the mark *ending*, shorter when speech is faster."""
    return np.zeros(round(PAUSES_S.get(ending, 0.0) / speed * sample_rate), np.float32)


def finish(samples: NDArray[Any], sample_rate: int) -> Samples:
    """Cut the silence around (samples,) float32, fade both edges, and keep the peak below 1."""
    loud = np.flatnonzero(np.abs(samples) > SILENCE)
    if loud.size:
        start = max(0, int(loud[0]) - round(BEFORE_S * sample_rate))
        samples = samples[start : int(loud[-1]) + 1 + round(AFTER_S * sample_rate)]
    shaped = samples.astype(np.float32, copy=True)
    length = min(round(FADE_S * sample_rate), shaped.size // 2)
    ramp = np.linspace(0.0, 1.0, length, endpoint=False, dtype=np.float32)
    shaped[:length] *= ramp
    shaped[shaped.size - length :] *= ramp[::-1]
    peak = float(np.abs(shaped).max(initial=0.0))
    # Scaled, not clipped: a clipped vowel is heard, a sentence a decibel softer is not.
    return shaped * np.float32(PEAK / peak) if peak > PEAK else shaped
