"""A study without a space, whose objective asks a trial for values, as in Optuna."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

import shadho_celery.optuna
from shadho_celery import Study, hp, load_study, minimize
from shadho_celery.core.trial import Outcome, TrialState
from shadho_celery.errors import SpaceChanged, SpaceError, StoreOutage, UsageError
from shadho_celery.objective.suggest import Trial, TrialPruned
from shadho_celery.program.optuna_study import optuna_study
from shadho_celery.scheduler import known_points
from shadho_celery.space.schema import choice
from shadho_celery.space.stored import read_schema
from shadho_celery.store.sql import SqlStore

MODELS = ["svm", "forest", "nearest"]


def structured(trial: Trial) -> float:
    model = trial.suggest_categorical("model", MODELS)
    found: dict[str, Any] = {"model": model}
    if model == "svm":
        found["cost"] = trial.suggest_float("cost", 1e-3, 1e3, log=True)
        found["kernel"] = trial.suggest_categorical("kernel", ["rbf", "poly"])
        if found["kernel"] == "poly":
            found["degree"] = trial.suggest_int("degree", 2, 5)
    elif model == "forest":
        found["depth"] = trial.suggest_int("depth", 2, 32)
        found["trees"] = trial.suggest_float("trees", 10, 1000, log=True)
    return loss_of(found)


SPACE = hp.choice(
    "model",
    [
        {
            "model": "svm",
            "cost": hp.loguniform("cost", math.log(1e-3), math.log(1e3)),
            "kernel": hp.choice("kernel", ["rbf", {"degree": hp.randint("degree", 2, 6)}]),
        },
        {
            "model": "forest",
            "depth": hp.randint("depth", 2, 33),
            "trees": hp.loguniform("trees", math.log(10), math.log(1000)),
        },
        {"model": "nearest"},
    ],
)


def loss_of(values: dict[str, Any]) -> float:
    match values["model"]:
        case "svm":
            kernel = values["kernel"]
            degree = values.get("degree", kernel["degree"] if isinstance(kernel, dict) else None)
            return (math.log10(values["cost"]) - 1) ** 2 / 4 + (0.1 if degree is None else 0.4 + abs(degree - 3) / 10)
        case "forest":
            return abs(values["depth"] - 9) / 10 + abs(math.log2(values["trees"]) - 7) / 8
    return 0.8


@pytest.mark.slow
def test_a_structured_space_that_is_asked_for_is_searched_like_the_same_space_in_hp() -> None:
    asked, declared = [], []
    for seed in range(3):
        asked.append(study := minimize(structured, trials=60, seed=seed))
        declared.append(minimize(loss_of, SPACE, trials=60, seed=seed))
        names = {trial.subspace for trial in study.trials}
        assert names == {"model=svm,kernel=rbf", "model=svm,kernel=poly", "model=forest", "model=nearest"}
        for trial in study.trials:
            own = {"model", *dict(part.split("=") for part in trial.subspace.split(","))}
            more = {"svm": {"cost"}, "forest": {"depth", "trees"}}.get(trial.values["model"], set())
            more = more | ({"degree"} if trial.values.get("kernel") == "poly" else set())
            assert trial.params.keys() == trial.values.keys() == own | more
            assert all(trial.values["model"] == MODELS[trial.params["model"]] for trial in study.trials)
    mixes = [Counter(trial.subspace for study in each for trial in study.trials) for each in (asked, declared)]
    names_here = {"model=svm,kernel={'degree': degree}": "model=svm,kernel=poly"}
    for name, trials in mixes[1].items():
        assert trials / 3 <= mixes[0][names_here.get(name, name)] <= 3 * trials
    assert median(study.best_loss for study in asked) <= median(study.best_loss for study in declared) + 0.1
    assert {type(study.best.values["depth"]) for study in asked if "depth" in study.best.values} <= {int}


def looping(trial: Trial) -> float:
    layers = trial.suggest_int("layers", 1, 3)
    units = [trial.suggest_int(f"units{place}", 4, 512, log=True) for place in range(layers)]
    rate = trial.suggest_float("rate", 0, 1)
    extra = trial.suggest_float("extra", 0, 1) if rate > 0.7 else 0.0
    return layers + sum(abs(math.log2(each) - 5) for each in units) + rate + extra


@pytest.mark.parametrize("sampler", ["auto", "tpe", "gp", "random", "qmc", "cma", "grid"])
def test_every_sampler_searches_the_labels_of_a_loop_and_those_behind_a_condition(sampler: str) -> None:
    study = minimize(looping, trials=40, seed=0, sampler=sampler)
    for trial in study.trials:
        loop = {f"units{place}" for place in range(trial.params["layers"])}
        assert trial.params.keys() == {"layers", "rate", *loop, *(["extra"] if trial.params["rate"] > 0.7 else [])}
    assert {trial.subspace for trial in study.trials} == {"all"}
    assert len({trial.params["rate"] for trial in study.trials}) > 5


def test_equal_seeds_give_equal_studies() -> None:
    one, two = (minimize(looping, trials=25, seed=4) for _ in range(2))
    assert [trial.params for trial in one.trials] == [trial.params for trial in two.trials]


def test_a_study_is_resumed_with_its_labels_and_may_ask_for_more(tmp_path: Path) -> None:
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/s.db", "study": "one"}

    def wider(trial: Trial) -> float:
        return structured(trial) + trial.suggest_float("new", -1, 1) ** 2

    minimize(structured, trials=20, seed=0, **where)
    with pytest.warns(UserWarning, match="this study has trials of other code"):
        study = minimize(wider, trials=40, resume=True, **where)
    assert [("new" in trial.params) for trial in study.trials] == [False] * 20 + [True] * 20
    assert load_study(where["store"], "one").best_params == study.best_params
    assert load_study(where["store"], "one").trials[3].values == study.trials[3].values
    with pytest.raises(SpaceChanged, match="without a space, not with a declared space"):
        minimize(loss_of, SPACE, trials=50, resume=True, **where)
    minimize(loss_of, SPACE, trials=2, store=where["store"], study="two")
    with pytest.raises(SpaceChanged, match="with a declared space, not with an objective that asks"):
        minimize(structured, trials=50, resume=True, store=where["store"], study="two")


def test_a_trial_may_have_its_own_bounds() -> None:
    def bounded(trial: Trial) -> float:
        low = trial.suggest_int("low", 0, 10)
        return trial.suggest_float("high", low, low + 1) + trial.suggest_int("whole", low, 20)

    study = minimize(bounded, trials=30, seed=0)
    assert all(trial.values["low"] <= trial.values["high"] <= trial.values["low"] + 1 for trial in study.trials)
    assert all(trial.values["low"] <= trial.values["whole"] <= 20 for trial in study.trials)


def test_the_same_label_has_the_same_value_within_a_trial_and_a_warning_outside_of_later_bounds() -> None:
    def twice(trial: Trial) -> float:
        assert trial.suggest_float("x", 0, 1) == trial.suggest_float("x", 0, 1)
        return trial.suggest_float("x", 0, 0.5)

    study = minimize(twice, trials=5, seed=0)
    assert study.counts == {"COMPLETE": 5}
    for trial in study.trials:
        said = f"'x' keeps its first value {trial.values['x']}, which is outside of its later bounds"
        assert trial.warning == (said if trial.values["x"] > 0.5 else None)
    assert any(trial.warning for trial in study.trials)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda trial: trial.suggest_int("x", 0, 1), "'x' is suggested as int, and was float"),
        (lambda trial: trial.suggest_float("x", 1, 2, log=True), "'x' is suggested as float with log, and was float"),
        (lambda trial: trial.suggest_categorical("option", ["b", "a"]), "'option' is suggested as categorical of"),
        (lambda trial: trial.suggest_categorical("model", [dict]), "'model' has the option"),
        (lambda trial: trial.suggest_float("x", 2, 1), "'x': from 2 to 1 is no range"),
        (lambda trial: trial.suggest_float("far", 1.7e308, 1.7e308, step=1e308), "'far': from 1.7e+308 to 1.7e+308 is"),
        (lambda trial: trial.suggest_float(3, 0, 1), "the name of a label is 3"),
        (lambda trial: trial.suggest_float("\ud800", 0, 1), "give another text"),
        (lambda trial: trial["x"], "the study has no space"),
    ],
)
def test_what_contradicts_other_trials_fails_the_trial_by_its_label(
    second: Callable[[Trial], object], said: str
) -> None:
    def odd(trial: Trial) -> float:
        if trial.number == 1:
            second(trial)
            return 0.0
        trial.suggest_categorical("option", ["a", "b"])
        trial.suggest_float("far", -9e306, 9e306, step=4e306)
        return trial.suggest_float("x", 0, 1)

    study = minimize(odd, trials=4, seed=0)
    assert study.counts == {"COMPLETE": 3, "FAILED": 1}
    assert said in str(study.trials[1].error)


def test_trials_that_run_at_the_same_time_cannot_contradict_each_other() -> None:
    with Study() as study:
        one, two = study.ask(), study.ask()
        one.suggest_float("x", 0, 1)
        two.suggest_int("x", 0, 1)
        assert study.tell(one, 1.0).state == "COMPLETE"
        told = study.tell(two, 1.0)
        assert (told.state, told.error) == ("FAILED", "'x' is suggested as int, and was float; give it another name")


def test_a_trial_is_pruned_by_the_study_or_by_its_own_decision() -> None:
    def reporting(trial: Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        for step in range(5):
            trial.report(x + 1 / (step + 1), step)
            if trial.should_prune():
                raise TrialPruned
        if trial.number == 7:
            raise TrialPruned("of its own")
        return x

    study = minimize(reporting, trials=30, seed=0, pruner="median")
    pruned = [trial for trial in study.trials if trial.state == "PRUNED"]
    assert 2 < len(pruned) < 20
    assert study.trials[7] in pruned
    assert all(trial.loss == trial.reports[-1].loss and trial.params.keys() == {"x"} for trial in pruned)


def test_a_trial_that_asks_after_a_report_and_in_another_order_is_searched(tmp_path: Path) -> None:
    def turning(trial: Trial) -> float:
        names = ["a", "b", "c"]
        random.Random(trial.number).shuffle(names)
        total = 0.0
        for step, name in enumerate(names):
            total += trial.suggest_float(name, 0, 1)
            trial.report(total, step)
            if trial.should_prune():
                raise TrialPruned
        return total

    study = minimize(turning, trials=40, seed=0, pruner="median")
    complete = [trial for trial in study.trials if trial.state == "COMPLETE"]
    assert all(trial.params.keys() == {"a", "b", "c"} for trial in complete)
    assert {len(trial.params) for trial in study.trials if trial.state == "PRUNED"} <= {1, 2, 3}
    assert study.best_loss < 1


def test_the_earlier_names_of_optuna_suggest_floats() -> None:
    def objective(trial: Trial) -> float:
        found = trial.suggest_uniform("x", 0, 1) + trial.suggest_loguniform("y", 1, 9)
        assert trial.suggest_discrete_uniform("z", 0, 1, 0.25) in {0, 0.25, 0.5, 0.75, 1}
        assert [law.log for law in trial.distributions.values()] == [False, True, False]
        return found

    assert minimize(objective, trials=2).counts == {"COMPLETE": 2}


def test_a_single_loss_may_be_in_a_sequence() -> None:
    assert minimize(lambda trial: [trial.suggest_int("x", 3, 3)], trials=1).best_loss == 3
    direction = minimize(lambda trial: (trial.suggest_int("x", 3, 3),), trials=1, direction="maximize")
    assert direction.best_loss == 3
    two = minimize(lambda trial: [1.0, 2.0][: trial.number + 1], trials=2)
    assert "is a list" in str(two.trials[1].error)


def test_facts_become_metrics_and_several_losses_may_be_a_sequence() -> None:
    def fact(trial: Trial) -> tuple[float, float]:
        x = trial.suggest_float("x", 0, 1)
        trial.set_user_attr("seed", trial.context.seed)
        trial.set_user_attr("loss", "odd")
        trial.set_user_attr("lock", threading.Lock())
        return x, 1 - x

    study = minimize(fact, trials=10, objectives={"one": "minimize", "two": "maximize"})
    trial = study.trials[4]
    assert trial.losses == {"one": trial.params["x"], "two": 1 - trial.params["x"]}
    assert trial.metrics == {"seed": trial.seed, "loss": "odd"}
    assert "lock" in str(trial.warning)


@pytest.mark.parametrize("sampler", ["auto", "tpe"])
def test_an_option_that_fails_is_avoided_as_in_a_declared_space(sampler: str) -> None:
    def fails(values: dict[str, Any]) -> float:
        if values["model"] == "forest":
            raise RuntimeError("no forest")
        return float(values["a"] + values["b"])

    def asked(trial: Trial) -> float:
        if trial.suggest_categorical("model", MODELS) == "forest":
            raise RuntimeError("no forest")
        return float(trial.suggest_int("a", 0, 3) + trial.suggest_int("b", 0, 3))

    space = {"model": hp.choice("model", MODELS), "a": hp.randint("a", 4), "b": hp.randint("b", 4)}
    with pytest.warns(UserWarning, match=r"all \d+ points of the space have been tried"):
        study = minimize(asked, trials=60, seed=0, sampler=sampler)
    with pytest.warns(UserWarning, match="all 48 points of the space have been tried"):
        declared = minimize(fails, space, trials=60, seed=0, sampler=sampler)
    assert study.counts["FAILED"] <= declared.counts["FAILED"] + 3 <= 20
    failed = [trial for trial in study.trials if trial.state == "FAILED"]
    assert all(trial.values.keys() == {"model", "a", "b"} for trial in failed[2:]), "what was proposed is recorded"


def test_failed_trials_are_repeated_once_however_many_labels_they_had() -> None:
    def fails(trial: Trial) -> float:
        loss = trial.suggest_float("x", 0, 1)
        if trial.number in {0, 20, 22, 23}:
            raise RuntimeError("broken")
        return loss + trial.suggest_int("layers", 1, 2) + (trial.suggest_float("more", 0, 1) if loss > 0.5 else 0)

    def failed(study: Study) -> list[int]:
        return [each.number for each in known_points.failed((each.record for each in study.trials), schema)]

    with Study(seed=0) as study:
        study.run(fails, trials=22)
        schema = read_schema(study.tree)
        assert failed(study) == [0, 20]
        for ended, left in ((24, [22, 23]), (26, [])):
            study.enqueue([study.trials[number].values for number in (0, 20)])
            assert failed(study) == []
            study.run(fails, trials=ended)
            assert failed(study) == left
        assert study.trials[-1].values["x"] == study.trials[20].values["x"]


def test_failed_trials_that_have_asked_for_nothing_are_all_repeated() -> None:
    def fails(trial: Trial) -> float:
        raise RuntimeError("broken")

    with Study(seed=0) as study:
        with pytest.warns(UserWarning, match="3 x RuntimeError"):
            study.run(fails, trials=3)
        records = [trial.record for trial in study.trials]
        assert [each.number for each in known_points.failed(records, read_schema(study.tree))] == [0, 1, 2]


def test_a_failed_trial_keeps_its_facts() -> None:
    def fails(trial: Trial) -> float:
        trial.set_user_attr("name", f"trial {trial.number}")
        trial.suggest_float("x", 0, 1)
        raise ValueError(f"up to {trial.distributions['x'].high}")

    with pytest.warns(UserWarning, match=r"up to 1\.0"):
        assert minimize(fails, trials=1).trials[0].metrics == {"name": "trial 0"}


def test_points_are_given_to_the_next_trials_before_their_labels_are_known() -> None:
    study = minimize(structured, trials=6, seed=0, enqueue=[{"model": "svm", "cost": 10.0, "kernel": "rbf"}, {}])
    assert study.trials[0].values == {"model": "svm", "cost": 10.0, "kernel": "rbf"}
    wrong = minimize(structured, trials=2, seed=0, enqueue=[{"model": "other"}]).trials[0]
    assert (wrong.state, wrong.values["model"] in MODELS) == ("COMPLETE", True)
    assert wrong.warning == "'model' is enqueued as 'other', which its law does not have: it is drawn"
    with pytest.raises(UsageError, match="point 0: 3 is not a dict of labels and plain values"):
        minimize(structured, trials=1, enqueue=[3])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="is not a dict of labels and plain values"):
        minimize(structured, trials=1, enqueue=[{"model": object()}])


def test_an_enqueued_point_is_kept_in_the_store_and_its_trial_has_its_own_subspace(tmp_path: Path) -> None:
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/s.db", "study": "one"}
    with Study(seed=0, enqueue=[{"model": "nearest"}], **where) as study:
        study.run(structured, trials=10)
        study.enqueue([{"model": model, "cost": np.float64(2), "depth": 5} for model in MODELS])
        assert study.trials[11].values["model"] == "forest"
    study = minimize(structured, trials=13, resume=True, **where)
    added = study.trials[10:13]
    assert [trial.values["model"] for trial in added] == MODELS
    assert [trial.subspace.partition(",")[0] for trial in added] == [f"model={model}" for model in MODELS]
    assert (added[0].values["cost"], added[1].values["depth"]) == (2.0, 5)


def test_an_added_trial_has_the_labels_that_it_was_added_with() -> None:
    with Study(seed=0) as study:
        study.run(lambda trial: trial.suggest_float("x", 0, 1) + trial.suggest_int("y", 0, 9), trials=3)
        study.add([{"x": 0.5}, {}], [Outcome(state=TrialState.FAILED), Outcome(state=TrialState.PRUNED)])
        assert [trial.params for trial in study.trials[3:]] == [{"x": 0.5}, {}]
        laws = {"x": choice("x", [1, 2])}
        with pytest.raises(SpaceError, match="'x' is suggested as categorical of"):
            study.add([{"y": 1}, {"x": 1}], [1.0, 1.0], laws=laws)
        assert study.count() == 5


def test_an_enqueued_point_is_recorded_with_its_own_values_if_its_trial_never_asks() -> None:
    with Study(seed=0) as study:
        study.run(structured, trials=30)
        study.enqueue([{"model": "forest", "depth": 7, "cost": 2.0, "trees": -1, "new": 5}])
        waiting = study.trials[30]
        assert (waiting.subspace, waiting.params.keys()) == ("model=forest", {"model", "depth", "trees"})
        assert (waiting.params["model"], waiting.params["depth"]) == (1, 7)
        assert {"depth": 7, "cost": 2.0, "new": 5}.items() <= waiting.values.items()
        assert not [name for name in study.dataframe().columns if "point" in name]


def test_a_study_with_an_enqueued_point_can_be_copied_for_optuna(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/s.db", "study": "one"}
    with Study(seed=0, enqueue=[{"model": "nearest"}], **where):
        pass
    assert optuna_study(where["store"], "one").trials == []


@pytest.mark.parametrize("source", ["ours", "a module", "Optuna's", "a declared space's", "a list"])
def test_a_study_without_a_space_learns_from_studies_that_know_how_labels_are_drawn(
    source: str, tmp_path: Path
) -> None:
    earlier: Any = [({"model": 1}, 1.0)]
    if source == "a declared space's":
        earlier = minimize(loss_of, SPACE, trials=5, seed=0)
    elif source == "ours":
        minimize(structured, trials=30, seed=0, store=f"sqlite:///{tmp_path}/s.db", study="early")
        earlier = f"sqlite:///{tmp_path}/s.db#early"
    elif source != "a list":
        optuna = pytest.importorskip("optuna") if source == "Optuna's" else shadho_celery.optuna
        earlier = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        earlier.optimize(structured, n_trials=30)
    if source in {"a list", "a declared space's"}:
        with pytest.raises(UsageError, match="without a space, a study learns only from a study of Optuna or from"):
            minimize(structured, trials=5, warm_start=earlier)
        return

    def wider(trial: Trial) -> float:
        return structured(trial) + (trial.suggest_categorical("new", [0, 1]) if trial.number > 2 else 0)

    with Study(seed=0, sampler="tpe", warm_start=earlier, store=f"sqlite:///{tmp_path}/late.db", study="late") as study:
        study.run(wider, trials=1)
        assert study.taught == 30
        assert study.trials[0].subspace.startswith("model="), "the labels are known before the first trial"
        study.run(wider, trials=8)
    study = minimize(wider, trials=12, resume=True, store=f"sqlite:///{tmp_path}/late.db", study="late")
    assert study.best_loss < 1


def test_results_from_elsewhere_are_added_by_value() -> None:
    def number(trial: Trial) -> float:
        return float(trial.suggest_categorical("number", [5, 2, 1, 0])) + trial.suggest_float("x", 0, 1)

    with Study() as study:
        study.run(number, trials=3)
        study.add([{"number": 2, "x": 0.5}, {"number": 0}], [2.5, {"loss": 0.0, "fact": 1}])
        assert [trial.values for trial in study.trials[3:]] == [{"number": 2, "x": 0.5}, {"number": 0}]
        assert [trial.params.get("number") for trial in study.trials[3:]] == [1, 3]
        assert study.best.metrics == {"fact": 1}
        study.run(number, trials=10)
        with pytest.raises(SpaceError, match="there is no label 'y'; known are"):
            study.add([{"number": 2}, {"y": 1}], [1.0, 1.0])
        with pytest.raises(SpaceError, match="'number' is 3, which its law does not have"):
            study.add([{"number": 3}], [1.0])
        assert study.count() == 10


def test_a_study_asks_and_tells_trials_that_ask_for_values(tmp_path: Path) -> None:
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/s.db", "study": "one"}
    with Study(seed=0, pruner="median", **where) as study:
        for _ in range(20):
            trial = study.ask()
            study.tell(trial, structured(trial))
        trial = study.ask()
        trial.set_user_attr("name", "a")
        told = study.tell(trial, error="no reason")
        assert (told.state, told.params, told.metrics) == ("FAILED", trial.proposed, {"name": "a"})
        open_ones = [study.ask() for _ in range(3)]
        model = open_ones[0].proposed["model"]
        assert open_ones[0].suggest_categorical("model", MODELS) == MODELS[int(model)], "what was proposed is given"
        loss = structured(open_ones[2])
        open_ones[2].suggest_float("new", 0, 1)
        study.tell(open_ones[2], loss)
        assert [study.tell(trial, structured(trial)).state for trial in open_ones[:2]] == ["COMPLETE"] * 2
        with pytest.raises(UsageError, match="has its result already"):
            study.tell(open_ones[2], 1.0)
    assert load_study(where["store"], "one").count() == 24


def test_on_trial_may_stop_a_study_whose_space_grows() -> None:
    numbers = count()

    def stop(study: Any, trial: Any) -> None:
        if next(numbers) == 4:
            study.stop()

    assert minimize(lambda trial: trial.suggest_float(f"x{trial.number}", 0, 1), trials=50, on_trial=stop).count() == 5


def test_names_without_end_are_refused() -> None:
    study = minimize(
        lambda trial: sum(trial.suggest_float(f"{trial.number}.{n}", 0, 1) for n in range(400)), trials=3, seed=0
    )
    assert study.counts == {"COMPLETE": 2, "FAILED": 1}
    assert "more than 1000 labels; give labels the same name in each trial" in str(study.trials[2].error)


def test_a_study_grows_after_an_outage_of_its_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/studies.db"
    reshape, reports = SqlStore.reshape, SqlStore.reports
    failures = iter([StoreOutage("the store is down")])
    is_away = False

    def failing(*args: Any, **named: Any) -> None:
        nonlocal is_away
        for error in failures:
            is_away = True
            raise error
        is_away = False
        reshape(*args, **named)

    def read(*args: Any) -> Any:
        assert not is_away, "a new scheduler reads them"
        return reports(*args)

    monkeypatch.setattr(SqlStore, "reshape", failing)
    monkeypatch.setattr(SqlStore, "reports", read)
    study = minimize(structured, trials=10, seed=0, pruner="median", store=store)
    assert study.counts == {"COMPLETE": 10}
    assert {trial.subspace for trial in study.trials} > {"model=nearest"}
    with Study(store=store) as other:
        failures = iter([StoreOutage("the store is down")])
        for _ in range(3):
            trial = other.ask()
            other.tell(trial, trial.suggest_float("x", 0, 1))
        assert other.counts == {"COMPLETE": 3}


def test_budgets_are_given_to_trials_that_ask_for_values() -> None:
    fidelity = {"how": "asha", "least": 1, "most": 9, "eta": 3}
    study = minimize(lambda trial: looping(trial) / (trial.context.budget or 1), trials=30, seed=0, fidelity=fidelity)
    promoted = [trial for trial in study.trials if trial.origin is not None]
    assert promoted
    assert all(trial.params == study.trials[trial.origin].params for trial in promoted if trial.origin is not None)
