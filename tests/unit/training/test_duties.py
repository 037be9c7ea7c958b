"""What each place was asked for, and how long it took, whatever comes in between."""

from __future__ import annotations

import pytest

from shadho_celery.clock import ManualClock
from shadho_celery.training.backups import Times
from shadho_celery.training.duties import Duties


class Told(Times):
    """Response times, written down."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[int, float, bool]] = []

    def tell(self, replica: int, seconds: float, *, finished: bool = True) -> None:
        self.all.append((replica, seconds, finished))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def times() -> Told:
    return Told()


@pytest.fixture
def duties(times: Told, clock: ManualClock) -> Duties:
    return Duties(times, clock.now)


def test_a_place_works_from_the_sending_to_its_answer(duties: Duties, times: Told) -> None:
    duties.send(0, step=3)
    assert duties.working == [0]
    duties.answer(0, step=3, at=2.5)
    assert duties.working == []
    assert times.all == [(0, 2.5, True)]


def test_those_at_work_when_a_step_ends_give_up_after_at_least_so_long(
    duties: Duties, times: Told, clock: ManualClock
) -> None:
    for place in (0, 1):
        duties.send(place, step=0)
    duties.answer(0, step=0, at=1.0)
    clock.advance_to(4.0)
    assert duties.cut_off() == [1]
    assert duties.working == []
    assert times.all == [(0, 1.0, True), (1, 4.0, False)]


def test_who_does_not_give_up_is_asked_for_the_next_step_when_it_is_done(
    duties: Duties, times: Told, clock: ManualClock
) -> None:
    duties.send(0, step=0)
    duties.send(0, step=1)
    clock.advance_to(7.0)
    duties.answer(0, step=0, at=6.5)
    assert duties.goes_on(0, step=1)
    duties.answer(0, step=1, at=7.5)
    assert times.all == [(0, 6.5, True), (0, 0.5, True)]


def test_a_late_one_that_was_not_sent_the_step_under_way_does_not_go_on_by_itself(duties: Duties) -> None:
    duties.send(0, step=0)
    duties.answer(0, step=0, at=1.0)
    assert not duties.goes_on(0, step=1)
    assert duties.working == []


def test_an_answer_that_nobody_asked_for_tells_no_time(duties: Duties, times: Told) -> None:
    duties.send(0, step=2)
    duties.answer(0, step=1, at=1.0)
    assert duties.working == [0]
    assert times.all == []


def test_who_was_refused_waits_until_it_is_sent_something(duties: Duties) -> None:
    duties.wait(0)
    assert duties.idle == {0}
    duties.send(0, step=1)
    assert duties.idle == set()


def test_a_place_that_is_cleared_owes_nothing(duties: Duties) -> None:
    duties.send(0, step=1)
    duties.wait(0)
    duties.clear(0)
    assert duties.working == []
    assert duties.idle == set()
    assert not duties.goes_on(0, step=1)
