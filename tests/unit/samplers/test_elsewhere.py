"""Samplers of Optuna, by their names, search the whole space and learn from the trials that they asked for."""

from __future__ import annotations

import pytest
from hyperopt import hp

from shadho_celery import minimize

TREE = hp.choice("k", [{"u": hp.uniform("u", -2, 2)}, {"v": hp.loguniform("v", -7, 0), "n": hp.randint("n", 2, 5)}])
OF_OPTUNA = ["TPESampler", "NSGAIISampler"]


@pytest.mark.parametrize("name", [f"optuna:{name}" for name in OF_OPTUNA])
def test_a_tree_of_choices_is_searched(name: str) -> None:
    study = minimize(lambda p: 1 + p["u"] ** 2 if "u" in p else p["n"] + p["v"], TREE, trials=30, sampler=name, seed=0)
    assert study.counts == {"COMPLETE": 30}
    assert {"u" in trial.values for trial in study.trials} == {True, False}


@pytest.mark.slow
def test_what_it_asked_for_teaches_it() -> None:
    space = hp.uniform("x", -100, 100)
    ours, plain = (
        minimize(lambda x: (x - 3) ** 2, space, trials=60, sampler=each, seed=0)
        for each in ("optuna:TPESampler", "random")
    )
    assert ours.best is not None
    assert plain.best is not None
    assert (ours.best.loss or 0.0) < 0.1 * (plain.best.loss or 0.0)
