"""An objective that does not look at its budget is found by the seconds of its promoted trials."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.fidelity.budget_use import ENOUGH, BudgetUse

S = TrialState


def ended(number: int, rung: int, seconds: float, origin: int | None = None, state: TrialState = S.COMPLETE) -> Trial:
    outcome = Outcome(state=state, loss=0.0 if state is S.COMPLETE else None, seconds=seconds, continued=False)
    return Trial(
        number=number,
        subspace="all",
        params={},
        rung=rung,
        budget=3.0**rung,
        origin=origin,
        compute_class="gpu" if number % 2 else "cpu",
        state=state,
        outcome=outcome,
    )


def watched(multiple: float, *, seconds: float = 10.0, trials: int = ENOUGH, other_class: bool = False) -> BudgetUse:
    use = BudgetUse()
    for number in range(trials):
        use.tell(ended(2 * number, 0, seconds))
    for number in range(trials):
        use.tell(ended(1000 + 2 * number + other_class, 1, multiple * seconds, origin=2 * number))
    return use


def test_promoted_trials_that_take_no_longer_are_noticed() -> None:
    assert "context.budget" in (watched(1.0).notice or "")
    assert watched(3.0).notice is None


@pytest.mark.parametrize(
    "use",
    [
        watched(1.0, trials=ENOUGH - 1),
        watched(1.0, seconds=0.01),
        watched(1.0, other_class=True),
        BudgetUse(),
    ],
    ids=["few trials", "short ones", "another class", "none"],
)
def test_of_few_or_short_trials_and_of_those_elsewhere_nothing_is_said(use: BudgetUse) -> None:
    assert use.notice is None


@pytest.mark.parametrize(("eta", "noticed"), [(2, False), (3, True)])
def test_a_trial_that_continues_is_expected_to_take_longer_only_where_more_is_left_of_its_budget(
    eta: int, noticed: bool
) -> None:
    use = BudgetUse()
    for number in range(ENOUGH):
        for rung in range(2):
            outcome = Outcome(state=S.COMPLETE, loss=0.0, seconds=1.0, continued=rung == 1)
            facts = {"rung": rung, "budget": float(eta**rung), "origin": number if rung else None}
            told = Trial(number=100 * rung + number, subspace="all", params={}, state=S.COMPLETE, outcome=outcome)
            use.tell(replace(told, **facts))
    assert (use.notice is not None) == noticed


def test_failed_trials_and_those_without_budgets_tell_nothing() -> None:
    use = BudgetUse()
    for number in range(20):
        use.tell(ended(number, 0, 1.0, state=S.FAILED))
        use.tell(Trial(number=number, subspace="all", params={}, state=S.COMPLETE, outcome=Outcome(state=S.COMPLETE)))
    assert use.notice is None
