"""`ShadhoSearchCV` beside other searches of scikit-learn's form: ``python tests/benchmarks/search_cv.py``.

Each search gets the same random half of a data set of scikit-learn (at most 400 samples), the same folds, the same
space and the same number of candidates. Halving has as many samples in all of its fits together: three times the
candidates on a ninth of the samples, the best third of them on a third, and the best ninth of them on all samples. The
table has means over seeds of

- the score of the params found, by cross-validation on the same folds of all these samples,
- the score of the refitted estimator on the samples that no search has seen,
- the CPU seconds of `fit`, refit included, in one thread.

Beside this package: scikit-learn's RandomizedSearchCV and HalvingRandomSearchCV, and OptunaSearchCV.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
from figures import count, finish, interval, make_parser, show
from optuna.distributions import FloatDistribution, IntDistribution
from optuna_integration import OptunaSearchCV
from scipy.stats import loguniform, randint
from sklearn.base import is_classifier
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.experimental import enable_halving_search_cv  # noqa: F401 -- HalvingRandomSearchCV needs this import
from sklearn.model_selection import (
    HalvingRandomSearchCV,
    KFold,
    RandomizedSearchCV,
    StratifiedKFold,
    cross_val_score,
    train_test_split,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR
from threadpoolctl import threadpool_limits

from shadho_celery.integrations.sklearn import ShadhoSearchCV

#: number of folds; maximum number of samples of a search; factor by which halving reduces the candidates, twice
FOLDS, MOST, FACTOR = 3, 400, 3
#: by problem: data, estimator, and bounds by param. Bounds that are ints belong to a whole number; other params are
#: log-uniform
PROBLEMS: Mapping[str, tuple[Callable[..., Any], Any, Mapping[str, tuple[float, float]]]] = {
    "digits, SVC": (
        load_digits,
        make_pipeline(StandardScaler(), SVC()),
        {"svc__C": (1e-2, 1e4), "svc__gamma": (1e-6, 1e1)},
    ),
    "diabetes, SVR": (
        load_diabetes,
        make_pipeline(StandardScaler(), SVR()),
        {"svr__C": (1e-2, 1e4), "svr__gamma": (1e-5, 1e1), "svr__epsilon": (1e-2, 1e2)},
    ),
    "breast cancer, boosting": (
        load_breast_cancer,
        HistGradientBoostingClassifier(max_iter=20, random_state=0),
        {
            "learning_rate": (1e-3, 1.0),
            "max_leaf_nodes": (2, 31),
            "min_samples_leaf": (1, 60),
            "l2_regularization": (1e-6, 1e3),
        },
    ),
}
#: by contestant: its search for an estimator, bounds, the number of candidates, and the arguments that all have
SEARCHES: Mapping[str, Callable[..., Any]] = {
    "ShadhoSearchCV": lambda estimator, bounds, n, **same: ShadhoSearchCV(estimator, laws(bounds), n_trials=n, **same),
    "RandomizedSearchCV": lambda estimator, bounds, n, **same: RandomizedSearchCV(
        estimator, laws(bounds), n_iter=n, **same
    ),
    "HalvingRandomSearchCV": lambda estimator, bounds, n, **same: HalvingRandomSearchCV(
        estimator, laws(bounds), n_candidates=FACTOR * n, factor=FACTOR, **same
    ),
    "OptunaSearchCV": lambda estimator, bounds, n, **same: OptunaSearchCV(
        estimator,
        {
            name: IntDistribution(*ends) if isinstance(ends[0], int) else FloatDistribution(*ends, log=True)
            for name, ends in bounds.items()
        },
        n_trials=n,
        **same,
    ),
}


def laws(bounds: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Return scipy's distributions by param."""
    return {
        name: randint(low, high + 1) if isinstance(low, int) else loguniform(low, high)
        for name, (low, high) in bounds.items()
    }


def run(problem: str, contestant: str, trials: int, seed: int) -> tuple[float, float, float]:
    """Return the score by cross-validation, the score on unseen samples, and the CPU seconds of one search."""
    load, estimator, bounds = PROBLEMS[problem]
    x, y = load(return_X_y=True)
    is_class = is_classifier(estimator)
    ours, unseen, y_ours, y_unseen = train_test_split(
        x, y, train_size=min(MOST, len(y) // 2), random_state=seed, stratify=y if is_class else None
    )
    cv = (StratifiedKFold if is_class else KFold)(FOLDS, shuffle=True, random_state=seed)
    search = SEARCHES[contestant](estimator, bounds, trials, cv=cv, random_state=seed)
    if contestant == "HalvingRandomSearchCV":
        search.set_params(min_resources=len(ours) // FACTOR**2)
    began = time.process_time()
    search.fit(ours, y_ours)
    seconds = time.process_time() - began
    found = search.best_estimator_
    return float(cross_val_score(found, ours, y_ours, cv=cv).mean()), float(found.score(unseen, y_unseen)), seconds


def shown(values: list[float]) -> str:
    """Return a mean with its standard error."""
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return f"{np.mean(values):.4f} ± {error:.4f}"


def main() -> bool:
    """Measure and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=count, default=10, help="number of seeds [10]")
    parser.add_argument("--trials", type=count, default=30, help="candidates of each search, halving excepted [30]")
    parser.add_argument("--only", action="append", choices=[*PROBLEMS], help="a problem [all]")
    parser.add_argument("--quick", action="store_true", help="three seeds and nine candidates")
    given = parser.parse_args()
    seeds, trials = (3, 9) if given.quick else (given.seeds, given.trials)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Some folds of halving lack a class; OptunaSearchCV is experimental.
    warnings.simplefilter("ignore")
    figures: dict[str, Any] = {}
    with threadpool_limits(1):
        for problem in given.only or PROBLEMS:
            # The searches alternate, so that a busy machine affects all of them.
            runs = [{name: run(problem, name, trials, seed) for name in SEARCHES} for seed in range(seeds)]
            rows, ours = {}, [each["ShadhoSearchCV"][0] for each in runs]
            for name in SEARCHES:
                cv, test, seconds = ([each[name][place] for each in runs] for place in range(3))
                less = [mine - its for mine, its in zip(ours, cv, strict=True)]
                low, high = interval(less)
                rows[name] = {
                    "cross-validation": shown(cv),
                    "unseen samples": shown(test),
                    "CPU s": f"{np.mean(seconds):.1f}",
                }
                if name != "ShadhoSearchCV":
                    rows[name]["ShadhoSearchCV above it"] = f"{np.mean(less):+.4f} [{low:+.4f}, {high:+.4f}]"
                figures[f"{problem}: {name}"] = {"cross_validation": cv, "unseen_samples": test, "cpu_seconds": seconds}
            show(rows, "search", title=f"{problem}: means of {seeds} seeds, {trials} candidates, {FOLDS} folds")
    return finish(figures, {}, vars(given))


if __name__ == "__main__":
    sys.exit(not main())
