"""Finished trials are counted, found by their number and by their place, and the best of them is known."""

from __future__ import annotations

from typing import Any

import pytest

from shadho_celery.core.trial import FINISHED, Outcome, Trial, TrialState
from shadho_celery.study.trials import Counts, FinishedTrials, merit

S = TrialState


def trial(number: int = 0, state: TrialState = S.WAITING, *, loss: float | None = None, **facts: Any) -> Trial:
    outcome = Outcome(state=state, loss=loss) if state in FINISHED else None
    return Trial(**{"number": number, "subspace": "all", "params": {}, "state": state, "outcome": outcome, **facts})


def test_a_trial_is_counted_in_its_state_and_subspace_until_it_is_counted_no_more() -> None:
    counts = Counts()
    counts.add(trial(subspace="a"))
    counts.add(trial(1, S.FAILED, subspace="a"))
    counts.add(trial(2, S.FAILED, subspace="b"))
    assert (counts.count(*S), counts.count(S.FAILED), counts.count(S.WAITING, S.FAILED)) == (3, 2, 3)
    assert [counts.count(S.FAILED, subspace=name) for name in "abc"] == [1, 1, 0]
    counts.add(trial(1, S.FAILED, subspace="a"), -1)
    assert (counts.count(S.FAILED), counts.count(*S, subspace="a")) == (1, 1)


def test_an_attempt_is_counted_in_its_class_and_is_no_trial() -> None:
    counts = Counts()
    sent = trial(compute_class="cpu", attempt=1).attempted(state=S.QUEUED)
    counts.add_placed(sent)
    counts.add_placed(sent.evolve(attempt=2, compute_class="gpu", state=S.RUNNING))
    assert [counts.count(*S, compute_class=name) for name in ("cpu", "gpu", "none")] == [1, 1, 0]
    assert (counts.count(S.QUEUED, compute_class="cpu"), counts.count(S.QUEUED, compute_class="gpu")) == (1, 0)
    assert counts.count(*S) == 0
    counts.add_placed(sent, -1)
    assert counts.count(*S, compute_class="cpu") == 0


def test_those_that_finish_are_kept_in_the_order_in_which_their_results_came() -> None:
    ended = FinishedTrials()
    later, sooner = trial(0, S.COMPLETE, loss=0.5, compute_class="gpu"), trial(1, S.FAILED, compute_class="cpu")
    for one in (sooner, later):
        ended.add(one)
    assert [*ended] == [sooner, later]
    assert [*reversed(ended)] == [later, sooner]
    assert (len(ended), ended[0], ended[-1]) == (2, sooner, later)
    assert (ended.get(0), ended.get(1), ended.get(2)) == (later, sooner, None)
    assert (ended.count(S.COMPLETE, S.FAILED), ended.count(S.FAILED, compute_class="cpu")) == (2, 1)
    assert ended.count(S.COMPLETE, subspace="all") == 1


def test_trials_of_earlier_runs_come_in_the_order_of_their_numbers_and_are_kept_in_that_of_their_ends() -> None:
    moments = [3.0, 1.0, None, 2.0]
    ended = FinishedTrials(trial(number, S.FAILED, finished_at=at) for number, at in enumerate(moments))
    assert [one.number for one in ended] == [2, 1, 3, 0]


def test_there_is_no_best_without_a_complete_trial() -> None:
    ended = FinishedTrials([trial(0, S.FAILED), trial(1, S.CANCELLED), trial(2, S.PRUNED, loss=0.1)])
    assert (ended.best, ended.best_of("all")) == (None, None)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_best_is_the_one_of_the_least_loss_and_of_equals_the_first_to_finish(order: tuple[int, ...]) -> None:
    trials = [
        trial(0, S.COMPLETE, loss=0.5, subspace="a"),
        trial(1, S.COMPLETE, loss=0.2, subspace="b"),
        trial(2, S.COMPLETE, loss=0.2, subspace="b"),
    ]
    ended = FinishedTrials()
    for number in order:
        ended.add(trials[number])
    assert ended.best is trials[min((1, 2), key=order.index)]
    assert [ended.best_of(name) for name in "abc"] == [0.5, 0.2, None]


def test_the_best_has_the_least_loss_at_the_highest_budget_and_all_of_it_is_the_highest() -> None:
    ended = [
        trial(number, S.COMPLETE, loss=loss, budget=budget)
        for number, (loss, budget) in enumerate([(0.1, 1.0), (0.3, 9.0), (0.2, 9.0), (0.9, None)])
    ]
    assert [(one.loss, one.budget) for one in sorted(ended, key=merit)] == [
        (0.9, None),
        (0.2, 9.0),
        (0.3, 9.0),
        (0.1, 1.0),
    ]
    assert FinishedTrials(ended).best is ended[3]
    assert FinishedTrials(ended[:3]).best is ended[2]
