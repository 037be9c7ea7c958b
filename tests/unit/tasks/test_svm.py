"""The search on support vector machines: every kernel trains, nothing takes long, nothing overflows."""

from __future__ import annotations

import io
import sys
import time
from contextlib import redirect_stderr
from typing import Any
from urllib.error import URLError

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("coef0", [-1000, 1000])
def test_a_kernel_beyond_single_precision_trains(coef0: int) -> None:
    """Its greatest number is 1e67: the solver, which keeps kernels in single precision, is given a smaller one."""
    assert svm.objective({"kernel": "poly", "C": 1.0, "gamma": 1e3, "coef0": coef0, "degree": 14})["loss"] < 3


def test_a_rescaled_kernel_has_the_same_decision_function_and_is_at_most_one() -> None:
    from sklearn.svm import SVC

    train, held_out, labels, _ = svm.images(None)
    largest = np.square(train).sum(axis=1).max()
    params = {"kernel": "poly", "C": 0.5, "gamma": 0.1, "coef0": 2.0, "degree": 3}
    rescaled = svm.rescaled(params, largest)
    plain, other = (SVC(tol=1e-6, **each).fit(train, labels) for each in (params, rescaled))
    assert np.allclose(plain.decision_function(held_out), other.decision_function(held_out), atol=1e-4)
    kernel = (rescaled["gamma"] * train @ train.T + rescaled["coef0"]) ** rescaled["degree"]
    assert 0.1 < kernel.max() <= 1 + 1e-9


def test_other_kernels_are_left_as_they_are() -> None:
    params = {"kernel": "rbf", "C": 10.0, "gamma": 0.05}
    assert svm.rescaled(params, 30.0) == params


@pytest.fixture(name="openml")
def _openml(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A loader that gives 60,010 images of two pixels instead of MNIST's; it notes what it was asked."""
    asked: dict[str, Any] = {}

    def fetch(name: str, **options: Any) -> tuple[Any, Any]:
        asked.update(options, name=name)
        labels = np.arange(60_010) % 10
        return np.stack([labels * 25, np.full(60_010, 255)], axis=1), labels.astype(str)

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    svm.images.cache_clear()
    return asked


def test_mnist_comes_from_the_folder_and_is_split_where_all_split_it(openml: dict[str, Any]) -> None:
    train, held_out, train_labels, held_out_labels = svm.images("somewhere")
    assert openml["name"] == "mnist_784"
    assert openml["data_home"] == "somewhere"
    assert (train.shape, held_out.shape) == ((10_000, 2), (10, 2))
    assert (train.min(), train.max()) == (0, 1)
    assert [len(train_labels), *held_out_labels] == [10_000, *range(10)]


def test_the_variable_names_the_data_of_a_trial(openml: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svm, "SETTINGS", svm.Settings(mnist_train=100))
    monkeypatch.setenv("SHADHO_SVM_DATA", "there")
    assert svm.objective({"kernel": "linear", "C": 100.0})["loss"] < 2.3
    assert openml["data_home"] == "there"


def test_without_the_data_and_a_network_the_command_ends_with_two_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise URLError("no route")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    monkeypatch.setattr(sys, "argv", ["svm", "--data", "nowhere"])
    monkeypatch.setenv("SHADHO_SVM_DATA", "before")  # what the command sets is taken back with it
    with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as end:
        svm.main()
    assert end.value.code == 2
    assert "'nowhere'" in said.getvalue()
    assert "no route" in said.getvalue()
    assert "openml.org" in said.getvalue()
