"""A free slot takes the promoted trial that ends there first, and leaves others to faster machines, never for ever."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Attempt, Outcome, Params, Trial, TrialState
from shadho_celery.placement.base import Slot
from shadho_celery.placement.budgets import BudgetCosts
from shadho_celery.placement.model import CostModel, Prediction
from shadho_celery.placement.pool import Promotions
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

#: seconds of one unit of budget, and of a start-up
UNIT, STARTUP = {"strong": 1.0, "weak": 4.0}, 0.0


class Budgets(BudgetCosts):
    """A trial continues at a third of its budget; origin n is on machine strong.n."""

    def host(self, origin: int) -> str | None:
        return f"strong.{origin}"

    def _rest(self, trial: Trial | Attempt) -> float:
        return (trial.budget or 1.0) * 2 / 3


class Known(CostModel):
    """Exact seconds."""

    def __init__(self, startup: float = STARTUP) -> None:
        super().__init__(split(compile_space({"x": hp.uniform("x", 0, 1)})))
        self.startup = startup
        self.budgets = Budgets()

    def predict(
        self, trials: Sequence[Trial | Attempt], classes: Sequence[str], width: int | None = None
    ) -> Prediction:
        units = np.array([[self.budgets.ahead(trial, name).units for name in classes] for trial in trials], float)
        mean = np.log(self.startup + units * [UNIT[name] for name in classes])
        return Prediction(mean, mean, mean, mean)


class Busy:
    """All slots of the strong class are taken, but for those of `free` machines."""

    def __init__(self, *free: str) -> None:
        self.free = free

    def taken(self, compute_class: str) -> int:
        return 4 - len(self.free) if compute_class == "strong" else 15

    def running(self) -> Mapping[str, int]:
        return {f"strong.{slot}": 1 for slot in range(4) if f"strong.{slot}" not in self.free}


def classes(storage: str) -> list[ComputeClass]:
    sizes = {"strong": 4, "weak": 16}
    return [
        ComputeClass(
            name=name,
            slots=slots,
            hosts={f"{name}.{slot}": 1 for slot in range(slots)},
            storages={f"{name}.{slot}": storage for slot in range(slots)},
        )
        for name, slots in sizes.items()
    ]


def promotions(
    storage: str = "shared", startup: float = STARTUP, seconds: float = 4.0, model: CostModel | None = None
) -> Promotions:
    model = model or Known(startup)
    made = Promotions(model)
    made.see(classes(storage))
    model.see(classes(storage))
    made.tell([ended(name, seconds) for name in UNIT])
    return made


def ended(compute_class: str, seconds: float, origin: int | None = None, continued: bool | None = None) -> Trial:
    outcome = Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=seconds, continued=continued)
    where = {"compute_class": compute_class, "host": f"{compute_class}.0"}
    rung = None if origin is None else 1
    facts = {"origin": origin, "rung": rung, "budget": 1.0, "state": outcome.state, "outcome": outcome}
    return Trial(number=0, subspace="all", params={}, **facts, **where)  # type: ignore[arg-type]


def offered(*rungs: int, params: Params | None = None) -> list[Trial]:
    return [
        Trial(number=origin, subspace="all", params=params or {}, budget=3.0**rung, rung=rung, origin=origin)
        for origin, rung in enumerate(rungs)
    ]


def pick(
    made: Promotions,
    name: str,
    trials: list[Trial],
    now: float = 0.0,
    load: Busy | None = None,
    *,
    fits: Collection[str] = ("strong", "weak"),
    new: int | None = 0,
) -> tuple[int, str | None] | None:
    """The place of the trial that a slot of a class gets, and its machine; the trials fit some classes."""
    slot = Slot(ComputeClass(name=name, slots=1), load or Busy(), now)
    choice = made.pick(slot, trials, lambda trial, where: where.name in fits, new)
    if choice is None:
        return None
    assert isinstance(choice.picked, Trial)
    return trials.index(choice.picked), choice.only_on


def test_the_top_rung_is_left_to_the_strong_class_which_takes_it() -> None:
    made = promotions()
    assert pick(made, "weak", offered(4)) is None
    assert pick(made, "strong", offered(4)) == (0, None)


def test_a_strong_slot_takes_the_highest_rung_first_where_classes_differ_in_speed_only() -> None:
    assert pick(promotions(), "strong", offered(1, 4, 2)) == (1, None)


def test_with_a_start_up_a_weak_slot_takes_low_rungs_and_leaves_high_ones() -> None:
    made = promotions(startup=30.0, seconds=40.0)
    assert pick(made, "weak", offered(4, 1)) == (1, None)


def test_the_longer_the_queue_for_the_strong_class_the_more_a_weak_slot_takes() -> None:
    made = promotions(seconds=20.0)
    assert pick(made, "weak", offered(*[3] * 4)) is None
    assert pick(made, "weak", offered(*[3] * 40)) is not None


def test_what_has_been_left_for_as_long_as_it_could_gain_is_taken() -> None:
    made, top = promotions(), offered(4)
    gain = 3 * 81 * 2 / 3
    assert pick(made, "weak", top, now=0.0) is None
    assert pick(made, "weak", top, now=gain - 1) is None
    assert pick(made, "weak", top, now=gain + 1) == (0, None)


def test_no_slot_idles_for_a_promotion_that_it_could_run() -> None:
    made = promotions()
    for new in (None, 4):
        assert pick(made, "weak", offered(4), new=new) == (0, None)


def test_nothing_is_left_to_a_class_that_it_does_not_fit() -> None:
    assert pick(promotions(), "weak", offered(4), fits=["weak"]) == (0, None)


def test_what_does_not_fit_here_is_not_taken() -> None:
    assert pick(promotions(), "weak", offered(1), fits=[]) is None


def test_without_shared_storage_a_promotion_goes_to_the_machine_of_its_checkpoint() -> None:
    made = promotions(storage="")
    assert pick(made, "strong", offered(4, 3), load=Busy("strong.1")) == (1, "strong.1")
    assert pick(made, "strong", offered(4, 3), load=Busy("strong.0")) == (0, "strong.0")


def test_on_shared_storage_any_machine_of_the_class_will_do() -> None:
    assert pick(promotions("shared"), "strong", offered(4, 3), load=Busy("strong.1")) == (0, None)


def test_where_checkpoints_are_not_found_their_machine_does_not_matter() -> None:
    model = Known()
    made = promotions(storage="", model=model)
    model.tell(ended("strong", 4.0, origin=0, continued=False))
    assert pick(made, "strong", offered(4, 3), load=Busy("strong.1")) == (0, None)


@pytest.mark.parametrize("name", ["strong", "weak"])
def test_one_class_alone_takes_promotions_in_their_turn(name: str) -> None:
    made = promotions()
    made.see([each for each in classes("shared") if each.name == name])
    assert pick(made, name, offered(4, 2, 1)) == (0, None)
