"""The mean of a trial and its repeats decides which trial is the best, and which one is repeated next."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.study.repeats import FEW, Repeats
from shadho_celery.study.table import FinishedTrials

S = TrialState


def ended(number: int, loss: float | TrialState, of: int | None = None, **facts: Any) -> Trial:
    """Return a trial with a loss or another end; a repeat `of` a trial if that is given."""
    constraints = facts.pop("constraints", {})
    state = loss if isinstance(loss, TrialState) else S.COMPLETE
    outcome = Outcome(state=state, loss=loss if state is S.COMPLETE else None, constraints=constraints)
    return Trial(number=number, subspace="all", params={}, origin=of, state=state, outcome=outcome, **facts)


def repeats_of(*trials: Trial, wanted: int = 3) -> Repeats:
    made = Repeats(wanted)
    for trial in trials:
        made.tell(trial)
    return made


LUCKY = [ended(0, 0.1), ended(1, 0.2), ended(2, 0.9, of=0), ended(3, 0.2, of=1), ended(4, 0.8, of=0)]


def test_a_lucky_loss_names_no_winner() -> None:
    """The trial with the least mean of all its results is the best, although another has the least single loss."""
    kept = FinishedTrials(repeats=3)
    for trial in [*LUCKY, ended(5, 0.3, of=1)]:
        kept.add(trial)
    assert kept.best is not None
    assert kept.best.number == 1
    assert kept.repeated is not None
    assert (kept.repeated.results, kept.repeated.words) == (3, "mean of 3, standard deviation 0.0577")
    assert kept.repeated.mean == pytest.approx(0.7 / 3)
    assert [trial.number for trial in kept.best_few(3)] == [1, 0]


def test_trials_with_all_their_results_come_first() -> None:
    """As long as no trial has all its results, the least mean so far counts; then a better mean of fewer does not."""
    assert repeats_of(*LUCKY[:3]).best_few(2) == [1, 0]
    assert repeats_of(*LUCKY).best_few(2) == [0, 1]


@pytest.mark.parametrize("end", [S.FAILED, S.PRUNED])
def test_params_that_fail_under_another_seed_are_not_the_best_and_are_not_repeated(end: TrialState) -> None:
    """Without a result of a repeat, the trial comes last, and takes no further repeats from others."""
    made = repeats_of(ended(0, 0.1), ended(1, 0.5), ended(2, end, of=0))
    assert (made.best_few(2), made.of(0)) == ([1, 0], None)
    assert made.lacking({}, None) == [1, 1]


def test_a_repeat_that_breaks_a_constraint_is_no_result() -> None:
    """An infeasible trial is not repeated, and an infeasible repeat puts its trial last."""
    broken = {"constraints": {"size": 1.0}}
    made = repeats_of(ended(0, 0.1), ended(1, 0.5), ended(2, 0.1, of=0, **broken), ended(3, 0.0, **broken))
    assert (made.best_few(9), made.lacking({}, None)) == ([1, 0], [1, 1])


def test_a_cancelled_repeat_is_replaced() -> None:
    """Pending repeats count, cancelled ones do not."""
    made = repeats_of(ended(0, 0.1), ended(1, S.CANCELLED, of=0))
    assert made.lacking({}, None) == [0, 0]
    assert made.lacking({0: 2}, None) == []


def test_only_the_best_few_are_repeated() -> None:
    """Each of the best FEW lacks one result of two, the best first."""
    made = repeats_of(*(ended(number, -float(number)) for number in range(9)), wanted=2)
    assert made.lacking({}, None) == [8, 7, 6][:FEW]


def test_only_trials_at_the_full_budget_are_repeated_and_are_the_best() -> None:
    """A loss at a low budget is no rival of one at the full budget. A promoted trial has the folder of its origin."""
    low, promoted = ended(0, 0.1, budget=1.0, rung=0), ended(1, 0.5, of=0, budget=3.0, rung=1)
    assert repeats_of(low).lacking({}, 3.0) == []
    made = repeats_of(low, promoted, ended(2, 0.5, of=1, budget=3.0), wanted=2)
    assert (made.best_few(1), made.folders(2)) == ([1], [0, 0])
    assert made.lacking({}, 3.0) == []


@pytest.mark.parametrize("loss", [0.1, -3.7, 0.0, 1e-320, 1.7e308])
def test_an_objective_without_a_seed_has_no_deviation(loss: float) -> None:
    """Equal losses, however large or small, have themselves as their mean, and a standard deviation of exactly 0."""
    made = repeats_of(ended(0, loss), ended(1, loss, of=0), ended(2, loss, of=0)).of(0)
    assert made is not None
    assert (made.deviation, made.mean) == (0.0, pytest.approx(loss))


def test_losses_far_apart_do_not_overflow() -> None:
    """The greatest floats have a mean."""
    made = repeats_of(ended(0, 1.7e308), ended(1, -1.7e308, of=0), wanted=2).of(0)
    assert made is not None
    assert (made.mean, made.deviation) == (0.0, math.inf)


def test_trials_of_earlier_runs_are_told_before_their_repeats() -> None:
    """The clock of a machine may be behind, so that a repeat seems to end before its trial."""
    trials = [ended(0, 0.1, finished_at=9.0), ended(1, 0.9, of=0, finished_at=2.0), ended(2, 0.3, finished_at=3.0)]
    kept = FinishedTrials(trials, repeats=2)
    assert kept.repeated is not None
    assert kept.repeated.mean == pytest.approx(0.5)
