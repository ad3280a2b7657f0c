"""The pool: an instance comes back however the block ends, and nobody's timeout takes one along."""

from __future__ import annotations

import random
import threading
import time

import pytest

from server.pool import InstancePool, PoolClosed, PoolTimeout


def pool(size: int = 1) -> InstancePool[int]:
    return InstancePool(list(range(size)), version="v1")


def test_lease_returns_instance_when_block_raises() -> None:
    found = pool()
    with pytest.raises(KeyError), found.lease(timeout_s=1):
        raise KeyError
    assert found.lent == 0
    with found.lease(timeout_s=0) as instance:
        assert instance == 0


def test_lease_times_out_when_every_instance_is_busy() -> None:
    found = pool()
    with found.lease(timeout_s=1), pytest.raises(PoolTimeout) as caught, found.lease(timeout_s=0.01):
        pass
    assert caught.value.timeout_s == 0.01


def test_a_waiter_that_timed_out_swallows_no_instance() -> None:
    found = pool()
    with found.lease(timeout_s=1), pytest.raises(PoolTimeout), found.lease(timeout_s=0.01):
        pass
    with found.lease(timeout_s=0):
        assert found.lent == 1


def test_waiters_are_served_in_order_of_arrival() -> None:
    found = pool()
    order: list[int] = []
    threads = []
    with found.lease(timeout_s=1):
        for number in range(5):
            thread = threading.Thread(target=_take, args=(found, number, order))
            thread.start()
            threads.append(thread)
            while len(found._waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def _take(found: InstancePool[int], number: int, order: list[int]) -> None:
    with found.lease(timeout_s=10):
        order.append(number)


def test_drain_lends_no_more_and_waits_for_what_is_lent() -> None:
    found = pool(2)
    lent, back = threading.Event(), threading.Event()

    def hold() -> None:
        with found.lease(timeout_s=1):
            lent.set()
            back.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    lent.wait(10)
    assert not found.drain(timeout_s=0.01)
    with pytest.raises(PoolClosed), found.lease(timeout_s=1):
        pass
    back.set()
    assert found.drain(timeout_s=10)
    thread.join()


def test_no_instance_is_lost_or_lent_twice_under_random_use() -> None:
    """Leases, errors and timeouts from many threads at once."""
    found = pool(3)
    in_use: set[int] = set()
    twice: list[int] = []
    guard = threading.Lock()

    def use(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(60):
            try:
                with found.lease(timeout_s=choose.choice([0, 0.0005, 1])) as instance:
                    with guard:
                        twice.extend({instance} & in_use)
                        in_use.add(instance)
                    time.sleep(choose.random() * 0.0005)
                    with guard:
                        in_use.discard(instance)
                    if choose.random() < 0.2:
                        raise KeyError
            except (KeyError, PoolTimeout):
                pass

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not twice
    assert found.lent == 0
    assert not found._waiting


def test_the_idlest_instance_is_lent_only_while_nobody_wants_one() -> None:
    found = pool(2)
    with found.lease(timeout_s=0) as busy, found.lease_idlest() as idle:
        assert {busy, idle} == {0, 1}
        with found.lease_idlest() as nothing:
            assert nothing is None
    assert found.lent == 0
    found.close()
    with found.lease_idlest() as nothing:
        assert nothing is None


def test_the_pool_knows_how_long_instances_have_been_out_and_idle() -> None:
    found = pool(2)
    assert found.longest_lent_s == 0
    with found.lease(timeout_s=0):
        first = found.longest_lent_s
        with found.lease(timeout_s=0):
            assert found.longest_lent_s > first > 0
            assert found.longest_idle_s == 0
        assert found.longest_idle_s > 0
    assert found.longest_lent_s == 0


def test_the_last_used_instance_is_lent_first_and_the_first_used_is_idlest() -> None:
    found = pool(3)
    with found.lease(timeout_s=0) as last:
        pass
    with found.lease(timeout_s=0) as again:
        assert again == last
    with found.lease_idlest() as idlest:
        assert idlest != last


def test_a_closed_pool_turns_those_who_wait_away() -> None:
    found = pool()
    turned_away = threading.Event()

    def wait() -> None:
        with pytest.raises(PoolClosed), found.lease(timeout_s=10):
            pass
        turned_away.set()

    with found.lease(timeout_s=0):
        thread = threading.Thread(target=wait)
        thread.start()
        while not found._waiting:
            time.sleep(0.001)
        found.close()
        assert turned_away.wait(5)
    thread.join()


def test_lease_alone_waits_for_the_others_and_keeps_them_out() -> None:
    found = pool(2)
    events: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def alone() -> None:
        with found.lease_alone(timeout_s=10):
            events.append("alone")
            inside.set()
            assert leave.wait(10)
            assert found.lent == 1

    def another() -> None:
        with found.lease(timeout_s=10):
            events.append("another")

    with found.lease(timeout_s=0):
        first = threading.Thread(target=alone)
        first.start()
        while len(found._waiting) < 1:
            time.sleep(0.001)
        second = threading.Thread(target=another)  # there is an instance for it, but it came later
        second.start()
        while len(found._waiting) < 2:
            time.sleep(0.001)
        assert events == []
    assert inside.wait(10)
    with found.lease_idlest() as idle:
        assert idle is None
    leave.set()
    first.join()
    second.join()
    assert events == ["alone", "another"]


def test_lease_alone_that_timed_out_lets_the_others_in() -> None:
    found = pool(2)
    with found.lease(timeout_s=0):
        with pytest.raises(PoolTimeout), found.lease_alone(timeout_s=0.01):
            pass
        with found.lease(timeout_s=0):
            assert found.lent == 2
