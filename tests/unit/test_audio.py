"""Encoded audio is the audio: decoded again it is as long, as loud, and the same tone."""

from __future__ import annotations

import concurrent.futures
import io
import struct
import subprocess
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from server.audio import FORMATS, PCM_RATE, UNKNOWN_BYTES, create_encoder, encode

RATE = 24000
CODECS = [name for name, form in FORMATS.items() if form.codec]
# Seconds that a stream may be longer than its samples: what the encoder puts in front and its last frame.
# FFmpeg keeps the 6.5 ms in front of an Ogg stream of a single page, which the header tells to skip.
STREAM_DELAY_S = {"mp3": 0.08, "opus": 0.0065, "aac": 0.1, "flac": 0, "wav": 0, "pcm": 0}
FILE_DELAY_S = STREAM_DELAY_S | {"mp3": 0}
Array = np.ndarray[Any, np.dtype[np.float32]]


def tone(seconds: float, rate: int = RATE) -> Array:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def stream(name: str, pieces: list[Any], rate: int = RATE) -> bytes:
    encoder = create_encoder(name, rate)
    return b"".join([*(encoder.feed(piece) for piece in pieces), encoder.finish()])


def decode(name: str, encoded: bytes) -> tuple[Array, int]:
    if name == "pcm":
        return (np.frombuffer(encoded, "<i2") / 32767).astype(np.float32), PCM_RATE
    with av.open(io.BytesIO(encoded)) as container:
        resampler = av.AudioResampler(format="flt", layout="mono")
        frames = [
            out.to_ndarray()[0] for frame in container.decode(audio=0) for out in resampler.resample(frame)
        ]
        return np.concatenate(frames), container.streams.audio[0].rate


def pitch(samples: Array, rate: int) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples)), 1 << 15))
    return float(np.argmax(spectrum) * rate / (1 << 15))


def check(decoded: Array, rate: int, seconds: float, delay_s: float) -> None:
    assert seconds - 0.0005 <= len(decoded) / rate <= seconds + delay_s + 0.0005
    assert pitch(decoded, rate) == pytest.approx(440, abs=1)
    middle = decoded[len(decoded) // 3 : -len(decoded) // 3]
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)


@pytest.mark.parametrize("rate", [22050, 24000, 44100])
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_keeps_length_pitch_and_loudness(name: str, rate: int) -> None:
    samples = tone(0.4, rate)
    check(
        *decode(name, encode([samples[:1001], samples[1001:], samples[:0]], name, rate)),
        0.4,
        FILE_DELAY_S[name],
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_keeps_length_pitch_and_loudness(name: str) -> None:
    check(*decode(name, stream(name, np.array_split(tone(0.4), 7))), 0.4, STREAM_DELAY_S[name])


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_join_without_a_seam(name: str) -> None:
    """A click is a jump; a sine of this pitch and loudness has small steps only."""
    decoded, rate = decode(name, stream(name, np.array_split(tone(0.4), 7)))
    middle = decoded[rate // 8 : -rate // 8]
    assert np.abs(np.diff(middle)).max() < 1.3 * 0.5 * 2 * np.pi * 440 / rate


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_hands_out_bytes_before_its_end(name: str) -> None:
    encoder = create_encoder(name, RATE)
    early = encoder.feed(tone(1)) + encoder.feed(tone(1))
    assert len(early) > len(encoder.finish())


@pytest.mark.parametrize("name", FORMATS)
def test_no_samples_at_all_is_a_valid_end(name: str) -> None:
    assert isinstance(stream(name, []), bytes)
    assert isinstance(encode([np.empty(0, np.float32)], name, RATE), bytes)


def test_a_wav_file_tells_its_length() -> None:
    with wave.open(io.BytesIO(encode([tone(0.5)], "wav", 22050))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (22050, 1, 2)
        assert file.getnframes() == 12000


def test_a_streamed_wav_has_one_header_of_unknown_length() -> None:
    encoded = stream("wav", [tone(0.1), tone(0.1)])
    assert encoded.count(b"RIFF") == encoded.count(b"data") == 1
    assert struct.unpack_from("<I", encoded, 4) == struct.unpack_from("<I", encoded, 40) == (UNKNOWN_BYTES,)
    assert len(encoded) == 44 + 2 * 2 * 2400


@pytest.mark.parametrize("rate", [16000, 24000])
def test_samples_beyond_full_scale_are_clipped_and_never_wrap(rate: int) -> None:
    square = np.sign(tone(0.1, rate)) * 3
    decoded, _ = decode("pcm", encode([square], "pcm", rate))
    expected = np.sign(tone(0.1))
    flat = np.abs(np.convolve(expected, np.ones(15) / 15, "same")) > 0.99  # away from the edges, which ring
    assert flat.sum() > len(flat) / 3
    assert np.abs(decoded[flat] - expected[flat]).max() < 0.3


def test_a_tensor_is_samples_too() -> None:
    assert encode([torch.from_numpy(tone(0.1))], "pcm", RATE) == encode([tone(0.1)], "pcm", RATE)


@pytest.mark.parametrize("name", FORMATS)
def test_encoders_work_side_by_side_in_threads(name: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: encode([tone(0.2)], name, RATE), range(8)))
    # Each Ogg stream has a serial number of its own, which its checksums cover.
    assert len({len(encoded) if name == "opus" else encoded for encoded in found}) == 1


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("streamed", [False, True])
def test_ffmpeg_finds_no_fault(name: str, streamed: bool, tmp_path: Path) -> None:
    pieces = np.array_split(tone(0.5), 3)
    file = tmp_path / f"speech.{name}"
    file.write_bytes(stream(name, pieces) if streamed else encode(pieces, name, RATE))
    command = ["ffmpeg", "-v", "warning", "-xerror", "-i", str(file), "-f", "s16le", "-ar", "24000", "pipe:1"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    faults = [line for line in done.stderr.splitlines() if b"Estimating duration" not in line]
    assert faults == []
    delay_s = (STREAM_DELAY_S if streamed else FILE_DELAY_S)[name]
    assert 0.499 <= len(done.stdout) / 2 / RATE <= 0.501 + delay_s
