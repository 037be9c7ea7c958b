"""A trial that takes several slots gets all of them or none; a class that is reserved for it takes nothing else."""

from __future__ import annotations

import pytest

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Trial
from shadho_celery.placement.widths import Reservations
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import MemoryStore
from shadho_celery.study.state import StudyState

A, B = ComputeClass(name="a", slots=3), ComputeClass(name="b", slots=3)


@pytest.fixture
def study() -> StudyState:
    record = StudyRecord(key="k", name="n", module="", seed=0, space={}, created_at=0.0)
    return StudyState(MemoryStore(), record, 1, clock=ManualClock())


@pytest.fixture
def reservations(study: StudyState) -> Reservations:
    return Reservations(study)


def added(study: StudyState, slots: int = 1) -> Trial:
    return study.add("all", {}, seed=0, slots=slots)


def test_free_is_the_studys_part_of_a_class_less_what_it_has_taken(
    study: StudyState, reservations: Reservations
) -> None:
    study.send(added(study, slots=2), "a")
    assert (reservations.free(A), reservations.free(A, ahead=4), reservations.free(B)) == (1, 5, 3)
    shared = ComputeClass(name="a", slots=3, allowance=1.5, silent=1)
    assert reservations.free(shared) == 2 + 1 - 2
    study.send(added(study, slots=2), "a")
    assert reservations.free(A) == -1


def test_a_trial_of_one_slot_may_wait_in_the_queue_and_a_wider_one_may_not(
    study: StudyState, reservations: Reservations
) -> None:
    study.send(added(study, slots=2), "a")
    assert reservations.may_start(added(study), A)
    assert not reservations.may_start(added(study, slots=2), A)


def test_a_trial_wider_than_the_studys_part_starts_where_nobody_is(
    study: StudyState, reservations: Reservations
) -> None:
    wide = added(study, slots=3)
    assert reservations.may_start(wide, ComputeClass(name="a", slots=3, allowance=1.5))
    assert not reservations.may_start(wide, ComputeClass(name="a", slots=3, allowance=1.5, busy=1))
    study.send(added(study), "a")
    assert not reservations.may_start(wide, ComputeClass(name="a", slots=4, allowance=1.5))


def test_a_reserved_class_is_left_to_one_trial_and_no_other_class_is_reserved_for_it(
    study: StudyState, reservations: Reservations
) -> None:
    for name in "ab":
        study.send(added(study), name)
    wide, other = added(study, slots=3), added(study)
    reservations.reserved[A.key] = wide.number
    assert A.key in reservations.reserved
    assert (reservations.may_take(A, wide), reservations.may_take(A, other)) == (True, False)
    assert (reservations.may_take(B, wide), reservations.may_take(B, other)) == (False, True)
    assert reservations.may_take(ComputeClass(name="c", slots=3), wide), "it could start there at once"
    reservations.see([A])
    assert reservations.reserved, "it waits for a class that still fits it"
    searched = Reservations(study, is_searched=True)
    searched.reserved = reservations.reserved
    assert not searched.may_take(ComputeClass(name="c", slots=3), wide), "its width was chosen for the class a"
    reservations.see([A], lambda trial, place: False)
    assert not reservations.reserved
    assert reservations.may_take(A, other)


def test_a_class_that_has_gone_or_whose_trial_waits_no_more_is_reserved_no_more(
    study: StudyState, reservations: Reservations
) -> None:
    wide, another = added(study, slots=3), added(study, slots=2)
    reservations.reserved[A.key] = wide.number
    reservations.reserved[B.key] = another.number
    reservations.see([A, B])
    assert A.key in reservations.reserved
    assert B.key in reservations.reserved
    study.send(another, "c")
    reservations.see([A, B])
    assert ((A.key in reservations.reserved), (B.key in reservations.reserved)) == (True, False)
    reservations.see([B])
    assert A.key not in reservations.reserved


def test_a_class_that_has_become_narrower_than_its_trial_is_reserved_no_more(
    study: StudyState, reservations: Reservations
) -> None:
    wide, other = added(study, slots=3), added(study)
    reservations.reserved[A.key] = wide.number
    reservations.see([ComputeClass(name="a", slots=2), B])
    assert A.key not in reservations.reserved
    assert reservations.may_take(A, other)
    assert reservations.may_take(B, wide), "another class may be reserved for it"
