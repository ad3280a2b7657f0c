"""The three networks of the hibari family: prosody, acoustic and spelling, as plain torch modules.

Knows tensors only; text becomes symbol numbers in text.py, spectra become sound in the family.
Sizes are those of the heart voice in hibari-tts 0.2.1, read from its ONNX graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from server.families.hibari.layers import ConvBlock, TransformerLayer
from server.families.meta_layers import Conv1d, Embedding, LayerNorm, Linear, parameter

SYMBOLS = 178
BINS = 601
# The scale the prosody network's F0 output was trained at, in hertz.
F0_SCALE_HZ = 100.0


class Spectra(NamedTuple):
    """What the acoustic network says about one sentence; a frame is 12.5 ms.

    The first five are (601, frames) float32: harmonic log magnitude and phase offset, noise log
    magnitude, free-phase log magnitude and its phase. ``f0_hz`` is (frames,) float32.
    """

    harmonic: Tensor
    offset: Tensor
    noise: Tensor
    free: Tensor
    phase: Tensor
    f0_hz: Tensor


class TextEncoder(nn.Module):
    """Symbols to vectors: two convolution blocks, then one transformer layer applied *rounds* times."""

    def __init__(self, size: int, *, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.embedding = Embedding(SYMBOLS, size)
        self.blocks = nn.Sequential(*(ConvBlock(size, 5, expansion=2) for _ in range(2)))
        self.attention = TransformerLayer(size, heads=2, hidden=2 * size)
        self.norm = LayerNorm(size)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map symbols (1, length) int64 to (1, channels, length)."""
        x = self.blocks(self.embedding(symbols).transpose(1, 2)).transpose(1, 2)
        for _ in range(self.rounds):
            x = self.attention(x)
        encoded: Tensor = self.norm(x)
        return encoded.transpose(1, 2)


class Prosody(nn.Module):
    """How long each symbol lasts, and the pitch and loudness of every half frame."""

    def __init__(self) -> None:
        super().__init__()
        size = 192
        self.text = TextEncoder(size, rounds=6)
        self.duration_in = Conv1d(size, size, 3)
        self.duration_out = Conv1d(size, 1, 1)
        self.curve_in = Conv1d(size, size, 1)
        self.curve_blocks = nn.Sequential(
            *(ConvBlock(size, 7, expansion=2, dilation=dilation) for dilation in (1, 2, 4, 8, 1, 2))
        )
        self.curve_out = Conv1d(size, 4, 1)

    def forward(self, symbols: Tensor, speed: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return durations (length,) int64 in 25 ms steps, F0 in hertz and energy, both (1, frames)."""
        encoded = self.text(symbols)
        log_durations = self.duration_out(F.gelu(self.duration_in(encoded)))[0, 0].float()
        # Every symbol keeps at least one step: a phoneme sped away changes the word.
        durations = torch.round((log_durations.exp() - 1.0) / speed).clamp(min=1.0).long()
        steps = encoded.repeat_interleave(durations, dim=2)
        curves = self.curve_out(self.curve_blocks(self.curve_in(steps)))
        # Four channels are two curves of two values a step, the earlier half first.
        f0, energy = curves.view(1, 2, 2, -1).transpose(2, 3).reshape(1, 2, -1).unbind(1)
        return durations, f0 * F0_SCALE_HZ, energy


class Acoustic(nn.Module):
    """Symbols with their durations, pitch and loudness to spectra."""

    def __init__(self) -> None:
        super().__init__()
        size, text_size = 256, 128
        self.text = TextEncoder(text_size, rounds=4)
        self.frames_in = Conv1d(text_size + 2, size, 7)
        self.blocks = nn.Sequential(*(ConvBlock(size, 7, expansion=3) for _ in range(8)))
        self.norm = LayerNorm(size)
        self.head = Linear(size, 5 * BINS)

    def forward(self, symbols: Tensor, durations: Tensor, f0_hz: Tensor, energy: Tensor) -> Tensor:
        """Return (5 * 601, frames): the five spectra of Spectra, one after the other."""
        text = self.text(symbols).repeat_interleave(2 * durations, dim=2)
        pitch = torch.log1p(F.relu(f0_hz)) / 5.0
        frames = self.frames_in(torch.cat((text, pitch[:, None], energy[:, None]), dim=1))
        spectra: Tensor = self.head(self.norm(self.blocks(frames).transpose(1, 2)))
        return spectra[0].transpose(0, 1)


class Spelling(nn.Module):
    """Letters of a word no lexicon knows to phonemes, all at once (each letter has four slots)."""

    def __init__(self, *, letters: int, phonemes: int, slots: int, max_letters: int) -> None:
        super().__init__()
        size = 128
        self.phonemes = phonemes
        self.embedding = Embedding(letters + 1, size)
        self.position = parameter(max_letters, size)
        self.layers = nn.Sequential(*(TransformerLayer(size, heads=4, hidden=3 * size) for _ in range(4)))
        self.norm = LayerNorm(size)
        self.head = Linear(size, slots * (phonemes + 1))

    def forward(self, letters: Tensor) -> Tensor:
        """Map letters (1, length) int64 to (length * slots,) int64; 0 is the blank of CTC."""
        x = self.embedding(letters) + self.position[: letters.shape[1]]
        choices: Tensor = self.head(self.norm(self.layers(x)))
        return choices.view(-1, self.phonemes + 1).argmax(dim=-1)


class HibariNetwork(nn.Module):
    """Everything one version holds; stateless, so instances may share it or its parameters.

    Args:
        letters, phonemes, slots, max_letters: the sizes of the spelling network's alphabets.
    """

    def __init__(self, *, letters: int, phonemes: int, slots: int, max_letters: int) -> None:
        super().__init__()
        self.prosody = Prosody()
        self.acoustic = Acoustic()
        self.spelling = Spelling(letters=letters, phonemes=phonemes, slots=slots, max_letters=max_letters)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor([numbers], dtype=torch.int64, device=self.acoustic.head.weight.device)

    @torch.inference_mode()
    def forward(self, symbols: Sequence[int], speed: float) -> Spectra:
        """Return the spectra of one sentence, on the CPU. *symbols* starts and ends with the pad 0."""
        numbers = self._tensor(symbols)
        durations, f0_hz, energy = self.prosody(numbers, speed)
        spectra = self.acoustic(numbers, durations, f0_hz, energy).float().cpu()
        harmonic, offset, noise, free, phase = spectra.split(BINS)
        return Spectra(harmonic, offset, noise, free, phase, f0_hz[0].float().cpu())

    @torch.inference_mode()
    def spell(self, letters: Sequence[int]) -> list[int]:
        """Return one phoneme number a slot for the letters of a word; 0 is the blank."""
        slots: list[int] = self.spelling(self._tensor(letters)).tolist()
        return slots
