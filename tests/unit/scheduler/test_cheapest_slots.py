"""Placed by money, a study uses only the slots that it needs to end by its deadline; placed by time, all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hyperopt import hp
from services.families import Family, cluster_of, fleet_of

from shadho_celery.cli.live import cheapest_lines
from shadho_celery.core.records import MachineRecord, MoneyPlan, Present
from shadho_celery.core.settings import StudySettings, read_settings
from shadho_celery.errors import UsageError
from shadho_celery.placement.model import CostModel
from shadho_celery.scheduler.plan import Plan
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.scheduler.wishes import CheapestSlots
from shadho_celery.simulation.simulation import Cluster, Simulation, simulate
from shadho_celery.space.compile import compile_space
from shadho_celery.study.recorder import Recorder
from shadho_celery.study.state import Limits

SPACE = compile_space({"x": hp.uniform("x", 0, 1)})
NAMES = ("gpu", "cpu")
#: a network that costs as much on either class, and a tree that costs a tenth on the CPU
FAMILIES = {
    "net": Family(seconds={"gpu": 60, "cpu": 1500}),
    "tree": Family(seconds={"gpu": 60, "cpu": 90}),
}


def cluster(
    families: Mapping[str, Family] = FAMILIES,
    trials: int = 300,
    fidelity: Mapping[str, Any] | None = None,
    checkpoints: str = "none",
    **facts: Mapping[str, float | None],
) -> Cluster:
    """A cluster of both classes; `facts` are a fact of each of them."""
    facts = {"workers": {"gpu": 6, "cpu": 20}, "price": {"gpu": 2.5, "cpu": 0.08}, **facts}
    classes = {name: {fact: by_class[name] for fact, by_class in facts.items()} for name in NAMES}
    settings = {"trials": trials, "fidelity": fidelity}
    return cluster_of(fleet_of(classes, checkpoints=checkpoints), families, settings)


def play(deadline: float | None = None, **changes: Any) -> Simulation:
    place_by: Literal["time", "money"] = "time" if deadline is None else "money"
    return simulate(cluster(**changes), place_by=place_by, deadline=deadline, seed=1)


@pytest.mark.slow
def test_a_later_deadline_saves_money_and_is_kept() -> None:
    by_time = play()
    by_money = play(3.0 * by_time.seconds)
    assert sum(by_money.money.values()) < 0.8 * sum(by_time.money.values())
    assert by_money.seconds <= 3.0 * by_time.seconds
    assert by_money.trials == by_time.trials == 300
    assert not by_money.notices


@pytest.mark.slow
@pytest.mark.parametrize(("how", "checkpoints", "most"), [("asha", "shared", 0.75), ("auto", "machine", 0.9)])
def test_a_study_with_budgets_saves_money_and_keeps_its_deadline(how: str, checkpoints: str, most: float) -> None:
    """On the disks of single machines it saves less, because promoted trials return to the machine of their files."""
    given = {"fidelity": {"least": 1, "most": 9, "how": how}, "checkpoints": checkpoints}
    by_time = play(**given)
    by_money = play(3.0 * by_time.seconds, **given)
    assert sum(by_money.money.values()) < most * sum(by_time.money.values())
    assert by_money.seconds <= 3.0 * by_time.seconds
    assert by_money.trials == by_time.trials == 300
    assert not by_money.notices


def test_further_trials_have_the_budgets_of_the_latest_ones_and_at_first_those_of_the_ladder() -> None:
    shares: list[dict[float, float]] = []

    class Told(Scheduler):
        def update_classes(self) -> None:
            super().update_classes()
            shares.append(self.proposals.budget_mix())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shadho_celery.scheduler.plan.Scheduler", Told)
        found = play(fidelity={"least": 1, "most": 9, "how": "asha"}, trials=60)
    assert shares[0] == pytest.approx({1.0: 9 / 13, 3.0: 3 / 13, 9.0: 1 / 13})
    latest = Counter(trial.budget for trial in found.study)
    assert shares[-1] == pytest.approx({each: (latest[each] + 30 * shares[0][each]) / 90 for each in shares[0]})


def test_the_latest_plan_is_recorded_with_the_study() -> None:
    by_time = play(trials=60)
    plan = play(3.0 * by_time.seconds, trials=60).study.record.money_plan
    assert plan is not None
    assert (plan.deadline, plan.money is not None) == (pytest.approx(3.0 * by_time.seconds, abs=2), True)
    plan = play(0.3 * by_time.seconds, trials=60).study.record.money_plan
    assert plan == MoneyPlan(deadline=plan.deadline if plan else 0.0), "it cannot be kept"
    assert by_time.study.record.money_plan is None


def test_a_deadline_that_cannot_be_kept_is_said_and_all_slots_are_used() -> None:
    by_time = play()
    by_money = play(0.3 * by_time.seconds)
    assert "cannot be kept, so trials are placed by time" in by_money.notices[0]
    assert by_money.seconds < 1.5 * by_time.seconds


def test_without_any_price_all_slots_are_used_and_it_is_said() -> None:
    prices: dict[str, float | None] = {"gpu": None, "cpu": None}
    found = play(1e5, price=prices)
    assert found.notices == ["trials are placed by time: no worker announces a price (worker --price)"]
    assert [trial.params for trial in found.study] == [trial.params for trial in play(price=prices).study]


@pytest.mark.parametrize("price", [0.0, None])
def test_a_class_that_costs_nothing_runs_all_it_can(price: float | None) -> None:
    """A class without a price counts as free, as its trials do for a limit on money."""
    found = play(1e6, price={"gpu": 2.5, "cpu": price}, trials=100)
    assert found.utilisation["cpu"] > 0.5
    assert sum(found.placed[f"family={family}"]["gpu"] for family in FAMILIES) <= 20, (
        "those that show the seconds of the class"
    )


def test_a_trial_that_fits_no_cheap_class_runs_on_the_other() -> None:
    large = {
        "net": Family(seconds={"gpu": 60, "cpu": 60}, memory_gib=8),
        "tree": Family(seconds=dict.fromkeys(NAMES, 60)),
    }
    found = play(1e6, families=large, memory_gib={"gpu": 16, "cpu": 4}, trials=60)
    assert found.trials == 60, "it comes to an end"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"place_by": "money"}, "place_by money needs a deadline, such as 4h"),
        ({"deadline": "4h"}, "deadline is for place_by money; give both, or leave it out"),
        ({"place_by": "luck"}, "place_by: "),
        ({"deadline": -5}, "deadline: "),
        ({"deadline": float("nan")}, "deadline: "),
        ({"deadline": "soon"}, "'soon' is not a duration; write it as 90s, 10m, 4h or 2d"),
    ],
)
def test_settings_of_money_that_cannot_be_are_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Plan.of(SPACE, read_settings(given), Limits(trials=3))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_deadline_needs_a_number_of_trials() -> None:
    with pytest.raises(UsageError, match="is the time for a number of trials; give trials, too"):
        Plan.of(SPACE, StudySettings(place_by="money", deadline=60.0), Limits(seconds=3))


def test_the_price_of_a_class_is_the_mean_of_its_slots() -> None:
    recorder = Recorder()
    prices = {"a": ("gpu", 1, 2.0), "b": ("gpu", 3, 4.0), "c": ("cpu", 1, None)}

    def present(name: str) -> Present:
        compute_class, slots, price = prices[name]
        return Present(compute_class, slots, MachineRecord(host=name), price)

    recorder.see(prices.keys(), 0.0, present)
    assert recorder.prices() == {"gpu": 3.5, "cpu": None}
    recorder.see(["c"], 1.0, present)
    assert recorder.prices() == {"cpu": None}


@pytest.mark.slow
def test_a_line_says_what_another_deadline_costs() -> None:
    said: list[str] = []

    class Told(Scheduler):
        def update_classes(self) -> None:
            super().update_classes()
            said.extend(cheapest_lines(self))

    original = "shadho_celery.scheduler.plan.Scheduler"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(original, Told)
        play(15_000.0, trials=100)
    assert "in all by the deadline in 4 h" in said[0]
    assert all("; an hour more saves" in line for line in said)


@pytest.mark.slow
def test_after_its_deadline_a_study_predicts_each_trial_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, asked = Counter[str](), Counter[tuple[object, ...]]()
    see, predict = CheapestSlots.see, CostModel.mean_seconds

    def counted_see(self: CheapestSlots, *given: Any) -> None:
        turns["turn"] += 1
        see(self, *given)

    def counted_predict(self: CostModel, trials: Any, *given: Any) -> Any:
        if len(trials) == 1:
            asked[(turns["turn"], trials[0].subspace, *trials[0].params.items())] += 1
        return predict(self, trials, *given)

    monkeypatch.setattr(CheapestSlots, "see", counted_see)
    monkeypatch.setattr(CostModel, "mean_seconds", counted_predict)
    play(1.0, trials=60)
    assert max(asked.values()) == 1


@pytest.mark.slow
def test_no_long_trial_begins_on_a_slow_class_near_the_deadline() -> None:
    """Though the plan has none of its kind left, or has just left it out there."""
    families = {**FAMILIES, "net": Family(seconds={"gpu": 60, "cpu": 4000})}
    described = cluster(families=families, trials=200)
    by_time = simulate(described, seed=1)
    by_money = simulate(described, place_by="money", deadline=2.0 * by_time.seconds, seed=1)
    assert by_money.seconds <= 2.1 * by_time.seconds
