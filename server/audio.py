"""Audio as clients ask for it: float samples in, bytes of one format out, piece by piece.

Knows nothing of HTTP. Codecs and containers are PyAV's; WAV and PCM are plain samples and need neither.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import av
import numpy as np
import numpy.typing as npt

PCM_RATE = 24000  # what clients of the OpenAI protocol expect of raw PCM, whatever the model's rate
UNKNOWN_BYTES = 0xFFFFFFFF  # in a WAV header that is sent before the length is known
# An MP3's header with its length is written last; a stream cannot go back, and a zero there looks damaged.
# An Ogg page otherwise gathers a second of sound before any of it is sent.
STREAM_OPTIONS = {"mp3": {"write_xing": "0"}, "ogg": {"page_duration": "200000"}}
Samples = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Format:
    """One response format. ``bit_rate`` is bits a second of mono speech; 0 means without loss."""

    media_type: str
    container: str = ""
    codec: str = ""
    bit_rate: int = 0


FORMATS = {
    "mp3": Format("audio/mpeg", "mp3", "libmp3lame", 64000),
    "opus": Format("audio/ogg", "ogg", "libopus", 32000),
    "aac": Format("audio/aac", "adts", "aac", 64000),
    "flac": Format("audio/flac", "flac", "flac"),
    "wav": Format("audio/wav"),
    "pcm": Format("audio/pcm"),
}


class Encoder(Protocol):
    """One stream being made. Belongs to one thread at a time; any number may be at work at once."""

    def feed(self, samples: npt.ArrayLike) -> bytes:
        """Return the bytes that are ready after *samples*, ``(samples,) float32``, clipped to [-1, 1]."""

    def finish(self) -> bytes:
        """Return the rest; the encoder takes no more."""


def create_encoder(name: str, sample_rate: int, *, streamed: bool = True) -> Encoder:
    """Return an encoder to the format *name*, a key of `FORMATS`, for mono audio at *sample_rate* Hz.

    Not *streamed*, everything comes from ``finish()``, and headers tell the length: a player then shows the
    duration, and the silence that an MP3 encoder puts in front is cut off.
    """
    form = FORMATS[name]
    if form.codec:
        return _Compressed(form, sample_rate, streamed=streamed)
    if name == "pcm":
        return _Plain(sample_rate, PCM_RATE)
    return _Wav(sample_rate, streamed=streamed)


def encode(pieces: Iterable[npt.ArrayLike], name: str, sample_rate: int) -> bytes:
    """Return all of *pieces* as one file of the format *name*, with its length in the header."""
    encoder = create_encoder(name, sample_rate, streamed=False)
    parts = [encoder.feed(piece) for piece in pieces]
    return b"".join([*parts, encoder.finish()])


def wav_header(sample_rate: int, audio_bytes: int) -> bytes:
    """Return the 44 bytes in front of signed 16-bit mono samples (RIFF WAVE, format 1)."""
    riff_bytes = UNKNOWN_BYTES if audio_bytes == UNKNOWN_BYTES else 36 + audio_bytes
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return (
        struct.pack("<4sI4s", b"RIFF", riff_bytes, b"WAVE") + form + struct.pack("<4sI", b"data", audio_bytes)
    )


class _Plain:
    """Signed 16-bit little-endian mono, resampled where the rates differ."""

    def __init__(self, sample_rate: int, output_rate: int) -> None:
        self._sample_rate = sample_rate
        self._resampler: Any = None
        if output_rate != sample_rate:
            self._resampler = av.AudioResampler(format="flt", layout="mono", rate=output_rate)

    def feed(self, samples: npt.ArrayLike) -> bytes:
        clipped = _clip(samples)
        if self._resampler is None:
            return _to_int16(clipped)
        return self._resample(_frame(clipped, self._sample_rate)) if len(clipped) else b""

    def finish(self) -> bytes:
        return self._resample(None) if self._resampler is not None else b""

    def _resample(self, frame: av.AudioFrame | None) -> bytes:
        # Clipped again: the filter of the resampler swings over at full scale.
        return b"".join(_to_int16(_clip(out.to_ndarray()[0])) for out in self._resampler.resample(frame))


class _Wav:
    """One header, then plain samples. A header for each piece would click."""

    def __init__(self, sample_rate: int, *, streamed: bool) -> None:
        self._sample_rate = sample_rate
        self._pending = wav_header(sample_rate, UNKNOWN_BYTES) if streamed else None
        self._held: list[bytes] = []

    def feed(self, samples: npt.ArrayLike) -> bytes:
        encoded = _to_int16(_clip(samples))
        if self._pending is None:
            self._held.append(encoded)
            return b""
        header, self._pending = self._pending, b""
        return header + encoded

    def finish(self) -> bytes:
        if self._pending is not None:
            return self._pending
        encoded = b"".join(self._held)
        return wav_header(self._sample_rate, len(encoded)) + encoded


class _Compressed:
    """One codec in its container. The codec context resamples and cuts frames itself."""

    def __init__(self, form: Format, sample_rate: int, *, streamed: bool) -> None:
        self._sample_rate = sample_rate
        self._sink: _Sink | io.BytesIO = _Sink() if streamed else io.BytesIO()
        options = STREAM_OPTIONS.get(form.container, {}) if streamed else {}
        container: Any = av.open(self._sink, "w", format=form.container, options=options)
        self._container = container
        rate = _nearest_rate(form, sample_rate)
        self._stream = container.add_stream(form.codec, rate=rate, layout="mono")
        self._stream.codec_context.thread_count = 1  # the worker's cores belong to the model
        if form.bit_rate:
            self._stream.bit_rate = form.bit_rate

    def feed(self, samples: npt.ArrayLike) -> bytes:
        clipped = _clip(samples)
        if len(clipped):
            self._container.mux(self._stream.encode(_frame(clipped, self._sample_rate)))
        return self._sink.take() if isinstance(self._sink, _Sink) else b""

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.take() if isinstance(self._sink, _Sink) else self._sink.getvalue()


class _Sink:
    """A file that can only be appended to, and from which what was written is taken away."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, part: bytes) -> int:
        self._parts.append(bytes(part))
        return len(part)

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _nearest_rate(form: Format, sample_rate: int) -> int:
    """Return the lowest rate of the codec that loses nothing, else its highest."""
    rates = av.Codec(form.codec, "w").audio_rates or [sample_rate]
    return min((rate for rate in rates if rate >= sample_rate), default=max(rates))


def _clip(samples: npt.ArrayLike) -> Samples:
    return np.clip(np.asarray(samples, dtype=np.float32), -1.0, 1.0)


def _to_int16(clipped: Samples) -> bytes:
    return np.rint(clipped * 32767).astype("<i2").tobytes()


def _frame(clipped: Samples, sample_rate: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(clipped)[np.newaxis], format="flt", layout="mono")
    frame.sample_rate = sample_rate
    return frame
