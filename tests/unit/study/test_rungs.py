"""Finished trials by rung, and how far the ranks of a rung agree with those of the next one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.study.table import FinishedTrials, OnClass


@dataclass
class Finished:
    """Numbers trials as they finish."""

    number: int = -1

    def trial(
        self, rung: int | None, loss: float | None, origin: int | None = None, at: str = "cpu", state: str = "COMPLETE"
    ) -> Trial:
        self.number += 1
        return Trial(
            number=self.number,
            subspace="all",
            params={},
            budget=None if rung is None else 3.0**rung,
            rung=rung,
            origin=origin,
            compute_class=at,
            state=TrialState(state),
            outcome=Outcome(state=TrialState(state), loss=loss, seconds=1.0 + self.number),
            finished_at=float(self.number),
        )


def test_trials_are_counted_by_budget_and_class_with_the_median_seconds_of_complete_ones() -> None:
    new = Finished()
    trials = [new.trial(0, 0.3), new.trial(0, 0.1, at="gpu"), new.trial(0, 0.2, at="gpu")]
    trials += [new.trial(0, 0.4, state="PRUNED"), new.trial(0, None, state="FAILED", at="gpu"), new.trial(1, 0.1, 1)]
    finished = FinishedTrials(trials)
    lower, upper = finished.rungs()
    assert finished.by_budget == {1.0: 3, 3.0: 1}
    assert (lower.budget, upper.budget) == (1.0, 3.0)
    assert lower.classes == {
        "cpu": OnClass(complete=1, pruned=1, failed=0, seconds=1.0),
        "gpu": OnClass(complete=2, pruned=0, failed=1, seconds=2.5),
    }
    assert upper.classes == {"cpu": OnClass(complete=1, pruned=0, failed=0, seconds=6.0)}
    # One trial on both has no rank among itself.
    assert lower.agreement is None
    assert upper.agreement is None


@pytest.mark.parametrize(
    ("above", "least", "most"), [([0.1, 0.2, 0.3], 1.0, 1.0), ([0.3, 0.2, 0.1], 0.0, 0.5), ([0.2, 0.1, 0.3], 0.5, 0.99)]
)
def test_the_agreement_is_the_trust_of_the_forecast(above: list[float], least: float, most: float) -> None:
    new = Finished()
    trials = [new.trial(0, loss) for loss in (0.1, 0.2, 0.3, 0.4)]
    trials += [new.trial(1, loss, origin) for origin, loss in enumerate(above)]
    lower, upper = FinishedTrials(trials).rungs()
    assert lower.agreement is not None
    assert least - 1e-9 <= lower.agreement <= most + 1e-9
    assert upper.agreement is None


def test_what_failed_or_breaks_a_constraint_does_not_count() -> None:
    new = Finished()
    trials = [new.trial(0, loss) for loss in (0.1, 0.2, 0.3, 0.4)]
    trials += [new.trial(1, 0.1, 0), new.trial(1, None, 1, state="FAILED"), new.trial(1, 0.2, 2), new.trial(1, 0.3, 3)]
    outcome = Outcome(state=TrialState.COMPLETE, loss=0.01, constraints={"c": 1.0})
    infeasible = [*trials[:6], replace(trials[6], outcome=outcome), trials[7]]
    assert FinishedTrials(trials).rungs()[0].agreement is not None
    assert FinishedTrials(infeasible).rungs()[0].agreement is None


def test_budgets_of_another_ladder_do_not_come_between() -> None:
    new = Finished()
    trials = [new.trial(0, loss) for loss in (0.1, 0.2, 0.3)]
    trials += [new.trial(1, loss, origin) for origin, loss in enumerate((0.1, 0.2, 0.3))]
    other = replace(new.trial(0, 0.5), budget=10 / 9)
    assert [(rung.budget, rung.agreement) for rung in FinishedTrials([*trials, other]).rungs()] == [
        (1.0, 1.0),
        (10 / 9, None),
        (3.0, None),
    ]


def test_a_study_without_budgets_has_no_rungs() -> None:
    new = Finished()
    assert FinishedTrials([new.trial(None, 0.1), new.trial(None, 0.2)]).rungs() == []
    assert FinishedTrials().rungs() == []
