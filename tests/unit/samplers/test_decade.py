"""The decade of a study's trials follows from the first of them, and says what a proposal may take."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.samplers.auto import EARLY, FIRST, Decade, decade_of


def ended(seconds: Sequence[float | None], state: TrialState = TrialState.COMPLETE) -> list[Trial]:
    outcomes = [Outcome(state=state, loss=0.0, seconds=each) for each in seconds]
    return [Trial(number=0, subspace="all", params={}, state=state, outcome=outcome) for outcome in outcomes]


@pytest.mark.parametrize(
    ("seconds", "decade"),
    [(0.0, 0.01), (0.005, 0.01), (0.0999, 0.01), (0.1, 0.1), (1.0, 1.0), (59.0, 10.0), (1e5, 1e5)],
)
def test_a_decade_begins_at_its_least_seconds(seconds: float, decade: float) -> None:
    assert decade_of([seconds]) == decade


@pytest.mark.parametrize(("seconds", "most"), [(0.001, 2.0), (0.03, 2.0), (0.5, 10.0), (5.0, 100.0), (60.0, 1000.0)])
def test_a_proposal_may_take_a_tenth_of_the_decade_and_two_milliseconds_in_any_case(
    seconds: float, most: float
) -> None:
    assert Decade(decade_of([seconds])).allowed_ms == most


def test_the_median_of_the_first_twenty_trials_counts_and_later_ones_do_not() -> None:
    decade = Decade()
    decade.tell(ended([0.5] * 11 + [50.0] * 8))
    assert decade.recorded is None
    decade.tell(ended([50.0] * 10))
    assert decade.recorded == decade.seconds == 0.1
    decade.tell(ended([50.0] * 100))
    assert decade.recorded == 0.1


def test_until_then_the_first_ten_count_however_many_are_told_at_a_time() -> None:
    seconds = [0.5] * EARLY + [50.0] * (FIRST - EARLY - 1)
    together, apart = Decade(), Decade()
    together.tell(ended(seconds))
    for each in seconds:
        assert apart.seconds in (None, 0.1)
        apart.tell(ended([each]))
    assert apart.seconds == together.seconds == 0.1
    assert apart.recorded is together.recorded is None


def test_before_that_nothing_is_known_and_a_proposal_may_take_long() -> None:
    decade = Decade()
    decade.tell(ended([0.5] * (EARLY - 1)))
    assert (decade.seconds, decade.allowed_ms) == (None, math.inf)


def test_trials_that_failed_were_cancelled_or_have_no_seconds_do_not_count() -> None:
    decade = Decade()
    for state in (TrialState.FAILED, TrialState.CANCELLED):
        decade.tell(ended([0.001] * 50, state))
    decade.tell(ended([None] * 50))
    assert decade.seconds is None
    decade.tell(ended([5.0] * FIRST, TrialState.PRUNED))
    assert decade.recorded == 1.0


def test_a_recorded_decade_is_kept_whatever_comes() -> None:
    decade = Decade(10.0)
    decade.tell(ended([0.001] * FIRST))
    assert decade.recorded == decade.seconds == 10.0
