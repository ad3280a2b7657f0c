"""Run the measurements and write `benchmarks/RESULTS.md`: `python -m benchmarks [SECTION ...]`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import protocols, serving, swapping, warmth
from benchmarks.report import Figure, machine, table
from benchmarks.tones import publish_tone

RESULTS = Path(__file__).with_name("RESULTS.md")


def main() -> None:
    """Measure what the arguments name, all by default, one after the other."""
    wanted = sys.argv[1:] or list(MEASURED)
    with tempfile.TemporaryDirectory(prefix="warmserve-bench-") as directory:
        scratch = Path(directory)
        sections = {name: MEASURED[name](scratch) for name in wanted}
    text = f"# Results\n\n{time.strftime('%Y-%m-%d')}, {machine()}.\n"
    for name, figures in sections.items():
        text += f"\n## {name.capitalize()}\n\n{table(figures)}\n"
    RESULTS.write_text(text)
    print(text)


def _import_hibari(models: Path) -> Path:
    return _import("hibari", models)


def _import(family: str, models: Path) -> Path:
    command = [str(Path(sys.executable).with_name("warmserve")), "import", family]
    subprocess.run(
        command, env={**os.environ, "WARMSERVE_MODELS": str(models)}, check=True, stdout=subprocess.DEVNULL
    )
    return models


def _serving(scratch: Path) -> list[Figure]:
    hibari, tone = _import_hibari(scratch / "hibari"), scratch / "tone"
    publish_tone(tone)
    return [
        *serving.start(hibari, scratch),
        *serving.replacement(hibari, scratch),
        *serving.one_copy(hibari, scratch),
        *serving.fairness(tone, scratch),
        *serving.overhead(tone, scratch),
    ]


def _swapping(scratch: Path) -> list[Figure]:
    return [
        *swapping.duration(scratch, workers=2),
        *swapping.duration(scratch, workers=4),
        *swapping.memory(scratch),
    ]


def _warmth(scratch: Path) -> list[Figure]:
    hibari, large = _import_hibari(scratch / "warm-hibari"), scratch / "warm-large"
    publish_tone(large, ballast_mb=512)
    tone = {"model": "tone", "voice": "sine", "input": "hello", "response_format": "wav"}
    return [
        *warmth.first_request("hibari", hibari, scratch, serving.SENTENCE),
        *warmth.first_request("512 MB model", large, scratch, tone),
        *warmth.keepalive(hibari, scratch),
        warmth.scrape(hibari, scratch, 2),
        warmth.scrape(hibari, scratch, 8),
        warmth.drift(hibari, scratch, {**serving.SENTENCE, "input": "Hi."}),
    ]


def _protocols(scratch: Path) -> list[Figure]:
    publish_tone(scratch / "overload-models")
    return [
        *protocols.tiny_model(scratch),
        *protocols.batching(_import("minilm", scratch / "minilm"), scratch),
        *protocols.first_audio(_import_hibari(scratch / "spoken"), scratch),
        *protocols.overload(scratch / "overload-models", scratch),
    ]


MEASURED = {"serving": _serving, "swapping": _swapping, "warmth": _warmth, "protocols": _protocols}

if __name__ == "__main__":
    main()
