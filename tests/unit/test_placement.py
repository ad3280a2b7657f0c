"""Which device a worker gets, over made-up machines: decisions need no accelerator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.accelerators import Accelerator
from server.placement import NoSuchDevice, Place, choose, fitting_surge, memory_share, place

GB = 10**9
TWO = (Accelerator(0, "GPU-a", 80 * GB, 70 * GB), Accelerator(1, "GPU-b", 80 * GB, 70 * GB))
MIG = (Accelerator(0, "MIG-a", 20 * GB, 19 * GB), Accelerator(0, "MIG-b", 20 * GB, 19 * GB), TWO[1])


@pytest.mark.parametrize(
    ("setting", "found", "expected"),
    [
        ("auto", (), ()),
        ("auto", TWO, TWO),
        ("cpu", TWO, ()),
        ("cuda", TWO, TWO),
        ("cuda:1", TWO, TWO[1:]),
        ("cuda:0,1", TWO, TWO),
        ("cuda:0", MIG, MIG[:2]),
    ],
)
def test_choose(setting: str, found: tuple[Accelerator, ...], expected: tuple[Accelerator, ...]) -> None:
    assert choose(setting, found) == expected


@pytest.mark.parametrize(("setting", "found"), [("cuda", ()), ("cuda:0", ()), ("cuda:0,2", TWO)])
def test_choose_names_what_is_not_there(setting: str, found: tuple[Accelerator, ...]) -> None:
    with pytest.raises(NoSuchDevice, match=setting):
        choose(setting, found)


def test_places_have_the_names_that_operators_and_cuda_use() -> None:
    assert (Place().name, Place().uuid) == ("cpu", "")
    assert (Place(TWO[1], 0.5).name, Place(TWO[1], 0.5).uuid) == ("cuda:1", "GPU-b")


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 3))
def test_a_swap_ends_as_evenly_as_it_began(devices: int, workers: int, drained_first: int) -> None:
    """Workers of the new version come one by one while the old ones leave, in any order of devices."""
    machine = [Accelerator(n, f"GPU-{n}", GB, GB) for n in range(devices)]
    old: list[str] = []
    for _ in range(workers):
        old.append(place(machine, old, ()).uuid)
    old = old[drained_first % workers :] + old[: drained_first % workers]
    new: list[str] = []
    while old:
        new.append(place(machine, new, old).uuid)
        old.pop(0)
    counts = [new.count(device.uuid) for device in machine]
    assert sum(counts) == workers
    assert max(counts) - min(counts) <= 1


@given(st.integers(1, 50), st.integers(1, 16))
def test_shares_of_one_device_never_exceed_it(workers: int, devices: int) -> None:
    machine = [Accelerator(n, f"GPU-{n}", GB, GB) for n in range(devices)]
    placed: list[str] = []
    for _ in range(workers):
        placed.append(place(machine, placed, ()).uuid)
    fullest = max(placed.count(device.uuid) for device in machine)
    assert fullest * memory_share(workers, devices) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("surge", "free", "footprint", "expected"),
    [
        (1, 0, 0, 1),
        (1, 10 * GB, 9 * GB, 1),
        (1, 10 * GB, 9.5 * GB, 0),
        (3, 10 * GB, 4 * GB, 2),
        (0, 9 * GB, 1, 0),
    ],
)
def test_fitting_surge(surge: int, free: int, footprint: int, expected: int) -> None:
    assert fitting_surge(surge, free, int(footprint)) == expected
