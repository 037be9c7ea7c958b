"""`ShadhoSearchCV`, a search of scikit-learn that proposes params with the samplers of this package."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from itertools import islice
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
from joblib import effective_n_jobs
from sklearn.model_selection._search import BaseSearchCV
from sklearn.model_selection._validation import FitFailedWarning
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval

from shadho_celery.core.checks import short
from shadho_celery.errors import NoTrialToAsk, SpaceError

#: distributions of scipy are searched by their quantiles, from TAIL to 1 - TAIL, because the ends may be infinite
TAIL = 1e-6


class ShadhoSearchCV(BaseSearchCV):
    """Search of an estimator's params with cross-validation, in batches of `n_jobs` candidates.

    `param_space` is an `hp` expression that gives a dict of params, or a dict of frozen distributions of scipy, lists,
    `hp` expressions and constants by param. A dict whose name is no param of the estimator is a group of params.
    `n_trials` is the number of candidates; one that repeats another is not fitted again. `sampler` is as in
    `minimize`. With several metrics, it learns from the one that `refit` names, else from the first. All other
    arguments, methods and attributes are those of scikit-learn's RandomizedSearchCV.

    A fold that fails has the score `error_score`. If a candidate's mean score is NaN, it counts as a failure. `fit`
    raises SpaceError for an invalid space, and ValueError for a param that the estimator lacks and if all fits fail.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **BaseSearchCV._parameter_constraints,
        "n_trials": [Interval(Integral, 1, None, closed="left")],
    }

    def __init__(
        self,
        estimator: Any,
        param_space: Any,
        *,
        n_trials: int = 30,
        sampler: Any = "auto",
        scoring: Any = None,
        n_jobs: int | None = None,
        refit: Any = True,
        cv: Any = None,
        verbose: int = 0,
        pre_dispatch: Any = "2*n_jobs",
        random_state: Any = None,
        error_score: Any = np.nan,
        return_train_score: bool = False,
    ) -> None:
        shared = {"scoring": scoring, "n_jobs": n_jobs, "refit": refit, "cv": cv, "verbose": verbose}
        shared |= {"pre_dispatch": pre_dispatch, "error_score": error_score, "return_train_score": return_train_score}
        super().__init__(estimator, **shared)
        self.param_space, self.n_trials = param_space, n_trials
        self.sampler, self.random_state = sampler, random_state

    def _run_search(self, evaluate_candidates: Callable[..., dict[str, Any]]) -> None:
        # Imported late, here and below, because processes of joblib import this module, and hyperopt takes a second.
        from shadho_celery.program.study import Study

        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        space, readers = self.param_space, dict[str, Any]()
        if isinstance(space, Mapping):
            space = {name: _domain(name, given, readers) for name, given in space.items()}
        # All candidates need the same folds, also from a random splitter.
        cv = copy(self.cv) if hasattr(self.cv, "random_state") else None
        if cv and not isinstance(cv.random_state, Integral):
            cv.random_state = seed
        jobs, table, failed = effective_n_jobs(self.n_jobs), dict[str, Any](), ValueError()
        with Study(space, seed=seed, sampler=self.sampler) as study:
            trials = _asked(study, self.n_trials)
            while batch := [*islice(trials, jobs)]:
                try:
                    candidates = (self._params(getattr(trial, "values", None), readers) for trial in batch)
                    table = evaluate_candidates(candidates, cv=cv)
                    first = next(name for name in table if name.startswith("mean_test_"))
                    losses = -table.get(f"mean_test_{self.refit}", table[first])[-len(batch) :]
                except ValueError as error:
                    # scikit-learn raises if all fits of a batch fail, and does not keep the batch.
                    if "fits failed" not in str(error):
                        raise
                    warnings.warn(str(error), FitFailedWarning, stacklevel=2)
                    failed, losses = error, np.full(len(batch), np.nan)
                for trial, loss in zip(batch, losses, strict=True):
                    study.tell(trial, float(loss))
        if not table:
            raise failed

    def _params(self, values: Any, readers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the estimator's params for an evaluated point, also those in groups. Raises SpaceError."""
        if not isinstance(values, dict):
            raise SpaceError(f"param_space gives {short(values, 60)}; it must give a dict of params by name")
        known, params = self.estimator.get_params(), dict[str, Any]()
        for name, value in values.items():
            if isinstance(value, dict) and name not in known:
                params |= self._params(value, {})
            else:
                params[name] = readers[name](value) if name in readers else value
        return params


def _asked(study: Any, most: int) -> Iterator[Any]:
    """Yield the first `most` trials of a study, without those that repeat the params of an earlier one."""
    seen = list[Any]()
    with suppress(NoTrialToAsk):
        for _ in range(most):
            if (trial := study.ask()).params not in seen:
                seen.append(trial.params)
                yield trial


def _domain(name: str, given: Any, readers: dict[str, Any]) -> Any:
    """Return the hp expression of a list or of a distribution of scipy, and enter its reader. Return others as is."""
    from shadho_celery import hp

    if isinstance(given, (list, tuple, range, np.ndarray)):
        # hyperopt would copy or convert the options, so only their places are in the space.
        readers[name] = list(given).__getitem__
        return hp.choice(name, [*range(len(given))])
    if not hasattr(given, "rvs"):
        return given
    if hasattr(given, "freeze") or not hasattr(given, "ppf") or np.isnan(given.ppf(0.5)):
        raise SpaceError(f"{name!r} is no frozen distribution of one number; write for example scipy.stats.norm(0, 1)")
    if given.dist.name == "randint":
        low, high = given.support()
        return hp.uniformint(name, int(low), int(high))
    # The quantiles of a uniform or loguniform law are as wide apart as its values or their logarithms.
    readers[name] = lambda mass: (int if hasattr(given, "pmf") else float)(given.ppf(mass))
    return hp.uniform(name, TAIL, 1 - TAIL)
