"""A trial that takes several slots gets all of them or none; while they are gathered nothing else is sent there."""

from __future__ import annotations

import pytest

from shadho_celery.clock import ManualClock
from shadho_celery.hardware import ComputeClass
from shadho_celery.memory_store import MemoryStore
from shadho_celery.room import Room
from shadho_celery.store import StudyRecord
from shadho_celery.study import Study
from shadho_celery.trial import Trial

A, B = ComputeClass(name="a", slots=3), ComputeClass(name="b", slots=3)


@pytest.fixture
def study() -> Study:
    record = StudyRecord(key="k", name="n", module="", seed=0, space={}, created_at=0.0)
    return Study(MemoryStore(), record, 1, clock=ManualClock())


@pytest.fixture
def room(study: Study) -> Room:
    return Room(study)


def added(study: Study, slots: int = 1) -> Trial:
    return study.add("all", {}, seed=0, slots=slots)


def test_free_is_the_studys_part_of_a_class_less_what_it_has_taken(study: Study, room: Room) -> None:
    study.queue(added(study, slots=2), "a")
    assert (room.free(A), room.free(A, ahead=4), room.free(B)) == (1, 5, 3)
    shared = ComputeClass(name="a", slots=3, allowance=1.5, stranded=1)
    assert room.free(shared) == 2 + 1 - 2
    study.queue(added(study, slots=2), "a")
    assert room.free(A) == -1


def test_a_trial_of_one_slot_may_wait_in_the_queue_and_a_wider_one_may_not(study: Study, room: Room) -> None:
    study.queue(added(study, slots=2), "a")
    assert room.may_start(added(study), A)
    assert not room.may_start(added(study, slots=2), A)


def test_a_trial_wider_than_the_studys_part_starts_where_nobody_is(study: Study, room: Room) -> None:
    wide = added(study, slots=3)
    assert room.may_start(wide, ComputeClass(name="a", slots=3, allowance=1.5))
    assert not room.may_start(wide, ComputeClass(name="a", slots=3, allowance=1.5, busy=1))
    study.queue(added(study), "a")
    assert not room.may_start(wide, ComputeClass(name="a", slots=4, allowance=1.5))


def test_a_class_that_gathers_is_left_to_one_trial_and_no_other_class_gathers_for_it(study: Study, room: Room) -> None:
    for name in "ab":
        study.queue(added(study), name)
    wide, other = added(study, slots=3), added(study)
    room.gather(wide, A)
    assert room.gathers(A)
    assert (room.is_left_to(wide, A), room.is_left_to(other, A)) == (True, False)
    assert (room.is_left_to(wide, B), room.is_left_to(other, B)) == (False, True)
    assert room.is_left_to(wide, ComputeClass(name="c", slots=3)), "it could start there at once"
    room.stop_gathering(A)
    assert room.is_left_to(other, A)


def test_a_class_that_has_gone_or_whose_trial_waits_no_more_gathers_no_slots(study: Study, room: Room) -> None:
    wide, another = added(study, slots=3), added(study, slots=2)
    room.gather(wide, A)
    room.gather(another, B)
    room.see([A, B])
    assert room.gathers(A)
    assert room.gathers(B)
    study.queue(another, "c")
    room.see([A, B])
    assert (room.gathers(A), room.gathers(B)) == (True, False)
    room.see([B])
    assert not room.gathers(A)


def test_a_class_that_has_become_narrower_than_its_trial_gathers_no_slots(study: Study, room: Room) -> None:
    wide, other = added(study, slots=3), added(study)
    room.gather(wide, A)
    room.see([ComputeClass(name="a", slots=2), B])
    assert not room.gathers(A)
    assert room.is_left_to(other, A)
    assert room.is_left_to(wide, B), "another class may gather for it"
