"""Check real devices: upload rate, contexts, memory over requests, swap under load: `scripts/gpu_check`."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.load import Load
from benchmarks.report import Figure, machine, median, table
from benchmarks.service import Server, eventually
from benchmarks.tones import publish_tone
from server.accelerators import read_accelerators
from weights.upload import SLOT_BYTES, upload

REQUESTS = 500
WORKERS_A_DEVICE = 2
ROUNDS = 3
DRIFT_MB = 200  # DEVICE_MEMORY_DRIFT's default
UNKNOWN = "not told by NVML"


def main() -> int:
    """Run every check and print one table; 2 where there is no device."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="try the check itself, without a GPU")
    parser.add_argument("--megabytes", type=int, default=2048, help="size of the model")
    parser.add_argument("--upload", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.cpu else "cuda")
    if arguments.upload:
        print(*upload_rates(device, arguments.megabytes))
        return 0
    devices = [] if arguments.cpu else [d.uuid for d in read_accelerators()]
    if not devices and not arguments.cpu:
        print("gpu_check: NVML shows no device", file=sys.stderr)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="warmserve-gpu-") as scratch:
        figures = [*_upload(arguments.cpu, arguments.megabytes), *_serve(Path(scratch), devices, arguments)]
    print(f"{machine()}, {len(devices)} devices, {time.monotonic() - began:.0f} s\n\n{table(figures)}")
    return 0


def _upload(cpu: bool, megabytes: int) -> list[Figure]:
    """The rate of `weights.upload` against the rate of the plainest copy there is."""
    # In a process of its own: a context of this one would be counted with the workers'.
    command = [sys.executable, "-m", "benchmarks.gpu", "--upload", "--megabytes", str(megabytes)]
    done = subprocess.run(command + ["--cpu"] * cpu, capture_output=True, text=True, check=True)
    rate, ceiling = map(float, done.stdout.split())
    return [
        Figure("copy ceiling: one pinned slot, again and again", f"{ceiling:.1f} GB/s"),
        Figure("load rate / copy ceiling", f"{rate / ceiling:.2f} ({rate:.1f} GB/s)", "0.8"),
    ]


def upload_rates(device: torch.device, megabytes: int) -> tuple[float, float]:
    """Return GB/s of uploading *megabytes* from pageable memory, and of copying one pinned slot as often."""
    tensors = {str(n): torch.full((64 << 18,), float(n)) for n in range(max(1, megabytes // 64))}
    size = sum(t.nbytes for t in tensors.values())
    slot = torch.zeros(SLOT_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu")
    target = torch.empty_like(slot, device=device)

    def copy() -> None:
        for _ in range(size // SLOT_BYTES):
            target.copy_(slot, non_blocking=True)
        _wait(device)

    def seconds(work: object) -> float:
        began = time.monotonic()
        work()  # type: ignore[operator]
        return time.monotonic() - began

    seconds(copy)  # the context, and the clock that a GPU raises when it has work
    ceiling = median([seconds(copy) for _ in range(ROUNDS)])
    took = median([seconds(lambda: upload(tensors, device)) for _ in range(ROUNDS)])
    return size / took / 1e9, size / ceiling / 1e9


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _serve(scratch: Path, devices: list[str], arguments: argparse.Namespace) -> list[Figure]:
    models, workers = scratch / "models", WORKERS_A_DEVICE * max(1, len(devices))
    publish_tone(models, ballast_mb=arguments.megabytes)
    before = _contexts()
    env = {"WARMSERVE_DEVICE": "cpu" if arguments.cpu else "cuda"}
    began = time.monotonic()
    server = Server(models, scratch / "run", workers=workers, env=env).wait_ready(within_s=120)
    ready_s = time.monotonic() - began
    try:
        return [
            Figure(f"{arguments.megabytes} MB model, {workers} workers: ready", f"{ready_s:.1f} s"),
            *_placement(server, devices, before),
            *_growth(server),
            *_swap(server, models, arguments.megabytes),
        ]
    finally:
        server.stop()


def _contexts() -> dict[str, int]:
    return {d.uuid: len(d.used_by) for d in read_accelerators()}


def _placement(server: Server, devices: list[str], before: dict[str, int]) -> list[Figure]:
    added = {uuid: count - before.get(uuid, 0) for uuid, count in _contexts().items()}
    placed = [w["device"] for w in server.workers()]
    even = max(map(placed.count, placed)) - min(map(placed.count, placed))
    counts = " ".join(str(added[uuid]) for uuid in devices) or UNKNOWN
    return [
        Figure("contexts on each device", counts, " ".join([str(WORKERS_A_DEVICE)] * len(devices))),
        Figure("workers on the fullest device, more than on the emptiest", str(even), "0"),
        Figure("a worker's memory on its device", _megabytes(_held(server))),
    ]


def _held(server: Server) -> list[int]:
    """Return what each worker last said it holds of its device."""
    return [w["device_memory_bytes"] for w in server.workers() if "device_memory_bytes" in w]


def _megabytes(sizes: list[int]) -> str:
    return f"{max(sizes) / 1e6:.0f} MB" if sizes else UNKNOWN


def _growth(server: Server) -> list[Figure]:
    before = _held(server)
    with Load(server.url, 2 * len(server.workers()), texts=("hello", "seconds:2", "seconds:20")) as load:
        load.wait_for(REQUESTS, within_s=60)
    # Each worker measures every few seconds: wait until all have done so since the last request.
    time.sleep(6)
    grown = [after - held for held, after in zip(sorted(before), sorted(_held(server)), strict=True)]
    return [
        Figure(f"growth of a worker over {len(load.answers)} requests", _megabytes(grown), f"{DRIFT_MB} MB"),
        Figure("failed requests", str(len(load.bad())), "0"),
    ]


def _swap(server: Server, models: Path, megabytes: int) -> list[Figure]:
    publish_tone(models, ballast_mb=megabytes, gain=0.4)
    free = [d.free_bytes for d in read_accelerators()]
    with Load(server.url, 4, texts=("hello", "sleep:0.05", "seconds:2")) as load:
        load.wait_for(20)
        began = time.monotonic()
        server.signal(signal.SIGHUP)
        lowest = list(free)

        def swapped() -> bool:
            lowest[:] = map(min, lowest, (d.free_bytes for d in read_accelerators()))
            return (server.status()["last_swap"] or {}).get("serving") == "v2"

        eventually(swapped, within_s=90)
        took = time.monotonic() - began
        load.wait_for(20)
    peak = [a - b for a, b in zip(free, lowest, strict=True)]
    return [
        Figure("swap under load", f"{took:.1f} s"),
        Figure(f"failed requests of {len(load.answers)}", str(len(load.bad())), "0"),
        Figure("more memory on a device during the swap", _megabytes(peak)),
    ]


if __name__ == "__main__":
    sys.exit(main())
