"""Limits say when a study has had enough; those that make no sense are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.study.state import Limits


def complete(loss: float) -> Trial:
    outcome = Outcome(state=TrialState.COMPLETE, loss=loss)
    return Trial(number=0, subspace="all", params={}, state=TrialState.COMPLETE, outcome=outcome)


@pytest.mark.parametrize(
    ("limits", "about"),
    [
        ({}, "trials"),
        ({"seconds": 0.0}, "seconds"),
        ({"seconds": -1.0}, "seconds"),
        ({"seconds": math.nan}, "seconds"),
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(limits: dict[str, Any], about: str) -> None:
    with pytest.raises(UsageError, match=about):
        Limits(**limits)


def test_without_a_limit_there_is_no_end_to_what_may_be_done() -> None:
    assert Limits(target=0.0).trials_left(10**9) == math.inf
    assert Limits(target=0.0).seconds_left(0.0, 1e9) == math.inf
    assert not Limits(trials=1).is_met_by(complete(-math.inf))


def test_what_is_left_is_counted_from_what_there_is_and_may_be_overdrawn() -> None:
    limits = Limits(trials=5, seconds=10.0)
    assert [limits.trials_left(trials) for trials in (0, 5, 7)] == [5, 0, -2]
    assert limits.seconds_left(100.0, 108.0) == 2.0


def test_a_target_is_in_the_direction_of_its_loss_and_only_a_feasible_trial_meets_it() -> None:
    limits = Limits.of(StudySettings(target=0.9, objectives={"accuracy": "maximize"}))
    assert limits.target == -0.9
    assert limits.is_met_by(complete(-0.95))
    broken = Outcome(state=TrialState.COMPLETE, loss=-0.95, constraints={"ms": 0.1})
    assert not limits.is_met_by(complete(-0.95).evolve(outcome=broken))
    with pytest.raises(UsageError, match="a target is for one loss, but this study has several: a, b"):
        Limits.of(StudySettings(target=0.9, objectives={"a": "minimize", "b": "maximize"}))


def test_a_target_is_met_by_the_loss_itself_and_not_without_a_trial() -> None:
    best = complete(0.5)
    assert not Limits(target=0.5).is_met_by(None)
    assert [Limits(target=target).is_met_by(best) for target in (0.4, 0.5, 0.6)] == [False, True, True]
