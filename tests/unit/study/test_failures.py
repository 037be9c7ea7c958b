"""Failures are counted by kind, and a run whose first trials all fail in one way is hopeless."""

from __future__ import annotations

import pytest

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.study.failures import Failures, Hopelessness

WRONG_NAME = "Traceback (most recent call last):\n  File \"/a/study.py\", line 3, in objective\nKeyError: 'lr'"


def failed(number: int, error: str = WRONG_NAME) -> Trial:
    outcome = Outcome(state=TrialState.FAILED, error=error)
    return Trial(number=number, subspace="all", params={}, state=TrialState.FAILED, outcome=outcome)


def test_failures_are_counted_by_kind_the_most_common_first() -> None:
    failures = Failures([failed(2, "exit code 3"), failed(4), failed(5, "exit code 4"), failed(7), failed(9)])
    assert [str(each) for each in failures.common()] == [
        "3 x KeyError: 'lr' (study.py:3); the first is trial 4",
        "2 x exit code 3; the first is trial 2",
    ]


def test_the_failure_that_is_shown_is_that_of_the_trial_that_is_named() -> None:
    at_7, at_3, at_5 = (failed(number, WRONG_NAME.replace("'lr'", f"{number}")) for number in (7, 3, 5))
    shown = "3 x KeyError: 3 (study.py:3); the first is trial 3"
    assert [str(each) for each in Failures([at_7, at_3, at_5]).common()] == [shown]


@pytest.mark.parametrize("order", [range(5, 8), (7, 5, 6)])
def test_a_run_is_hopeless_once_its_first_trials_by_number_have_all_failed_in_one_way(order: range) -> None:
    failures, verdict = Failures(), Hopelessness([5, 6, 7])
    for number in (3, 9, *order):
        assert verdict.reason is None
        verdict.add(failed(number), failures.add(failed(number)))
    assert verdict.reason == "the first 3 trials have all failed with KeyError: 'lr' (study.py:3)"


@pytest.mark.parametrize(
    ("trials", "errors"),
    [(3, [WRONG_NAME, WRONG_NAME, "exit code 1"]), (4, [WRONG_NAME] * 3), (0, [WRONG_NAME] * 30)],
    ids=["another kind", "one has not failed", "no limit"],
)
def test_other_runs_are_not_hopeless(trials: int, errors: list[str]) -> None:
    failures, verdict = Failures(), Hopelessness(range(trials))
    for number, error in enumerate(errors):
        verdict.add(failed(number), failures.add(failed(number, error)))
    assert verdict.reason is None
