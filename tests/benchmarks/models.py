"""Problems of scikit-learn models on small data sets, after Bayesmark and the black-box optimisation challenge of 2020.

Source: Turner, Eriksson, McCourt, Kiili, Laaksonen, Xu, Guyon, "Bayesian Optimization is Superior to Random Search for
Machine Learning Hyperparameter Tuning", NeurIPS 2020 competition. Spaces and data are those of `uber/bayesmark`; a
label whose range is by logit there goes by the logarithm here. The loss is the mean of a five-fold cross-validation.
"""

from __future__ import annotations

import json
import math
import statistics
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from figures import goal, results_of
from hyperopt import hp
from peers import search
from problems import Problem
from sklearn import datasets
from sklearn.ensemble import AdaBoostClassifier, AdaBoostRegressor, RandomForestClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from shadho_celery.space.compile import compile_space

Json = dict[str, Any]
Make = Callable[..., Any]

EVALUATIONS = 32
#: random evaluations, whose median is the score 0
POOL = 200
OURS = ("auto", "tpe")
PEERS = ("optuna tpe", "hyperopt tpe")
ALGORITHMS = ("random", *OURS, *PEERS)
#: seeds of the recorded table
SEEDS = 5
PEERS_TABLE = Path(__file__).parent / "data" / "model_peers.json"
#: points of the score by which `auto` is better than the better peer
AHEAD = 1.0

DATA: Mapping[str, Callable[[], Any]] = {
    "iris": datasets.load_iris,
    "wine": datasets.load_wine,
    "breast": datasets.load_breast_cancer,
    "diabetes": datasets.load_diabetes,
}
SCORES: Mapping[str, str] = {
    "nll": "neg_log_loss",
    "accuracy": "accuracy",
    "mae": "neg_mean_absolute_error",
    "mse": "neg_mean_squared_error",
}


def _log(label: str, low: float, high: float) -> Any:
    return hp.loguniform(label, math.log(low), math.log(high))


def _whole(label: str, low: int, high: int) -> Any:
    return hp.randint(label, low, high + 1)


TREE = {
    "max_depth": _whole("max_depth", 1, 15),
    "min_samples_split": _log("min_samples_split", 0.01, 0.99),
    "min_samples_leaf": _log("min_samples_leaf", 0.01, 0.49),
    "min_weight_fraction_leaf": _log("min_weight_fraction_leaf", 0.01, 0.49),
    "max_features": _log("max_features", 0.01, 0.99),
    "min_impurity_decrease": hp.uniform("min_impurity_decrease", 0.0, 0.5),
}
ADA = {"n_estimators": _whole("n_estimators", 10, 100), "learning_rate": _log("learning_rate", 1e-4, 10.0)}
MLP = {
    "hidden_layer_sizes": _whole("hidden_layer_sizes", 50, 200),
    "alpha": _log("alpha", 1e-5, 10.0),
    "batch_size": _whole("batch_size", 10, 250),
    "learning_rate_init": _log("learning_rate_init", 1e-5, 1e-1),
    "tol": _log("tol", 1e-5, 1e-1),
    "validation_fraction": _log("validation_fraction", 0.1, 0.9),
    "beta_1": _log("beta_1", 0.5, 0.99),
    "beta_2": _log("beta_2", 0.9, 1.0 - 1e-6),
    "epsilon": _log("epsilon", 1e-9, 1e-6),
}
RIDGE = {
    "alpha": _log("alpha", 1e-2, 1e2),
    "fit_intercept": hp.choice("fit_intercept", [False, True]),
    "max_iter": hp.qloguniform("max_iter", math.log(10), math.log(5000), 1),
    "tol": _log("tol", 1e-4, 1e-1),
}


def _lasso(**params: Any) -> Any:
    return OneVsRestClassifier(LogisticRegression(l1_ratio=1.0, solver="liblinear", random_state=0, **params))


def _ridge(max_iter: float, **params: Any) -> Any:
    return Ridge(max_iter=int(max_iter), random_state=0, **params)


def _seeded(make: Make, **fixed: Any) -> Make:
    return lambda **params: make(random_state=0, **fixed, **params)


#: model -> search space, and what makes it of its params
MODELS: Mapping[str, tuple[Any, Make]] = {
    "knn": ({"n_neighbors": _whole("n_neighbors", 1, 25), "p": _whole("p", 1, 4)}, KNeighborsClassifier),
    "svm": (
        {"C": _log("C", 1.0, 1e3), "gamma": _log("gamma", 1e-4, 1e-3), "tol": _log("tol", 1e-5, 1e-1)},
        _seeded(SVC, probability=True),
    ),
    "tree": (TREE, _seeded(DecisionTreeClassifier)),
    "tree regression": (TREE, _seeded(DecisionTreeRegressor)),
    "forest": (TREE, _seeded(RandomForestClassifier, n_estimators=10)),
    "ada": (ADA, _seeded(AdaBoostClassifier)),
    "ada regression": (ADA, _seeded(AdaBoostRegressor)),
    "lasso": (
        {"C": _log("C", 1e-2, 1e2), "intercept_scaling": _log("intercept_scaling", 1e-2, 1e2)},
        _lasso,
    ),
    "ridge": (RIDGE, _ridge),
    "mlp": (MLP, _seeded(MLPClassifier, solver="adam", early_stopping=True)),
}
#: model, data and loss
TASKS: tuple[tuple[str, str, str], ...] = (
    ("knn", "iris", "nll"),
    ("svm", "iris", "nll"),
    ("svm", "wine", "accuracy"),
    ("tree", "iris", "accuracy"),
    ("tree regression", "diabetes", "mae"),
    ("forest", "iris", "nll"),
    ("forest", "breast", "nll"),
    ("ada", "breast", "nll"),
    ("ada regression", "diabetes", "mse"),
    ("lasso", "wine", "nll"),
    ("ridge", "diabetes", "mse"),
    ("mlp", "wine", "nll"),
)


@cache
def _data(name: str) -> tuple[Any, Any]:
    found = DATA[name]()
    data, _, target, _ = train_test_split(found.data, found.target, test_size=0.2, random_state=0)
    return data, target


def problem(model: str, data: str, loss: str) -> Problem:
    """Return one of the problems."""
    space, make = MODELS[model]

    def objective(params: Mapping[str, Any]) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd settings do not converge, and say so
            scores = cross_val_score(make(**params), *_data(data), scoring=SCORES[loss], cv=5)
        return -float(np.mean(scores))

    return Problem(space, objective)


def search_model(task: tuple[str, str, str], algorithm: str, seed: int) -> float:
    """Return the best loss of one search."""
    return min(search(problem(*task), algorithm, seed, EVALUATIONS))


def evaluate_pool(task: tuple[str, str, str]) -> list[float]:
    """Return the losses of random params."""
    made = problem(*task)
    space = compile_space(made.space)
    return [made.objective(space.evaluate(params)) for params in space.sample(np.random.default_rng(0), POOL)]


def models(arguments: Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return scores by problem and algorithm: 100 is the best loss that anybody saw, 0 a random one."""
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.model_seeds)
    is_recorded = seeds.start == 0 and len(seeds) <= SEEDS and not arguments.full and PEERS_TABLE.is_file()
    runs = {
        (task, algorithm): [processes.submit(search_model, task, algorithm, seed) for seed in seeds]
        for task in TASKS
        for algorithm in (OURS if is_recorded else (*OURS, *PEERS))
    }
    if is_recorded:
        found = results_of(runs, "searches of models")
        for task, row in json.loads(PEERS_TABLE.read_text()).items():
            found |= {(task_of(task), peer): losses for peer, losses in row.items()}
    else:
        pools = {(task, "pool"): [processes.submit(evaluate_pool, task)] for task in TASKS}
        found = results_of(runs, "searches of models")
        found |= {key: losses for key, [losses] in results_of(pools, "random evaluations").items()}
        if arguments.full:
            record(found)
    figures = {" ".join(task): scores(task, found) for task in TASKS}
    figures["mean"] = {name: statistics.mean(row[name] for row in figures.values()) for name in ALGORITHMS}
    print(f"{'score':26s}" + "".join(f" {name:>13s}" for name in ALGORITHMS))
    for name, row in figures.items():
        print(f"{name:26s}" + "".join(f" {value:13.1f}" for value in row.values()))
    ahead = figures["mean"]["auto"] - max(figures["mean"][name] for name in PEERS)
    return figures, {"points of auto ahead of the better of Optuna's and hyperopt's TPE": goal(ahead, at_least=AHEAD)}


def scores(task: tuple[str, str, str], found: Mapping[Any, list[float]]) -> Json:
    """Return one problem's scores. Random search is parts of the pool."""
    pool = found[task, "pool"]
    clip = statistics.median(pool)
    best = min(min(losses) for (name, _), losses in found.items() if name == task)
    rows = {name: found[task, name] for name in (*OURS, *PEERS)}
    rows["random"] = [min(pool[start : start + EVALUATIONS]) for start in range(0, POOL - EVALUATIONS, EVALUATIONS)]
    return {name: 100 * (1 - statistics.mean(_normed(loss, best, clip) for loss in rows[name])) for name in ALGORITHMS}


def record(found: Mapping[Any, list[float]]) -> None:
    """Write the peers' table: their best losses by seed, and the losses of the pool."""
    table = {
        " / ".join(task): {name: [float(f"{loss:.6g}") for loss in found[task, name]] for name in (*PEERS, "pool")}
        for task in TASKS
    }
    PEERS_TABLE.write_text(json.dumps(table, separators=(",", ":")) + "\n")


def task_of(name: str) -> tuple[str, str, str]:
    """Return the problem of a name in the table."""
    return next(task for task in TASKS if " / ".join(task) == name)


def _normed(loss: float, best: float, clip: float) -> float:
    """Return a loss on the scale from the best one (0) to a random one (1), at most 1 off."""
    return 0.0 if clip == best else max(-1.0, min(1.0, (loss - best) / (clip - best)))
