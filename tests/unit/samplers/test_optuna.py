"""Optuna's samplers by their names search the whole space, and learn from the trials that they asked for."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from hyperopt import hp

from shadho_celery import minimize
from shadho_celery.errors import UsageError
from shadho_celery.samplers import find_sampler

XY = {"x": hp.uniform("x", -1, 1), "y": hp.uniform("y", -1, 1)}


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
    for name in ("optuna:CmaEsSampler", "cma", "gp"):
        with pytest.raises(UsageError, match=f"^sampler {name} learns one loss, .* choose auto or tpe$"):
            find_sampler(name, objectives=2)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"^Optuna has no sampler 'Oracle'; choose one of .*TPESampler"):
        find_sampler("optuna:Oracle")
    with pytest.raises(UsageError, match="Optuna has no sampler 'GridSampler'"):
        find_sampler("optuna:GridSampler")


def test_without_optuna_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r'pip install -e "\.\[optuna\]"$'):
        find_sampler("optuna:TPESampler")


def test_a_package_that_a_sampler_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is recorded."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^Optuna's CmaEsSampler needs the package cmaes: pip install cmaes"):
        minimize(lambda p: p["x"] ** 2 + p["y"] ** 2, XY, trials=12, sampler="optuna:CmaEsSampler", seed=0)


def test_a_space_that_a_sampler_cannot_search_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"^Optuna's BruteForceSampler cannot search this space: "):
        minimize(lambda p: p["x"] ** 2, XY, trials=3, sampler="optuna:BruteForceSampler", seed=0)
