"""The first requests of a process that was not warmed: `python -m benchmarks.unwarmed MODELS`.

Attaches the current version as a worker does, then times inferences; prints their milliseconds as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from server.generation import Generation
from weights.store import Store

CALLS = 12


def main() -> None:
    """Time CALLS inferences of the first warm-up input, without warm-up."""
    torch.set_num_threads(1)
    generation = Generation.load(1, Store(Path(sys.argv[1])).current())
    (instance,) = generation.build_instances(1, torch.device("cpu"))
    declared = (generation.manifest.warmup or generation.family.warmup_inputs())[0]
    spans = []
    with torch.inference_mode():
        for _ in range(CALLS):
            began = time.monotonic()
            generation.family.rehearse(instance, declared)
            spans.append((time.monotonic() - began) * 1000)
    print(json.dumps(spans))


if __name__ == "__main__":
    main()
