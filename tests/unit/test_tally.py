"""Every sum is right after every change, whichever version of a trial came before."""

from __future__ import annotations

from typing import Any

import pytest

from shadho_celery.tally import Tally, merit
from shadho_celery.trial import Trial, TrialState

S = TrialState


@pytest.fixture
def tally() -> Tally:
    return Tally()


def trial(number: int = 0, state: TrialState = S.WAITING, **facts: Any) -> Trial:
    return Trial(number=number, subspace="all", params={}, state=state, **facts)


def test_a_trials_present_version_takes_the_place_of_the_last_one_in_every_sum(tally: Tally) -> None:
    tally._put(trial(slots=3))
    tally._put(trial(state=S.QUEUED, slots=3, compute_class="cpu"))
    assert (tally.count(S.WAITING), tally.count(S.QUEUED), tally.taken("cpu"), tally.in_flight) == (0, 1, 3, 1)
    tally._put(trial(state=S.RUNNING, slots=3, compute_class="gpu"))
    assert (tally.taken("cpu"), tally.taken("gpu"), tally.count(S.RUNNING, compute_class="gpu")) == (0, 3, 1)
    tally._put(trial(state=S.FAILED, slots=3, compute_class="gpu"))
    assert (tally.taken("gpu"), tally.in_flight, tally.counted, tally.count(*S), len(tally)) == (0, 0, 1, 1, 1)
    assert [one.state for one in tally.trials] == [S.FAILED]


def test_what_lives_beside_a_trial_takes_slots_but_is_no_trial(tally: Tally) -> None:
    shown = trial(state=S.RUNNING, compute_class="cpu")
    tally._put(shown, [trial(state=S.QUEUED, compute_class="gpu")])
    assert (tally.taken("cpu"), tally.taken("gpu"), tally.copies, tally.count(*S)) == (1, 1, 1, 1)
    tally._put(shown, [trial(state=S.RUNNING, compute_class="gpu")])
    assert (tally.count(S.QUEUED, compute_class="gpu"), tally.count(S.RUNNING, compute_class="gpu")) == (0, 1)
    tally._put(shown)
    assert (tally.taken("cpu"), tally.taken("gpu"), tally.copies) == (1, 0, 0)


def test_a_trial_that_carries_another_on_was_not_drawn(tally: Tally) -> None:
    tally._put(trial())
    tally._put(trial(1, origin=0))
    assert (len(tally), tally.asked("all"), tally.count(S.WAITING, subspace="all")) == (2, 1, 2)


def test_of_those_that_wait_the_wide_ones_are_counted_until_they_are_sent(tally: Tally) -> None:
    for number, slots in enumerate((1, 2, 3, 3)):
        tally._put(trial(number, slots=slots))
    assert [tally.count_wider(slots, "all") for slots in (0, 1, 2, 3)] == [4, 3, 2, 0]
    assert tally.count_wider(0, "another") == 0
    tally._put(trial(2, state=S.QUEUED, slots=3, compute_class="cpu"))
    assert tally.count_wider(2, "all") == 1


def test_the_best_has_the_least_loss_at_the_highest_budget_and_all_of_it_is_the_highest() -> None:
    ended = [trial(loss=loss, budget=budget) for loss, budget in [(0.1, 1.0), (0.3, 9.0), (0.2, 9.0), (0.9, None)]]
    assert [(one.loss, one.budget) for one in sorted(ended, key=merit)] == [
        (0.9, None),
        (0.2, 9.0),
        (0.3, 9.0),
        (0.1, 1.0),
    ]
