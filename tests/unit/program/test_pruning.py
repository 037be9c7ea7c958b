"""A search in this process stops trials by their reports; in a loop of one's own `report` says so."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp
from services.cases import cases

import shadho_celery
from shadho_celery.context import Context
from shadho_celery.errors import UsageError

SPACE = {"x": hp.uniform("x", -1, 1)}
STEPS = 9


def objective(params: dict[str, float], context: Context) -> float:
    loss = 0.0
    for step in range(1, STEPS + 1):
        loss = params["x"] ** 2 + 1 / step
        context.report(step, loss)
        if context.should_stop():
            break
    return loss


def deaf(params: dict[str, float], context: Context) -> float:
    for step in range(1, STEPS + 1):
        context.report(step, params["x"] ** 2 + 1 / step)
    raise RuntimeError("it was to stop before")


@pytest.mark.parametrize("pruner", ["median", "asha", {"how": "percentile", "percentile": 30}])
def test_bad_trials_end_pruned_with_their_last_report(pruner: Any) -> None:
    found = shadho_celery.minimize(objective, SPACE, trials=30, seed=0, sampler="random", pruner=pruner)
    pruned = [trial for trial in found.trials if trial.state == "PRUNED"]
    assert 5 < len(pruned) < 30
    for trial in pruned:
        last = trial.reports[-1]
        assert (trial.step, trial.loss) == (last.step, last.loss)
        assert trial.step is not None
        assert trial.step < STEPS
    assert found.best is not None
    assert found.best.state == "COMPLETE"
    assert abs(found.best.params["x"]) < 0.1


def test_what_an_objective_does_once_it_is_to_stop_does_not_count() -> None:
    with pytest.warns(UserWarning, match=r"no successful trial \(12 pruned\)"):
        found = shadho_celery.minimize(deaf, SPACE, trials=12, seed=0, sampler="random", pruner="threshold:0.5")
    assert {str(trial.state) for trial in found.trials} == {"PRUNED"}


def test_the_same_seed_prunes_the_same_trials() -> None:
    one, two = (shadho_celery.minimize(objective, SPACE, trials=25, seed=3, pruner="asha") for _ in range(2))
    assert [(t.params, t.state, t.step) for t in one.trials] == [(t.params, t.state, t.step) for t in two.trials]


def test_a_resumed_study_prunes_as_before_and_none_ends_it(tmp_path: Path) -> None:
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path / 'a.db'}", "study": "s"}
    whole = shadho_celery.minimize(objective, SPACE, trials=24, seed=1, sampler="random", pruner="asha")
    shadho_celery.minimize(objective, SPACE, trials=10, seed=1, sampler="random", pruner="asha", **where)
    again = shadho_celery.minimize(objective, SPACE, trials=24, resume=True, **where)
    assert [(t.params, t.state, t.step) for t in again.trials] == [(t.params, t.state, t.step) for t in whole.trials]
    rest = shadho_celery.minimize(objective, SPACE, trials=40, resume=True, pruner="none", **where)
    assert {str(trial.state) for trial in rest.trials[24:]} == {"COMPLETE"}


def test_in_a_loop_of_ones_own_report_tells_when_to_stop() -> None:
    with shadho_celery.Study(SPACE, seed=0, sampler="random", pruner="asha") as study:
        for _ in range(20):
            trial = study.ask()
            for step in range(1, STEPS + 1):
                if study.report(trial, step, trial.values["x"] ** 2 + 1 / step):
                    break
            told = study.tell(trial, trial.values["x"] ** 2)
            assert study.report(trial, STEPS, 0.0) if told.state == "PRUNED" else told.loss == trial.values["x"] ** 2
        assert {str(each.state) for each in study.trials} == {"COMPLETE", "PRUNED"}


def test_a_report_that_is_none_is_refused_in_one_line() -> None:
    with shadho_celery.Study(SPACE, seed=0, pruner="asha") as study:
        trial = study.ask()
        for step, loss in ((1.5, 1.0), ("one", 1.0), (1, "low"), (2**70, 1.0)):
            with pytest.raises(UsageError, match=r"context\.report"):
                study.report(trial, step, loss)  # type: ignore[arg-type]
        study.tell(trial, 1.0)
        with pytest.raises(UsageError, match="has its result already"):
            study.report(trial, 1, 1.0)


TWO = {"quality": "maximize", "cost": "minimize"}


def two(params: dict[str, float], context: Context) -> dict[str, dict[str, float]]:
    """Quality and cost have a trade-off in `x`, and `waste` makes both worse."""
    losses: dict[str, float] = {}
    for step in range(1, STEPS + 1):
        quality = (params["x"] - params["waste"]) * step / STEPS
        losses = {"cost": params["x"] + params["waste"], "quality": quality}
        context.report(step, losses)
        if context.should_stop():
            break
    return {"losses": losses}


@pytest.mark.parametrize("pruner", ["asha", "median", "percentile:30"])
def test_of_several_losses_those_that_many_trials_dominate_are_stopped(pruner: str, tmp_path: Path) -> None:
    """No trial that ends on the front is stopped; losses to maximise have their own signs; a resumed study prunes as
    before.
    """
    space = {"x": hp.uniform("x", 0, 1), "waste": hp.uniform("waste", 0, 1)}
    options: dict[str, Any] = {"seed": 0, "sampler": "random", "progress": False}
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path / 'a.db'}", "study": "s"}
    settings: dict[str, Any] = {"pruner": pruner, "objectives": TWO}
    every = shadho_celery.minimize(two, space, trials=40, objectives=TWO, **options)
    found = shadho_celery.minimize(two, space, trials=40, **settings, **options)
    pruned = {trial.number: trial for trial in found.trials if trial.state == "PRUNED"}
    assert len(pruned) > 8
    assert not pruned.keys() & {trial.number for trial in every.front}
    assert [trial.losses for trial in found.front] == [trial.losses for trial in every.front]
    for trial in pruned.values():
        assert trial.losses == trial.reports[-1].losses
        assert trial.losses["quality"] == trial.reports[-1].loss
        assert trial.losses["cost"] > 0
    shadho_celery.minimize(two, space, trials=15, **settings, **options, **where)
    again = shadho_celery.minimize(two, space, trials=40, resume=True, progress=False, **where)
    assert [(t.params, t.state, t.step) for t in again.trials] == [(t.params, t.state, t.step) for t in found.trials]


def test_a_report_of_other_names_than_the_objectives_is_refused_in_one_line() -> None:
    with shadho_celery.Study(SPACE, seed=0, pruner="median:1", objectives=TWO) as study:
        trial = study.ask()
        for loss, said in (
            ({"quality": 1.0}, "is a dict with 'quality'; the study's objectives are quality, cost"),
            ({"quality": 1.0, "cost": 2.0, "ms": 3.0}, "'ms'; the study's objectives are quality, cost"),
            (0.5, "is not a dict but 0.5; .* report {'quality': ..., 'cost': ...}"),
            ({"quality": 1.0, "cost": "low"}, "the loss cost is not a number but str"),
        ):
            with pytest.raises(UsageError, match=f"^context.report: .*{said}") as caught:
                study.report(trial, 1, loss)  # type: ignore[arg-type]
            assert "\n" not in str(caught.value)
        assert not study.report(trial, 1, {"quality": 1.0, "cost": 2.0})
        study.report(trial, 2, {"quality": 1.0, "cost": 2.0})
        study.tell(trial, {"losses": {"quality": 1.0, "cost": 2.0}})
        worse = study.ask()
        assert study.report(worse, 1, {"quality": math.nan, "cost": 0.0}), "a diverged trial is worse than all others"
        told = study.trials[worse.number]
        assert (told.state, told.loss, told.losses) == ("PRUNED", None, {})
        assert told.reports[0].losses == {"cost": 0.0}


@pytest.mark.parametrize("objectives", [None, {"quality": "maximize"}])
def test_one_loss_may_be_reported_by_its_name(objectives: dict[str, str] | None) -> None:
    name = next(iter(objectives or {"loss": ""}))
    with shadho_celery.Study(SPACE, seed=0, objectives=objectives) as study:
        trial = study.ask()
        study.report(trial, 1, {name: 0.5})
        with pytest.raises(UsageError, match="is a dict with 'other'; report a number"):
            study.report(trial, 2, {"other": 0.5})
        assert [(each.loss, each.losses) for each in study.tell(trial, 1.0).reports] == [(0.5, None)]


@pytest.mark.parametrize("pruner", ["patience", "threshold:3"])
def test_a_pruner_that_judges_one_loss_is_refused_for_several(pruner: str) -> None:
    with pytest.raises(UsageError, match=r"judges one loss, .* choose asha, median or percentile"):
        shadho_celery.Study(SPACE, pruner=pruner, objectives=TWO)


@pytest.mark.parametrize("how", ["asha", "auto", "hyperband", "halving"])
def test_with_several_losses_feasible_trials_are_promoted_and_the_front_has_the_highest_budget(how: str) -> None:
    """Quality grows with the budget, so trials at lower budgets would be on no front, and those by cost on all."""

    def objective(params: dict[str, float], context: Context) -> dict[str, dict[str, float]]:
        quality = (params["x"] - params["waste"]) * (context.budget or 0.0)
        losses = {"quality": quality, "cost": params["x"] + params["waste"]}
        return {"losses": losses, "constraints": {"waste": params["waste"] - 0.8}}

    space = {"x": hp.uniform("x", 0, 1), "waste": hp.uniform("waste", 0, 1)}
    options: dict[str, Any] = {"seed": 0, "sampler": "random", "progress": False, "objectives": TWO}
    found = shadho_celery.minimize(objective, space, trials=39, fidelity={**BUDGETS, "how": how}, **options)
    promoted = {trial.origin for trial in found.trials if trial.origin is not None}
    first = [trial for trial in found.trials if trial.budget == 1.0]
    assert len(promoted) >= 3
    assert all(trial.is_feasible for trial in first if trial.number in promoted)
    assert {trial.budget for trial in found.front} == {9.0}
    assert found.best is not None
    assert found.best.number == found.front[0].number


BUDGETS: dict[str, Any] = {"least": 1, "most": 9, "eta": 3, "how": "asha"}


def by_budget(params: dict[str, float], context: Context) -> float:
    return params["x"] ** 2 + 0.01 * (context.budget or 1000.0)


def test_a_study_with_budgets_is_resumed_with_them(tmp_path: Path) -> None:
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path / 'a.db'}", "study": "s"}
    shadho_celery.minimize(by_budget, SPACE, trials=10, seed=1, fidelity=BUDGETS, **where)
    again = shadho_celery.minimize(by_budget, SPACE, trials=20, resume=True, **where)
    assert {trial.budget for trial in again.trials} == {1.0, 3.0, 9.0}
    with pytest.warns(UserWarning, match="budgets from now on: 1 to 3, eta 3, halving; until now: 1 to 9, eta 3, asha"):
        other = shadho_celery.minimize(
            by_budget, SPACE, trials=30, resume=True, fidelity={"least": 1, "most": 3, "how": "halving"}, **where
        )
    assert {trial.budget for trial in other.trials[20:]} <= {1.0, 3.0}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["auto", "asha", "hyperband"])
@pytest.mark.parametrize("seed", [1, 3])
def test_a_subspace_that_only_fails_gets_little_on_whichever_rung_its_trials_begin(how: str, seed: int) -> None:
    space = hp.choice("model", [{"good": hp.uniform("good", 0, 1)}, {"bad": hp.uniform("bad", 0, 1)}])

    def noisy_below_the_top(params: dict[str, float], context: Context) -> float:
        if "bad" in params:
            raise RuntimeError("bad")
        return params["good"] if context.budget == 9 else hash(params["good"]) % 1000 / 1000

    found = shadho_celery.minimize(
        noisy_below_the_top, space, trials=80, seed=seed, fidelity={**BUDGETS, "how": how}, max_failures=0
    )
    assert 5 <= sum("bad" in trial.params for trial in found.trials) < 30


@pytest.mark.slow
def test_in_a_loop_of_ones_own_very_many_reports_are_thinned_and_the_warning_says_so() -> None:
    with shadho_celery.Study(SPACE, seed=0, pruner="median") as study:
        for reports in (10, 5000):
            trial = study.ask()
            assert trial is not None
            for step in range(reports):
                assert not study.report(trial, step, 0.5)
            told = study.tell(trial, 0.5)
            assert (told.warning is None) == (reports == 10)
            assert len(told.reports) <= 3000
    assert "of 5000 reports" in str(told.warning)


def test_a_target_is_met_by_a_loss_at_the_full_budget_alone() -> None:
    found = shadho_celery.minimize(by_budget, SPACE, trials=200, target=0.12, seed=0, fidelity=BUDGETS)
    assert found.best is not None
    assert found.best.budget == 9.0
    assert found.best.loss is not None
    assert found.best.loss <= 0.12
    assert len(found.trials) < 200


def test_a_finite_search_ends_once_what_is_good_has_been_promoted() -> None:
    space = {"k": hp.choice("k", [*range(9)])}
    with pytest.warns(UserWarning, match="no further params"):
        found = shadho_celery.minimize(
            lambda params, context: float(params["k"]), space, trials=100, seed=0, sampler="grid", fidelity=BUDGETS
        )
    assert {trial.budget for trial in found.trials} == {1.0, 3.0, 9.0}


@cases(
    "given, said",
    [
        ({"fidelity": {**BUDGETS, "backups": 2}}, "fidelity.backups"),
        ({"fidelity": BUDGETS, "pruner": "asha"}, "leave out one of the two, or choose pruner none"),
        ({"fidelity": {**BUDGETS, "how": "dehb"}, "objectives": TWO}, "how: dehb learns one loss"),
        ({"fidelity": {**BUDGETS, "how": "bohb"}}, "hyperband"),
        ({"fidelity": {**BUDGETS, "how": "dehb"}, "sampler": "tpe"}, "how: dehb proposes the trials itself"),
        ({"fidelity": {**BUDGETS, "eta": 1}}, "fidelity.eta: 1 is not allowed"),
        ({"fidelity": {"least": 9, "most": 1}}, "'most' is 1 and 'least' is 9"),
        ({"fidelity": {"min": 1, "max": 9}}, "fidelity.min: there is no such key; here it is least"),
        ({"fidelity": {"most": 1e6, "how": "hyperband"}}, "trials a round"),
        ({"fidelity": {"least": 1e-308, "most": 1e308, "how": "asha"}}, "over 40 rungs; raise 'least' or 'eta'"),
        ({"fidelity": {"most": 1e308, "eta": 2, "how": "asha"}}, "over 40 rungs; raise 'least' or 'eta'"),
        ({"fidelity": {"most": 9}, "pruner": "asha"}, "how: auto promotes trials and pruner asha stops them"),
        ({"fidelity": 3}, "a number; budgets of trials, a dict such as {'least': 1"),
        ({"fidelity": BUDGETS, "enqueue": [{"x": 0.5}]}, "cannot be enqueued"),
        ({"fidelity": {**BUDGETS, "how": "dehb"}, "warm_start": [({"x": 0.5}, 0.25)]}, "leave out the warm start"),
        ({"fidelity": {**BUDGETS, "how": "HyperBand"}}, "fidelity: how: write hyperband for 'HyperBand'"),
        ({"fidelity": {**BUDGETS, "how": "AsyncHyperBandScheduler"}}, "fidelity: how: write asha for "),
        ({"fidelity": {**BUDGETS, "how": "median"}}, "fidelity: how: 'median' stops trials by their reports"),
        ({"fidelity": {**BUDGETS, "how": "random"}}, "fidelity: how: there is no 'random'"),
        ({"pruner": "SuccessiveHalvingPruner"}, "pruner: write asha for 'SuccessiveHalvingPruner'"),
        ({"pruner": "ASHAScheduler"}, "pruner: write asha for 'ASHAScheduler'"),
        ({"pruner": "MedianStoppingRule"}, "pruner: write median for 'MedianStoppingRule'"),
        ({"pruner": "NopPruner"}, "pruner: write none for 'NopPruner'"),
        (
            {"pruner": {"how": "asha", "grace_period": 1, "reduction_factor": 3}},
            "pruner asha.grace_period: there is no such key; here it is least; known are how, eta, least",
        ),
        ({"pruner": {"how": "none", "eta": 3}}, "none takes no settings"),
    ],
)
def test_budgets_that_cannot_be_are_refused_in_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        shadho_celery.minimize(by_budget, SPACE, trials=3, **given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@cases("how", ["halving", "hyperband", "asha", "auto"])
@cases("points", [3, 8, 30])
def test_the_best_of_a_finite_search_come_to_the_top_though_they_fill_no_rung(how: str, points: int) -> None:
    """When the grid has no more points, rungs go on with the trials that they have, and with a share of them."""
    with pytest.warns(UserWarning, match="the sampler has no further params"):
        study = shadho_celery.minimize(
            lambda params, context: params["point"] + 1 / context.budget,
            {"point": hp.choice("point", [*range(points)])},
            trials=200,
            sampler="grid",
            fidelity={"most": 9, "how": how},
            progress=False,
        )
    on = Counter(trial.budget for trial in study.trials)
    assert on[9] >= 1
    if how == "halving":
        # Of 30 points 27 fill three brackets, and three are a short one, of which one is promoted.
        full, short = divmod(points, 9)
        assert on[3] == 3 * full + math.ceil(short / 3)
    best = study.best
    assert best is not None
    assert (best.budget, best.values["point"]) == (9, 0)


@pytest.mark.parametrize("pruner", ["asha", "median:2", "patience:2"])
def test_of_a_loss_to_maximise_the_reports_are_maximised_too(pruner: str) -> None:
    """The number that is reported is the one that is returned: the best ones go on."""

    def accuracy(params: dict[str, float], context: Context) -> float:
        reached = 0.0
        for step in range(1, STEPS + 1):
            reached = (1 - params["x"] ** 2) * step / STEPS
            context.report(step, reached)
            if context.should_stop():
                break
        return reached

    study = shadho_celery.minimize(
        accuracy, SPACE, trials=30, seed=0, sampler="random", pruner=pruner, objectives={"acc": "maximize"}
    )
    best = min(study.trials, key=lambda trial: abs(trial.params["x"]))
    assert study.best is not None
    assert study.best.number == best.number
    stopped = [trial for trial in study.trials if trial.state == "PRUNED"]
    assert all(trial.loss is not None and trial.loss <= 0 for trial in stopped)
    assert bool(stopped) == (pruner != "patience:2")


def test_a_loop_of_ones_own_reports_what_is_to_be_maximised() -> None:
    study = shadho_celery.Study(SPACE, pruner="threshold:0.5", objectives={"acc": "maximize"}, seed=0)
    trial = study.ask()
    assert not study.report(trial, 1, 0.7)
    assert study.report(trial, 2, 0.3)
    study.close()


@pytest.mark.parametrize("pruner", ["threshold:0.3", {"how": "threshold", "lower": 0.3}])
def test_of_a_loss_to_maximise_the_bounds_are_those_of_the_number_that_is_reported(pruner: Any) -> None:
    def accuracy(params: dict[str, float], context: Context) -> dict[str, float]:
        context.report(1, abs(params["x"]))
        context.should_stop()
        context.report(2, abs(params["x"]))
        return {"losses": {"acc": abs(params["x"])}}

    objectives = {"acc": "maximize"}
    options: dict[str, Any] = {"trials": 30, "seed": 0, "sampler": "random", "pruner": pruner, "objectives": objectives}
    found = shadho_celery.minimize(accuracy, SPACE, **options)
    stopped = {trial.number for trial in found.trials if trial.state == "PRUNED"}
    assert stopped == {trial.number for trial in found.trials if abs(trial.params["x"]) < 0.3}
    assert 0 < len(stopped) < 30
    for trial in found.trials:
        # Whether a trial was stopped or not: its loss by name, and its reports, are the objective's own number.
        assert trial.losses == {"acc": abs(trial.params["x"])}
        assert {report.loss for report in trial.reports} == {abs(trial.params["x"])}


def test_what_a_pruned_trial_has_returned_is_kept_beside_the_loss_of_its_last_report() -> None:
    def told(params: dict[str, float], context: Context) -> dict[str, float]:
        for step in range(1, STEPS + 1):
            context.report(step, params["x"] ** 2 + 1 / step)
            if context.should_stop():
                break
        return {"loss": 0.0, "steps": step}

    found = shadho_celery.minimize(told, SPACE, trials=30, seed=0, sampler="random", pruner="asha")
    pruned = [trial for trial in found.trials if trial.state == "PRUNED"]
    assert len(pruned) > 5
    assert all(trial.metrics == {"steps": trial.step} for trial in pruned)
    assert all(trial.loss == trial.reports[-1].loss != 0.0 for trial in pruned)
    assert all(trial.error is None for trial in pruned)


@pytest.mark.parametrize("step", [lambda count: 1, lambda count: 10 - count], ids=["the same", "falling"])
def test_reports_that_do_not_count_up_are_named(step: Any) -> None:
    def confused(params: dict[str, float], context: Context) -> float:
        for count in range(1, STEPS + 1):
            context.report(step(count), params["x"] ** 2 + 1 / count)
        return params["x"] ** 2

    with pytest.warns(UserWarning, match=r"such as those of trial 0: call context.report\(step, loss\), and count up"):
        found = shadho_celery.minimize(confused, SPACE, trials=3, seed=0, pruner="asha")
    for trial in found.trials:
        # Of several reports of one step the first one counts.
        assert trial.reports[-1].loss == trial.params["x"] ** 2 + 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hyperband", "dehb"])
def test_a_resumed_ladder_promotes_none_to_a_budget_that_it_has_had(how: str, tmp_path: Path) -> None:
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path / 'a.db'}", "study": "s"}
    before = {"least": 1, "most": 27, "eta": 3, "how": "hyperband"}
    shadho_celery.minimize(by_budget, SPACE, trials=37, seed=1, fidelity=before, **where)
    after = {"least": 1, "most": 16, "eta": 2, "how": how}
    with pytest.warns(UserWarning, match="budgets from now on"):
        found = shadho_celery.minimize(by_budget, SPACE, trials=80, resume=True, fidelity=after, **where)
    assert len(found.trials) == 80
    highest: dict[int, float] = {}
    for trial in found.trials:
        origin = trial.number if trial.origin is None else trial.origin
        assert trial.budget is not None
        assert trial.budget > highest.get(origin, 0.0)
        highest[origin] = trial.budget


def test_a_target_is_met_by_a_best_loss_above_the_full_budget_of_now(tmp_path: Path) -> None:
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path / 'a.db'}", "study": "s"}
    before = {"least": 1, "most": 27, "eta": 3, "how": "hyperband"}
    shadho_celery.minimize(by_budget, SPACE, trials=45, seed=1, sampler="random", fidelity=before, **where)
    after = {"least": 1, "most": 9, "eta": 3, "how": "hyperband"}
    with pytest.warns(UserWarning, match="budgets from now on"):
        found = shadho_celery.minimize(by_budget, SPACE, trials=100, target=1e3, resume=True, fidelity=after, **where)
    assert found.best is not None
    assert found.best.budget == 27.0
    assert len(found.trials) == 45


def test_samplers_of_optuna_learn_the_losses_of_each_budget_by_themselves() -> None:
    """Here a low budget's losses are all lower than those of a high one, and best at the other end."""

    def misleading(params: dict[str, float], context: Context) -> float:
        return (params["x"] - 0.9) ** 2 if context.budget == 9 else (params["x"] + 0.9) ** 2 - 100

    fidelity = {**BUDGETS, "how": "hyperband"}
    found = shadho_celery.minimize(
        misleading, SPACE, trials=120, seed=0, fidelity=fidelity, sampler="optuna:TPESampler"
    )
    late = [trial.params["x"] for trial in found.trials if trial.origin is None and trial.number >= 80]
    assert sum(x > 0 for x in late) > 0.6 * len(late)


def test_a_finite_search_that_has_ended_says_so_when_it_is_asked_again() -> None:
    with shadho_celery.Study({"k": hp.quniform("k", 0, 2, 1)}, sampler="grid", seed=0) as study:
        for _ in range(3):
            study.tell(study.ask(), 1.0)
        with pytest.raises(UsageError, match="the search has ended: all of its points have been tried"):
            study.ask()
