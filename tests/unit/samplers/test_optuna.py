"""Optuna's samplers by their names search the whole space, and learn from the trials that they asked for."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from hyperopt import hp

from shadho_celery import minimize
from shadho_celery.errors import UsageError
from shadho_celery.samplers import find_sampler

TREE = hp.choice("k", [{"u": hp.uniform("u", -2, 2)}, {"v": hp.loguniform("v", -7, 0), "n": hp.randint("n", 5)}])

XY = {"x": hp.uniform("x", -1, 1), "y": hp.uniform("y", -1, 1)}


@pytest.mark.parametrize("name", ["TPESampler", "RandomSampler", "NSGAIISampler", "QMCSampler"])
def test_a_tree_of_choices_is_searched(name: str) -> None:
    study = minimize(
        lambda p: 1 + p["u"] ** 2 if "u" in p else p["n"] + p["v"], TREE, trials=30, sampler=f"optuna:{name}", seed=0
    )
    assert study.counts == {"COMPLETE": 30}
    assert {"u" in trial.values for trial in study.trials} == {True, False}


def test_what_it_asked_for_teaches_it() -> None:
    def loss(x: float) -> float:
        return (x - 3) ** 2

    space = hp.uniform("x", -100, 100)
    ours, plain = (minimize(loss, space, trials=60, sampler=name, seed=0) for name in ("optuna:TPESampler", "random"))
    assert ours.best is not None
    assert plain.best is not None
    assert (ours.best.loss or 0.0) < 0.1 * (plain.best.loss or 0.0)


@pytest.mark.parametrize("name", ["NSGAIISampler", "TPESampler", "RandomSampler"])
def test_several_losses_and_constraints_reach_it(name: str) -> None:
    study = minimize(
        lambda p: {"losses": {"a": p["x"], "b": p["y"] - p["x"]}, "constraints": {"c": p["x"] - 0.5}},
        XY,
        trials=25,
        sampler=f"optuna:{name}",
        seed=0,
        objectives={"a": "minimize", "b": "maximize"},
    )
    assert study.counts == {"COMPLETE": 25}
    assert study.front
    assert all(trial.is_feasible for trial in study.front)


def test_one_that_learns_a_single_loss_is_refused() -> None:
    for name in ("optuna:CmaEsSampler", "hyperopt:tpe", "gp"):
        with pytest.raises(UsageError, match=f"^sampler {name} learns one loss, .* choose auto or tpe$"):
            find_sampler(name, objectives=2)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"^Optuna has no sampler 'Oracle'; choose one of .*TPESampler"):
        find_sampler("optuna:Oracle")
    with pytest.raises(UsageError, match="Optuna has no sampler 'GridSampler'"):
        find_sampler("optuna:GridSampler")


def test_without_optuna_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install 'shadho_celery\[optuna\]'"):
        find_sampler("optuna:TPESampler")


def test_a_package_that_a_sampler_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is recorded."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^Optuna's CmaEsSampler needs the package cmaes: pip install cmaes"):
        minimize(lambda p: p["x"] ** 2 + p["y"] ** 2, XY, trials=12, sampler="optuna:CmaEsSampler", seed=0)


def test_a_space_that_a_sampler_cannot_search_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"^Optuna's BruteForceSampler cannot search this space: "):
        minimize(lambda p: p["x"] ** 2, XY, trials=3, sampler="optuna:BruteForceSampler", seed=0)
