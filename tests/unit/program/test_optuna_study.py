"""A study as Optuna has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hyperopt import hp

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
