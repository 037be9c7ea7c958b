"""The search on support vector machines: every kernel trains, nothing takes long, what overflows is refused."""

from __future__ import annotations

import time
from typing import Any

import hyperopt
import numpy as np
import pytest
from hyperopt.pyll.stochastic import sample

from tasks import svm

KERNELS = {
    "linear": {"C"},
    "rbf": {"C", "gamma"},
    "sigmoid": {"C", "gamma", "coef0"},
    "poly": {"C", "gamma", "coef0", "degree"},
}


def test_every_kernel_gets_its_own_parameters_in_the_papers_ranges() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        params = sample(svm.SPACE, rng=rng)
        assert set(params) - {"kernel"} == KERNELS[params["kernel"]]
        seen.add(params["kernel"])
        assert 2**-5 <= params["C"] <= 2**15
        assert 1e-3 <= params.get("gamma", 1) <= 1e3
        assert -1000 <= params.get("coef0", 0) <= 1000
        assert params.get("degree", 2) in range(2, 15)
    assert seen == set(KERNELS)


def test_hyperopt_takes_the_space_with_one_label_per_parameter() -> None:
    trials = hyperopt.Trials()
    hyperopt.fmin(
        lambda params: params["C"],
        svm.SPACE,
        algo=hyperopt.rand.suggest,
        max_evals=5,
        trials=trials,
        rstate=np.random.default_rng(0),
        show_progressbar=False,
    )
    assert set(trials.idxs) == {"kernel", "C", "gamma", "coef0", "degree"}


@pytest.mark.parametrize(
    "params",
    [
        {"kernel": "linear", "C": 1.0},
        {"kernel": "rbf", "C": 10.0, "gamma": 0.05},
        {"kernel": "poly", "C": 1.0, "gamma": 0.1, "coef0": 10.0, "degree": 3},
    ],
    ids=lambda params: params["kernel"],
)
def test_good_params_have_a_small_loss(params: dict[str, Any]) -> None:
    result = svm.objective(params)
    assert result["loss"] < 0.15
    assert result["accuracy"] > 0.97


def test_the_same_params_have_the_same_loss() -> None:
    params = {"kernel": "linear", "C": 0.5}
    assert svm.objective(params) == svm.objective(params)


@pytest.mark.parametrize(
    "params",
    [
        {"kernel": "rbf", "C": 2**15, "gamma": 1e3},
        {"kernel": "rbf", "C": 2**-5, "gamma": 1e3},
        {"kernel": "sigmoid", "C": 2**15, "gamma": 1e3, "coef0": -1000},
        {"kernel": "poly", "C": 2**-5, "gamma": 1e-3, "coef0": 0, "degree": 14},
    ],
    ids=lambda params: f"{params['kernel']} C={params['C']}",
)
def test_the_worst_params_are_over_long_before_twenty_seconds(params: dict[str, Any]) -> None:
    began = time.perf_counter()
    assert svm.objective(params)["loss"] > 1  # they learn next to nothing
    assert time.perf_counter() - began < 20


def test_a_kernel_that_overflows_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="not finite"):
        svm.objective({"kernel": "poly", "C": 1.0, "gamma": 1e3, "coef0": 1000, "degree": 14})
