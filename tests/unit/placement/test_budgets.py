"""Start-up and hand-over are learned from promoted trials, in proportion to the evidence."""

from __future__ import annotations

import numpy as np
import pytest
from hyperopt import hp
from msgspec.structs import replace

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.placement.budgets import BudgetCosts, Work
from shadho_celery.placement.model import CostModel
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

BUDGETS = (1.0, 3.0, 9.0, 27.0)
SUBSPACES = split(compile_space({"x": hp.uniform("x", 0, 1)}))
NAME = SUBSPACES[0].name
UNIT = {"strong": 1.0, "weak": 4.0}


def history(
    origins: int, startup: float, handover: float = 0.0, noise: float = 0.1, classes: tuple[str, ...] = ("weak",)
) -> list[Trial]:
    """Trials of params of unlike size that go through all rungs on one class, every other one on two machines."""
    draw = np.random.default_rng(0)
    trials: list[Trial] = []
    for place in range(origins):
        compute_class = classes[place % len(classes)]
        size, origin = float(draw.lognormal(0, 0.3)), len(trials)
        for rung, budget in enumerate(BUDGETS):
            units = budget - (BUDGETS[rung - 1] if rung else 0.0)
            moves = rung > 0 and place % 2 == 1
            seconds = startup + UNIT[compute_class] * size * units + (handover if moves else 0.0)
            outcome = Outcome(
                state=TrialState.COMPLETE,
                loss=0.0,
                seconds=seconds * float(draw.lognormal(0, noise)),
                continued=True if rung else None,
            )
            trials.append(
                Trial(
                    number=len(trials),
                    subspace=NAME,
                    params={"x": float(draw.random())},
                    budget=budget,
                    rung=rung,
                    origin=origin if rung else None,
                    compute_class=compute_class,
                    host=f"{compute_class}.{rung if moves else 0}",
                    state=outcome.state,
                    outcome=outcome,
                )
            )
    return trials


def told(trials: list[Trial]) -> BudgetCosts:
    costs = BudgetCosts()
    for trial in trials:
        costs.tell(trial, costs.work(trial))
    return costs


def test_the_start_up_is_found_whatever_the_params_do_to_the_seconds_of_a_unit() -> None:
    assert told(history(60, 30.0)).startup(NAME, "weak") == pytest.approx(30.0, rel=0.25)


def test_on_a_class_that_is_gone_a_promoted_trial_has_all_of_its_work() -> None:
    finished = history(4, 10.0)
    costs = told(finished)
    promoted = replace(finished[1], origin=0, budget=81.0)
    assert costs.behind(0) == 27.0
    assert costs.ahead(promoted, "gone") == Work(81.0)


def test_where_there_is_no_start_up_next_to_none_is_believed() -> None:
    costs = told(history(60, 0.0))
    assert costs.startup(NAME, "weak") < 0.5
    assert costs.handover < 1.0


def test_the_hand_over_of_a_checkpoint_is_told_from_the_start_up() -> None:
    costs = told(history(100, 10.0, handover=20.0, noise=0.03))
    assert costs.startup(NAME, "weak") == pytest.approx(10.0, rel=0.25)
    assert costs.handover == pytest.approx(20.0, rel=0.4)


def test_a_class_without_enough_promotions_is_believed_to_be_like_the_others() -> None:
    costs = told(history(60, 30.0))
    assert costs.startup(NAME, "strong") == costs.startup(NAME, "weak") > 0


def test_what_lies_in_a_checkpoint_is_no_work() -> None:
    costs = told(history(1, 0.0))
    promoted = Trial(number=9, subspace=NAME, params={"x": 0.5}, budget=81.0, rung=4, origin=0, host="weak.0")
    found = promoted.evolve(outcome=Outcome(state=TrialState.COMPLETE, loss=0.0, continued=True))
    assert costs.work(found) == (81.0 - 27.0, False)
    assert costs.work(found.evolve(host="weak.9")) == (81.0 - 27.0, True)
    anew = promoted.evolve(outcome=Outcome(state=TrialState.COMPLETE, loss=0.0, continued=False))
    assert costs.work(anew) == (81.0, False)


@pytest.mark.slow
@pytest.mark.parametrize("startup", [0.0, 30.0])
def test_seconds_are_those_of_the_rung_on_each_class(startup: float) -> None:
    model = CostModel(SUBSPACES)
    model.tell(*history(120, startup, classes=("strong", "weak")))
    for rung, budget in enumerate(BUDGETS):
        trial = Trial(number=9999, subspace=NAME, params={"x": 0.5}, budget=budget, rung=rung)
        # New draws: a promoted one is known by the run before it.
        [seconds] = np.exp(model.predict([trial], ["strong", "weak"]).mean)
        for column, name in enumerate(("strong", "weak")):
            assert seconds[column] == pytest.approx(startup + UNIT[name] * budget, rel=0.35)


def test_without_a_start_up_seconds_are_predicted_as_without_budgets() -> None:
    model = CostModel(SUBSPACES)
    model.tell(*history(40, 0.0, noise=0.0))
    plain, full = (model.predict(model.typical(budget), ["weak"]).mean for budget in (None, 9.0))
    assert full == pytest.approx(plain + np.log(9.0), abs=1e-12)


def test_a_promoted_trial_of_a_subspace_that_is_gone_is_placed_all_the_same() -> None:
    gone = Trial(number=1, subspace="model=gone", params={"y": 1}, budget=9.0, rung=2, origin=0)
    seconds = CostModel(SUBSPACES).promoted_seconds(gone, ["strong", "weak"], "weak.0")
    assert seconds.tolist() == [[1.0, 1.0]] * 2


def on_rung(number: int, rung: int, seconds: float, origin: int | None = None) -> Trial:
    outcome = Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=seconds, continued=rung > 0)
    facts = {"budget": 3.0**rung, "rung": rung, "origin": origin, "compute_class": "weak", "host": "weak.0"}
    trial = Trial(number=number, subspace=NAME, params={"x": 0.5}, **facts)  # type: ignore[arg-type]
    return trial.evolve(state=outcome.state, outcome=outcome)


def anew(model: CostModel, origin: int) -> float:
    """Seconds of a promoted trial on a class whose one machine does not have its checkpoint."""
    model.see([ComputeClass(name="weak", slots=1, hosts={"weak.9": 1})])
    return float(model.promoted_seconds(on_rung(999, 2, 1.0, origin=origin), ["weak"], "weak.0")[0, 0])


def test_what_a_trial_took_longer_on_lower_rungs_it_is_expected_to_take_longer_again() -> None:
    """The first one as well, before which nothing was known."""
    model = CostModel(SUBSPACES)
    sizes = np.random.default_rng(0).lognormal(0.0, 0.7, 40)
    model.tell(*(on_rung(number, 0, 600.0 * size) for number, size in enumerate(sizes)))
    promoted = list(enumerate(sizes))[10:]
    model.tell(*(on_rung(100 + number, 1, 1200.0 * size, origin=number) for number, size in promoted))
    for number in (0, 1, 2, 20):
        assert anew(model, number) == pytest.approx(600.0 * sizes[number] * 9.0, rel=0.3)
    assert anew(model, 12345) == pytest.approx(600.0 * 9.0, rel=0.5)
