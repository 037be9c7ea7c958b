"""Failures are counted by kind, and a run whose first trials all fail in one way is hopeless."""

from __future__ import annotations

import pytest

from shadho_celery.core.failures import Failures, Hopelessness
from shadho_celery.core.trial import Outcome, Trial, TrialState

WRONG_NAME = "Traceback (most recent call last):\n  File \"/a/study.py\", line 3, in objective\nKeyError: 'lr'"


def failed(number: int, error: str = WRONG_NAME) -> Trial:
    outcome = Outcome(state=TrialState.FAILED, error=error)
    return Trial(number=number, subspace="all", params={}, state=TrialState.FAILED, outcome=outcome)


def test_failures_are_counted_by_kind_the_most_common_first() -> None:
    failures = Failures([failed(2, "exit code 3"), failed(4), failed(5, "exit code 4"), failed(7), failed(9)])
    assert [str(each) for each in failures.common()] == [
        "3 x KeyError: 'lr' (study.py:3); the first is trial 4",
        "2 x exit code …; the first is trial 2",
    ]


def test_the_failure_that_is_shown_is_true_of_all_trials_that_it_counts() -> None:
    def shown(*said: tuple[int, str]) -> list[str]:
        trials = [failed(number, WRONG_NAME.replace("KeyError: 'lr'", text)) for number, text in said]
        return [str(each) for each in Failures(trials).common()]

    assert shown((7, "KeyError: 7"), (3, "KeyError: 3"), (5, "KeyError: 5")) == [
        "3 x KeyError: … (study.py:3); the first is trial 3"
    ]
    assert shown((4, "TypeError: SVC() got 7.0"), (2, "TypeError: SVC() got 7.0")) == [
        "2 x TypeError: SVC() got 7.0 (study.py:3); the first is trial 2"
    ]
    forest = [(number, f"TypeError: Forest() got {number}.0") for number in (0, 2, 3)]
    assert shown(*forest, (1, "TypeError: SVC() got 1.0"), (4, "TypeError: SVC() got 1.0")) == [
        "3 x TypeError: Forest() got … (study.py:3); the first is trial 0",
        "2 x TypeError: SVC() got 1.0 (study.py:3); the first is trial 1",
    ]


def test_a_run_is_hopeless_whatever_the_messages_of_one_line() -> None:
    failures, verdict = Failures(), Hopelessness([0, 1])
    for number, model in enumerate(("SVC", "Forest")):
        trial = failed(number, WRONG_NAME.replace("'lr'", f"{model} has no lr"))
        verdict.add(trial, failures.add(trial))
    assert verdict.reason == "the first 2 trials have all failed with KeyError (study.py:3)"


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
