"""Free slots of a worker: an attempt gets all that it needs or none, in the order of the messages."""

from __future__ import annotations

import threading
import time

import pytest

from shadho_celery.node import free_slots
from shadho_celery.node.free_slots import FreeSlots


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_slots, "CHECK_SECONDS", 0.01)


def waiting(free: FreeSlots, number: int, got: list[list[int]]) -> threading.Thread:
    """Start a thread that takes slots, and wait until it waits."""
    thread = threading.Thread(target=lambda: got.append(free.take(number)))
    before = len(free._waiting)
    thread.start()
    while len(free._waiting) <= before and thread.is_alive():
        time.sleep(0.001)
    return thread


def test_the_lowest_slots_are_taken_and_given_back() -> None:
    free = FreeSlots(3)
    assert free.take(2) == [0, 1]
    assert free.is_any
    assert free.take(1) == [2]
    assert not free.is_any
    free.put([0, 1])
    assert free.take(2) == [0, 1]


def test_while_an_attempt_waits_for_two_slots_later_ones_get_none_and_what_is_free_is_kept() -> None:
    free, got = FreeSlots(2), list[list[int]]()
    assert free.take(1) == [0]
    wide = waiting(free, 2, got)
    narrow = waiting(free, 1, got)
    assert (free.is_any, free.kept) == (False, 1)
    free.put([0])
    wide.join()
    assert got == [[0, 1]]
    free.put([0, 1])
    narrow.join()
    assert got == [[0, 1], [0]]
    assert (free.is_any, free.kept) == (True, 0)


def test_an_attempt_that_is_no_longer_wanted_gets_none_and_the_next_one_has_its_turn() -> None:
    free = FreeSlots(2)
    free.take(1)
    assert free.take(2, lambda: False) == []
    assert free.take(1) == [1]


@pytest.mark.parametrize(("taken", "expected"), [([], [0, 1]), ([1], [0, 3]), ([0, 2], [1, 3]), ([0, 1, 2], [3])])
def test_slots_on_different_gpus_are_preferred(taken: list[int], expected: list[int]) -> None:
    """Two GPUs with two slots each: slots 0 and 2 are on the first one."""
    free = FreeSlots(4, cards=2)
    free.take(4)
    free.put([slot for slot in range(4) if slot not in taken])
    assert free.take(len(expected)) == expected
