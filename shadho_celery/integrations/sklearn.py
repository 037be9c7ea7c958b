"""`ShadhoSearchCV`, a search of scikit-learn that proposes params with the samplers of this package."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from numbers import Integral, Real
from time import monotonic
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from joblib import effective_n_jobs
from sklearn.base import clone
from sklearn.model_selection._search import BaseSearchCV
from sklearn.model_selection._validation import FitFailedWarning, _insert_error_scores
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval

from shadho_celery.core.checks import one_line, short
from shadho_celery.errors import NoTrialToAsk, SpaceError, UsageError

#: distributions that hp lacks are searched by their quantiles, from TAIL to 1 - TAIL, because the ends may be infinite
TAIL = 1e-6


class SearchError(UsageError, ValueError):
    """The search space does not fit the estimator."""


class ShadhoSearchCV(BaseSearchCV):
    """Search of an estimator's params with cross-validation, in batches of `n_jobs` candidates.

    `param_space` is an `hp` expression that gives a dict of params, or a dict of frozen distributions of scipy, lists,
    `hp` expressions and constants by param. A dict whose name is no param of the estimator is a group of params.
    `n_trials` is the number of candidates; there are fewer if the space has fewer points. No batch begins after
    `timeout` seconds. `sampler` is as in `minimize`. With several metrics, it learns from the one that `refit` names,
    else from the first. All other arguments, methods and attributes are those of scikit-learn's RandomizedSearchCV.

    A fold that fails has the score `error_score`. If a candidate's mean score is NaN, it counts as a failure. `fit`
    raises SearchError, which is also a ValueError, for an invalid space, and ValueError if all fits fail.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **BaseSearchCV._parameter_constraints,
        "n_trials": [Interval(Integral, 1, None, closed="left")],
        "timeout": [Interval(Real, 0, None, closed="neither"), None],
    }

    def __init__(
        self,
        estimator: Any,
        param_space: Any,
        *,
        n_trials: int = 30,
        timeout: float | None = None,
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
        self.param_space, self.n_trials, self.timeout = param_space, n_trials, timeout
        self.sampler, self.random_state = sampler, random_state

    def _run_search(self, evaluate_candidates: Callable[..., dict[str, Any]]) -> None:
        # Imported late, here and below, because processes of joblib import this module, and hyperopt takes a second.
        from shadho_celery.program.study import Study

        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        try:
            space, readers = self.param_space, dict[str, Any]()
            if isinstance(space, Mapping):
                space = {name: _domain(name, given, readers) for name, given in space.items()}
            limit = self._limit(space, readers)
            study = Study(space, seed=seed, sampler=self.sampler)
        except (SpaceError, UsageError) as error:
            raise SearchError(str(error)) from None
        end, jobs = monotonic() + (self.timeout or math.inf), effective_n_jobs(self.n_jobs)
        splits, candidates, folds, results = list[Any](), list[Any](), list[list[dict[str, Any]]](), dict[str, Any]()

        def split_once(*data: Any, **routed: Any) -> list[Any]:
            splits.extend([] if splits else self.cv.split(*data, **routed))
            return splits

        # All candidates need the same folds, also from a random splitter.
        cv = SimpleNamespace(split=split_once) if hasattr(self.cv, "split") else None
        with study:
            trials = islice(_asked(study), limit)
            while (monotonic() < end or not folds) and (batch := [*islice(trials, jobs)]):
                candidates += (asked := [self._params(trial.values, readers) for trial in batch])
                try:
                    results = evaluate_candidates(asked, cv=cv)
                    folds += results["folds"][-len(batch) :]
                except ValueError as error:
                    # scikit-learn raises if all fits of a batch fail, and then does not keep the batch.
                    if self.error_score == "raise" or "fits failed" not in str(error):
                        raise
                    warnings.warn(str(error), FitFailedWarning, stacklevel=2)
                    folds += [[{"fit_error": str(error), "test_scores": self.error_score}]] * len(batch)
                for trial, told in zip(batch, folds[-len(batch) :], strict=True):
                    study.tell(trial, self._result(told))
        if not results:
            raise ValueError(folds[0][0]["fit_error"])
        n_splits, example = len(results["folds"][0]), results["folds"][0][0]
        lost = {name: self.error_score if name.endswith("scores") else np.nan for name in example}
        out = [{**lost, **fold} for each in folds for fold in each * (n_splits // len(each))]
        # With several metrics, failed candidates get a score for each of them.
        _insert_error_scores(out, self.error_score)
        results.clear()
        results.update(super()._format_results(candidates, n_splits, out))

    def _format_results(self, candidate_params: Any, n_splits: int, out: Any, more_results: Any = None) -> Any:
        """Return the results of the folds by candidate. The table is made of them at the end, once."""
        return {"folds": [out[place : place + n_splits] for place in range(0, len(out), n_splits)]}

    def _limit(self, space: Any, readers: Mapping[str, Any]) -> int:
        """Return the number of candidates: `n_trials`, or the number of points if the space has fewer.

        Raises SpaceError or SearchError if the space cannot be searched, or does not fit the estimator.
        """
        from shadho_celery.samplers.wrapped import points
        from shadho_celery.space.compile import compile_space
        from shadho_celery.space.split import split

        compiled, generator = compile_space(space), np.random.default_rng(0)
        if not compiled.domains:
            raise SearchError("param_space has nothing to search; give distributions, lists or hp expressions by param")
        parts = split(compiled)
        for part in parts:
            self._params(compiled.evaluate(part.sample(generator, 1)[0]), readers)
        if any(domain.steps() is None for domain in compiled.domains.values()):
            return self.n_trials
        return min(self.n_trials, sum(1 for part in parts for _ in islice(points(part, generator), self.n_trials)))

    def _params(self, values: Any, readers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the estimator's params for an evaluated point. Raises SearchError unless the estimator takes them."""
        known, groups, params = self.estimator.get_params(), [values], {}
        for group in groups:
            if not isinstance(group, dict):
                raise SearchError(f"param_space gives {short(group, 60)}; it must give a dict of params by name")
            for name, value in group.items():
                if isinstance(value, dict) and name not in known:
                    groups.append(value)
                else:
                    params[name] = readers[name](value) if group is values and name in readers else value
        try:
            clone(self.estimator).set_params(**clone(params, safe=False))
        except (AttributeError, TypeError, ValueError) as error:
            raise SearchError(one_line(error, 500)) from None
        return params

    def _result(self, folds: list[dict[str, Any]]) -> dict[str, float]:
        """Return what a study is told of a candidate."""
        scores = [fold["test_scores"] for fold in folds]
        if isinstance(scores[0], dict):
            metric = self.refit if isinstance(self.refit, str) else next(iter(scores[0]))
            scores = [each[metric] for each in scores]
        seconds = sum(fold.get("fit_time", 0.0) + fold.get("score_time", 0.0) for fold in folds)
        # With seconds, proposals depend on measured times, so a seed would not repeat a search.
        return {"loss": -float(np.mean(scores)), **({"seconds": seconds} if self.random_state is None else {})}


def _asked(study: Any) -> Iterator[Any]:
    """Yield trials of a study until its sampler has no further points."""
    with suppress(NoTrialToAsk):
        while True:
            yield study.ask()


def _domain(name: str, given: Any, readers: dict[str, Any]) -> Any:
    """Return the hp expression of a list or of a distribution of scipy, and enter its reader. Return others as is."""
    from shadho_celery import hp
    from shadho_celery.space.schema import number

    if isinstance(given, (list, tuple, range, np.ndarray)):
        # hyperopt would copy or convert the options, so only their places are in the space.
        readers[name] = list(given).__getitem__
        return hp.choice(name, [*range(len(given))])
    if not hasattr(given, "rvs"):
        return given
    if hasattr(given, "freeze") or not hasattr(given, "support"):
        raise SearchError(f"{name!r} is no frozen distribution of one number; write for example scipy.stats.norm(0, 1)")
    law, (low, high) = given.dist.name, given.support()
    # A shifted loguniform is another law, which its median shows.
    is_log = law == "loguniform" and math.isclose(given.median(), math.sqrt(low * high))
    if is_log or law in {"uniform", "randint"}:
        return number(name, low, high, is_int=law == "randint", log=is_log).expression(name)
    readers[name] = lambda mass: (int if hasattr(given, "pmf") else float)(given.ppf(mass))
    return hp.uniform(name, TAIL, 1 - TAIL)
