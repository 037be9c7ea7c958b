"""Assignments: every response time runs from the sending of a step to its vector or its cancellation."""

from __future__ import annotations

import pytest

from shadho_celery.core.system import ManualClock
from shadho_celery.training.coordinator.backups import Assignments, Times


class RecordedTimes(Times):
    """Response times in the order of their recording."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[int, float, bool]] = []

    def record(self, replica: int, seconds: float, *, finished: bool = True) -> None:
        self.all.append((replica, seconds, finished))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def times() -> RecordedTimes:
    return RecordedTimes()


@pytest.fixture
def assignments(times: RecordedTimes, clock: ManualClock) -> Assignments:
    return Assignments(times, clock.now)


def test_a_place_is_busy_from_the_sending_of_a_step_to_its_vector(
    assignments: Assignments, times: RecordedTimes
) -> None:
    assignments.assign(0, step=3)
    assert assignments.busy == [0]
    assignments.complete(0, step=3, at=2.5)
    assert assignments.busy == []
    assert times.all == [(0, 2.5, True)]


def test_places_that_are_busy_when_a_step_ends_record_a_censored_time(
    assignments: Assignments, times: RecordedTimes, clock: ManualClock
) -> None:
    for place in (0, 1):
        assignments.assign(place, step=0)
    assignments.complete(0, step=0, at=1.0)
    clock.advance_to(4.0)
    assert assignments.seconds(1) == 4.0
    assert assignments.cancel(assignments.busy) == [1]
    assert assignments.busy == []
    assert times.all == [(0, 1.0, True), (1, 4.0, False)]


def test_without_cancelling_the_time_of_the_next_step_begins_with_the_late_vector(
    assignments: Assignments, times: RecordedTimes, clock: ManualClock
) -> None:
    assignments.assign(0, step=0)
    assignments.assign(0, step=1)
    clock.advance_to(7.0)
    assignments.complete(0, step=0, at=6.5)
    assert assignments.resume(0, step=1)
    assignments.complete(0, step=1, at=7.5)
    assert times.all == [(0, 6.5, True), (0, 0.5, True)]


def test_a_late_place_that_was_not_sent_the_current_step_cannot_resume(assignments: Assignments) -> None:
    assignments.assign(0, step=0)
    assignments.complete(0, step=0, at=1.0)
    assert not assignments.resume(0, step=1)
    assert assignments.busy == []


def test_a_vector_of_another_step_than_the_assigned_one_records_no_time(
    assignments: Assignments, times: RecordedTimes
) -> None:
    assignments.assign(0, step=2)
    assignments.complete(0, step=1, at=1.0)
    assert assignments.busy == [0]
    assert times.all == []


def test_a_place_is_idle_from_a_refusal_to_the_next_step(assignments: Assignments) -> None:
    assignments.set_idle(0)
    assert assignments.idle == {0}
    assignments.assign(0, step=1)
    assert assignments.idle == set()


def test_a_cleared_place_is_neither_busy_nor_idle_and_cannot_resume(assignments: Assignments) -> None:
    assignments.assign(0, step=1)
    assignments.set_idle(0)
    assignments.clear(0)
    assert assignments.busy == []
    assert assignments.idle == set()
    assert not assignments.resume(0, step=1)
