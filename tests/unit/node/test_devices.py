"""Attempts take their slots, GPUs and cores in the order in which they came; workers share the cores of a host."""

from __future__ import annotations

import logging
import random
import threading
import time
from unittest.mock import MagicMock

import pytest

from shadho_celery.core.hardware import Machine
from shadho_celery.fleet.registry import Worker
from shadho_celery.node import devices
from shadho_celery.node.devices import Devices, FreeSlots


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CHECK_SECONDS", 0.001)


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


# GPUs that are shared as far as their memory fits

GIB = 2**30


def sharing(*memories: int, slots: int = 4) -> FreeSlots:
    """The slots of GPUs with this memory in GiB, so many each."""
    return FreeSlots(slots * len(memories), len(memories), [memory * GIB for memory in memories])


def has_room(free: FreeSlots, need: int | None, number: int = 1) -> bool:
    """Whether an attempt that takes `need` GiB gets its slots at once."""
    if taken := free.take(number, lambda: False, need=None if need is None else need * GIB):
        free.put(taken)
    return bool(taken)


def test_an_attempt_of_unknown_memory_has_its_gpu_alone() -> None:
    free = sharing(16, 16)
    assert free.open == 2
    assert free.take(1) == [0]
    assert free.take(1, need=GIB) == [1]
    assert not has_room(free, None)
    assert free.take(1, need=GIB) == [3], "beside the known one"
    free.put([0])
    assert has_room(free, None)


@pytest.mark.parametrize(("first", "second", "fits"), [(4, 10, True), (4, 11, False), (14, 0, True), (15, 0, False)])
def test_attempts_share_a_gpu_as_far_as_they_and_their_contexts_fit(first: int, second: int, fits: bool) -> None:
    free = sharing(16)
    assert free.take(1, need=first * GIB) == [0]
    assert has_room(free, second) is fits


def test_an_attempt_that_is_larger_than_a_gpu_has_it_alone() -> None:
    free = sharing(16)
    assert free.take(1, need=99 * GIB) == [0]
    assert not has_room(free, 0)


def test_the_processes_of_other_slots_end_before_an_attempt_has_a_gpu_alone() -> None:
    free = sharing(16)
    first, second = free.take(1, need=GIB), free.take(1, need=GIB)
    assert (first, second, free.beside(second)) == ([0], [1], [])
    free.put(first + second)
    # These processes may still have a context each, so this one does not fit beside them.
    taken = free.take(1, need=15 * GIB)
    assert (taken, free.beside(taken), free.beside(taken)) == ([0], [1], [])
    free.put(taken)
    assert free.take(1, need=15 * GIB) == [0]
    assert not has_room(free, 0)


def test_an_attempt_of_several_slots_has_as_many_gpus_alone() -> None:
    free = sharing(16, 16, 16)
    assert free.take(2, need=GIB) == [0, 1]
    assert free.take(1, need=GIB) == [2]
    assert not has_room(free, None, 2)
    free = sharing(16, 16)
    assert free.take(3) == [0, 1, 2], "more slots than GPUs"
    assert not has_room(free, 0)


def test_an_attempt_knows_whether_it_has_shared_its_gpu() -> None:
    free = sharing(16)
    [first] = free.take(1, need=GIB)
    assert not free.was_shared(first)
    [second] = free.take(1, need=GIB)
    free.put([second])
    assert free.was_shared(first), "also once the other one has ended"
    free.put([first])
    assert free.take(1, need=GIB) == [first]
    assert not free.was_shared(first)
    assert not FreeSlots(2, cards=1).was_shared(0)


def test_as_many_slots_are_open_as_attempts_like_the_last_ones_fit() -> None:
    free = sharing(16, 16, slots=8)
    assert (free.open, free.is_any) == (2, True)
    first = free.take(1, need=3 * GIB)
    assert free.open == 8, "four of 4 GiB on each GPU"
    second = free.take(1)
    assert (free.open, free.is_any) == (2, False), "the median of the last ones is unknown again, and none fits beside"
    free.put(second)
    assert free.is_any
    free.put(first)
    assert sharing(16, slots=2).open == 1
    assert FreeSlots(5, cards=2).open == 5


def test_while_an_attempt_waits_for_memory_no_other_slot_is_open() -> None:
    free, got = sharing(16), list[list[int]]()
    taken = free.take(1, need=3 * GIB)
    assert free.open == 4
    thread = waiting(free, 1, got)
    assert (free.open, free.is_any, free.kept) == (2, False, 1)
    free.put(taken)
    thread.join()
    assert got == [[0]]


def test_gpus_are_never_filled_beyond_their_memory() -> None:
    generator, free = random.Random(1), sharing(16, 24)
    running: dict[int, int | None] = {}
    most = 0
    for _ in range(2000):
        if generator.random() < 0.5 and running:
            slot = generator.choice([*running])
            free.put([slot])
            del running[slot]
        need = generator.choice([None, 1, 2, 3, 8, 14, 30])
        taken = free.take(1, lambda: False, need=None if need is None else need * GIB)
        running |= dict.fromkeys(taken, need)
        for card, memory in enumerate((16, 24)):
            here = [need for slot, need in running.items() if slot % 2 == card]
            most = max(most, len(here))
            assert len(here) < 2 or (None not in here and sum(need + 1 for need in here if need is not None) <= memory)
    assert most == 4


MACHINE = Machine(cores=4, processors="f", pool="p")
LIMITED = Machine(cores=1, processors="f", pool="p", is_limited=True)


def devices_of(machine: Machine) -> Devices:
    """Return devices whose runners record their calls and their environment variables."""
    return Devices(machine, "cpu", 1, lambda variables: MagicMock(variables=variables), address="", shares_gpus=False)


def threads_of(devices: Devices) -> list[int]:
    """Return the number of threads with which the process of the first slot starts, and each later number."""
    [runner, *_] = devices.runners
    later = [call.args[0] for call in runner.set_threads.call_args_list]  # type: ignore[attr-defined]
    return [int(runner.variables["OMP_NUM_THREADS"]), *later]  # type: ignore[attr-defined]


def test_threads_follow_the_slots_of_the_host_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    devices, changes = devices_of(MACHINE), []
    for neighbours in (
        [],
        [Worker(machine=MACHINE, slots=1)],
        [Worker(machine=MACHINE, slots=1, busy=1)],
        [Worker(machine=MACHINE, slots=1), Worker(machine=LIMITED, slots=5)],
        [],
    ):
        devices.share_cores(neighbours)
        changes.append(threads_of(devices))
        for _ in range(2):
            devices.tell()
    assert changes == [[4], [4, 2], [4, 2], [4, 2, 1], [4, 2, 1, 4]]
    assert [record.getMessage() for record in caplog.records] == [
        "2 slots on this host: 2 threads a trial",
        "2 slots on this host: 1 thread a trial",
        "1 slot on this host: 4 threads a trial",
    ]


def test_a_worker_with_a_limit_keeps_its_cores_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    devices = devices_of(LIMITED)
    devices.share_cores([Worker(machine=MACHINE, slots=8)])
    devices.tell()
    assert (threads_of(devices), caplog.records) == ([1], [])
