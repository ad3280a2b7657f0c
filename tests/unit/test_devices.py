"""The devices of an arbiter and of a worker, over an NVML that tells what the test says."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server import accelerators, devices
from server.accelerators import Accelerator, read_accelerators
from server.board import Board
from server.claim import claim, pin
from server.crew import Member
from server.device_context import has_device_context
from server.device_memory import DeviceMemory
from server.devices import Devices
from server.placement import NoSuchDevice, Place

GB = 10**9
MB = 10**6


class Nvml:
    """Two GPUs, the first of them cut in two by MIG; stands in for the module pynvml."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, there: bool = True) -> None:
        self.there, self.opened = there, 0

    def nvmlInit(self) -> None:
        if not self.there:
            raise self.NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}"

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        if handle != "GPU-0":
            raise self.NVMLError("Not Supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, _handle: str) -> int:
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _handle: str, number: int) -> str:
        if number == 1:
            raise self.NVMLError("Not Found")
        return f"MIG-{number}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=20 * GB if handle.startswith("MIG") else 80 * GB, free=15 * GB)

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return handle.encode()

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        if handle == "MIG-2":
            raise self.NVMLError("Insufficient Permissions")
        return [SimpleNamespace(pid=7, usedGpuMemory=2 * GB), SimpleNamespace(pid=8, usedGpuMemory=None)]


def test_without_a_driver_there_are_no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "pynvml", Nvml(there=False))
    assert read_accelerators() == ()
    assert Devices("auto").place([], target=1, workers=2) == Place()
    with pytest.raises(NoSuchDevice):
        Devices("cuda")


def test_gpus_and_their_parts_are_read_and_nvml_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(accelerators, "pynvml", nvml)
    parts = read_accelerators()
    assert [(d.index, d.uuid) for d in parts] == [(0, "MIG-0"), (0, "MIG-2"), (1, "GPU-1")]
    assert [d.total_bytes for d in parts] == [20 * GB, 20 * GB, 80 * GB]
    assert parts[0].used_by == {7: 2 * GB, 8: 0} and parts[1].used_by == {}
    assert nvml.opened == 0


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board.create(tmp_path)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One GPU; the list's number is what it has free at each reading."""
    amount = [10 * GB]
    monkeypatch.setattr(devices, "READ_EVERY_S", -1)
    monkeypatch.setattr(devices, "read_accelerators", lambda: (Accelerator(0, "GPU-a", 80 * GB, amount[0]),))
    return amount


def members(board: Board, count: int, **reported: Any) -> list[Member]:
    for slot in board.slots[:count]:
        slot.update(**reported)
    return [Member(100 + n, 1, "v1", n, board.slots[n], 0.0, "GPU-a") for n in range(count)]


def test_surge_is_what_fits_and_its_want_is_logged_once(
    board: Board, free: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    found = Devices("auto")
    crew = members(board, 2, device_memory_bytes=8 * GB)
    with caplog.at_level(logging.WARNING, "warmserve"):
        assert found.surge(1, crew, target=2, workers=2) == 1
        free[0] = 3 * GB
        assert [found.surge(1, crew, target=2, workers=2) for _ in range(3)] == [0, 0, 0]
    assert [record.message for record in caplog.records] == ["surge_withheld"]


def test_a_surge_worker_that_is_there_is_not_taken_back(board: Board, free: list[int]) -> None:
    free[0] = 1 * GB
    crew = members(board, 3, device_memory_bytes=8 * GB)
    assert Devices("auto").surge(1, crew, target=1, workers=2) == 1


def test_fewer_workers_than_wanted_need_no_surge(board: Board, free: list[int]) -> None:
    free[0] = 0
    crew = members(board, 1, device_memory_bytes=8 * GB)
    assert Devices("auto").surge(1, crew, target=1, workers=2) == 1


def test_a_worker_sees_its_own_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    pin(Place(Accelerator(1, "GPU-b", GB, GB), 0.5))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    pin(Place())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert claim(Place()).type == "cpu"


class Growing:
    """A device on which this process holds ``used`` bytes and others 1 GB; *known* to NVML by its pid."""

    def __init__(self, *, known: bool = True) -> None:
        self.used, self.known = 500 * MB, known

    def read(self) -> tuple[Accelerator, ...]:
        owner = os.getpid() if self.known else 1
        return (Accelerator(0, "GPU-a", 10 * GB, 9 * GB - self.used, {owner: self.used}),)

    def memory(self, *, drift: int = 0, limit: int = 0) -> DeviceMemory:
        place = Place(self.read()[0])
        return DeviceMemory(
            place, drift_bytes=drift, limit_bytes=limit, read=self.read, allocated=lambda: self.used
        )


@pytest.mark.parametrize("known", [True, False])
def test_device_memory_is_told_apart_from_that_of_others(known: bool) -> None:
    found = Growing(known=known).memory().measure()
    assert found == {"device_memory_bytes": 500 * MB, "device_others_bytes": GB}


def test_growth_since_warm_up_is_reported_once() -> None:
    device = Growing()
    memory = device.memory(drift=200 * MB)
    memory.measure()
    assert memory.drift() == "", "there was no warm-up yet"
    memory.note_warm()
    device.used += 200 * MB
    memory.measure()
    assert memory.drift() == ""
    device.used += 1
    memory.measure()
    assert memory.drift().startswith("200000001 bytes more")
    assert memory.drift() == ""


def test_device_memory_over_its_limit_is_named() -> None:
    memory = Growing().memory(limit=400 * MB)
    memory.measure()
    assert memory.excess() == "500000000 bytes of the device, the limit is 400000000"


def test_a_worker_on_the_main_processor_asks_nobody() -> None:
    def read() -> tuple[Accelerator, ...]:
        raise AssertionError

    memory = DeviceMemory(Place(), drift_bytes=1, limit_bytes=1, read=read)
    assert memory.measure() == {} and memory.drift() == "" and memory.excess() == ""


def test_an_open_driver_is_a_device_context(tmp_path: Path) -> None:
    assert not has_device_context()
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "3").symlink_to("/dev/nvidiactl")  # NVML's
    assert not has_device_context(tmp_path / "fd")
    (tmp_path / "fd" / "4").symlink_to("/dev/nvidia-uvm")
    assert has_device_context(tmp_path / "fd")
