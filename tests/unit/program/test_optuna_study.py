"""A study as Optuna has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services.cases import cases

import shadho_celery

STORE = "sqlite:///shadho.db"
SPACE = {
    "rate": hp.loguniform("rate", -9, 0),
    "width": hp.quniform("width", 16, 128, 16),
    "seeds": hp.randint("seeds", 3, 9),
    "shift": hp.normal("shift", 0, 1),
    "model": hp.choice("model", [{"kind": "tree"}, {"kind": "net", "dropout": hp.uniform("dropout", 0, 0.5)}]),
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def objective(values: dict[str, Any], context: Any) -> float:
    context.report(1, values["width"])
    if values["rate"] > 0.5:
        raise ArithmeticError("too fast")
    return float(np.log(values["rate"]) ** 2)


@pytest.mark.slow
def test_optuna_draws_the_study() -> None:
    """A machine whose packages are of an earlier time may lack plotly."""
    optuna, _ = pytest.importorskip("optuna"), pytest.importorskip("plotly")
    shadho_celery.minimize(objective, SPACE, trials=20, seed=0, store=STORE, study="s", sampler="random")
    made = shadho_celery.optuna_study(STORE, "s")
    for name in ("contour", "edf", "intermediate_values", "optimization_history", "parallel_coordinate", "slice"):
        assert getattr(optuna.visualization, f"plot_{name}")(made).data, name
    assert optuna.visualization.plot_timeline(made).data


@pytest.mark.slow
def test_optuna_has_the_trials_with_their_distributions_states_and_reports() -> None:
    optuna = pytest.importorskip("optuna")
    shadho_celery.minimize(objective, SPACE, trials=40, seed=0, store=STORE, study="s", sampler="random")
    study, made = shadho_celery.load_study(STORE, "s"), shadho_celery.optuna_study(STORE, "s")
    assert len(made.trials) == 40
    for ours, theirs in zip(study.trials, made.trials, strict=True):
        assert theirs.user_attrs["trial"] == ours.number
        assert theirs.state.name == {"COMPLETE": "COMPLETE", "FAILED": "FAIL"}[str(ours.state)]
        assert {*theirs.params} == {*ours.params}
        assert theirs.params["width"] == ours.params["width"]
        assert theirs.value == ours.loss or ours.state == "FAILED"
        assert theirs.intermediate_values == {1: ours.params["width"]}
    laws = made.trials[0].distributions
    assert laws["rate"].log
    assert (laws["width"].low, laws["width"].high, laws["width"].step) == (16, 128, 16)
    assert (laws["seeds"].low, laws["seeds"].high) == (3, 8)
    assert len(laws["model"].choices) == 2
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    found = optuna.importance.get_param_importances(made, evaluator=evaluator, params=["rate", "width", "shift"])
    assert max(found, key=found.__getitem__) == "rate"


def test_several_losses_have_their_names_and_directions() -> None:
    pytest.importorskip("optuna")
    objectives = {"accuracy": "maximize", "size": "minimize"}
    shadho_celery.minimize(
        lambda values: {"losses": {"accuracy": values["rate"], "size": values["width"]}},
        SPACE,
        trials=10,
        seed=0,
        store=STORE,
        study="s",
        objectives=objectives,
    )
    made = shadho_celery.optuna_study(STORE, "s")
    assert [way.name for way in made.directions] == ["MAXIMIZE", "MINIMIZE"]
    for trial in made.trials:
        assert trial.values == [trial.params["rate"], trial.params["width"]]


def test_of_a_long_study_the_latest_trials_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    shadho_celery.minimize(objective, SPACE, trials=10, seed=0, store=STORE, study="s", sampler="random")
    monkeypatch.setattr("shadho_celery.program.optuna_study.MOST", 4)
    with pytest.warns(UserWarning, match="the latest 4 of 10 trials"):
        made = shadho_celery.optuna_study(STORE, "s")
    assert [trial.user_attrs["trial"] for trial in made.trials] == [6, 7, 8, 9]


def test_without_a_readable_space_the_values_have_their_range() -> None:
    pytest.importorskip("optuna")
    import sqlite3
    from contextlib import closing

    shadho_celery.minimize(objective, SPACE, trials=10, seed=0, store=STORE, study="s", sampler="random")
    with closing(sqlite3.connect("shadho.db")) as database, database:
        database.execute("UPDATE studies SET tree = NULL")
    made = shadho_celery.optuna_study(STORE, "s")
    values = [trial.params["rate"] for trial in made.trials]
    assert (made.trials[0].distributions["rate"].low, made.trials[0].distributions["rate"].high) == (
        min(values),
        max(values),
    )


LAWS = {
    "grid that floats do not hold": hp.quniform("x", -7.3, 7.9, 1.1),
    "grid of too many steps": hp.quniform("x", 0, 1e9, 0.1),
    "grid far from 0": hp.quniform("x", 1e9, 1e9 + 1, 0.1),
    "grid beyond floats": hp.quniform("x", 0, 1e30, 3),
    "grid of one value": hp.quniform("x", 3, 3.2, 7),
    "qloguniform": hp.qloguniform("x", -3, 8, 0.3),
    "qnormal": hp.qnormal("x", 0.5, 3, 0.7),
    "qlognormal": hp.qlognormal("x", 0, 2, 0.1),
    "lognormal": hp.lognormal("x", 0, 3),
    "loguniform with 0": hp.loguniform("x", -800, -740),
    "wide loguniform": hp.loguniform("x", -740, 700),
    "randint": hp.randint("x", -3, 9),
    "randint beyond floats": hp.randint("x", 2**62),
    "uniformint": hp.uniformint("x", -5, 9),
    "pchoice": hp.pchoice("x", [(0.3, "a"), (0.7, "b")]),
    "options of one text": hp.choice("x", [1, "1", "'1'", {"y": hp.quniform("y", 0, 1, 0.3)}]),
}


@pytest.mark.slow
@cases("case", LAWS)
def test_every_value_lies_in_its_distribution(case: str) -> None:
    pytest.importorskip("optuna")
    Path("shadho.db").unlink(missing_ok=True)
    shadho_celery.minimize(
        lambda _: 0.0, {"v": LAWS[case]}, trials=30, seed=0, store=STORE, study="s", sampler="random"
    )
    made = shadho_celery.optuna_study(STORE, "s")
    assert len(made.trials) == 30
    for ours, theirs in zip(shadho_celery.load_study(STORE, "s").trials, made.trials, strict=True):
        for label, value in theirs.params.items():
            assert isinstance(value, str) or value == ours.params[label]


def test_a_grid_that_floats_hold_stays_a_grid() -> None:
    pytest.importorskip("optuna")
    space = {"a": hp.quniform("a", 0, 1, 0.1), "b": hp.qnormal("b", 0, 3, 0.5), "c": hp.quniform("c", -7.3, 7.9, 1.1)}
    shadho_celery.minimize(lambda _: 0.0, space, trials=10, seed=0, store=STORE, study="s", sampler="random")
    laws = shadho_celery.optuna_study(STORE, "s").trials[0].distributions
    assert (laws["a"].low, laws["a"].high, laws["a"].step) == (0, 1, 0.1)
    assert laws["b"].step == 0.5
    assert laws["c"].step is None


def test_constraints_and_times_are_copied_so_that_best_and_front_are_feasible() -> None:
    optuna = pytest.importorskip("optuna")

    def constrained(values: dict[str, Any]) -> dict[str, Any]:
        bounds = {"wide": values["width"] - 64, "never": -1}
        return {"losses": {"a": values["shift"], "b": -values["shift"]}, "constraints": bounds}

    two: dict[str, Any] = {"objectives": {"a": "minimize", "b": "minimize"}}
    shadho_celery.minimize(constrained, SPACE, trials=30, seed=0, store=STORE, study="two", sampler="random", **two)
    front = shadho_celery.optuna_study(STORE, "two").best_trials
    assert front
    assert all(trial.params["width"] <= 64 for trial in front)
    one = {"loss": 0.0, "constraints": {"wide": 1.0}}
    shadho_celery.minimize(
        lambda values: {**one, "loss": values["width"], "constraints": {"narrow": 64 - values["width"]}},
        SPACE,
        trials=30,
        seed=0,
        store=STORE,
        study="one",
        sampler="random",
    )
    study, made = shadho_celery.load_study(STORE, "one"), shadho_celery.optuna_study(STORE, "one")
    assert made.best_value == study.best.loss == 64
    for ours, theirs in zip(study.trials, made.trials, strict=True):
        assert theirs.datetime_start.timestamp() == pytest.approx(ours.started_at, abs=1e-5)
        assert theirs.datetime_complete.timestamp() == pytest.approx(ours.finished_at, abs=1e-5)
    assert optuna.study.StudyDirection.MINIMIZE in made.directions


def test_of_a_study_with_budgets_the_trials_with_the_highest_one_are_copied() -> None:
    pytest.importorskip("optuna")
    shadho_celery.minimize(
        lambda values, context: values["shift"] ** 2 / context.budget,
        SPACE,
        trials=40,
        seed=0,
        store=STORE,
        study="s",
        fidelity={"least": 1, "most": 9, "how": "halving"},
    )
    study = shadho_celery.load_study(STORE, "s")
    top = [trial for trial in study.trials if trial.budget == 9]
    with pytest.warns(
        UserWarning, match=rf"the {len(top)} trials? with the highest budget, 9; {40 - len(top)} with other"
    ):
        made = shadho_celery.optuna_study(STORE, "s")
    assert [trial.user_attrs["trial"] for trial in made.trials] == [trial.number for trial in top]
    assert {trial.user_attrs["budget"] for trial in made.trials} == {9}
    assert made.best_trial.user_attrs["trial"] == study.best.number
