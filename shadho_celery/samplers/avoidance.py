"""Models of failing params: samplers avoid params that would probably fail, and placement classes with too little
memory.

A `FailureModel` predicts the probability of an outcome, such as a failure, from the params of finished trials. It is a
Gaussian process classifier at its mode. The log odds are a sum of functions of single labels and of pairs of labels.
Therefore a bad option of one label is found as fast among ten labels as among three. A limit on the product of two
labels is found, too. Source: Rasmussen, Williams, "Gaussian Processes for Machine Learning", 2006, algorithms 3.1 and
3.2.

`FailureAvoidance` multiplies the expected improvement by the probability that a trial succeeds. Sources: Gardner,
Kusner, Xu, Weinberger, Cunningham, "Bayesian Optimization with Inequality Constraints", ICML 2014, and Gelbart, Snoek,
Adams, "Bayesian Optimization with Unknown Constraints", UAI 2014. We added a limit: a few trials may ignore the model,
to test whether a region still fails, as long as there are fewer failures than in random search.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import scipy

from shadho_celery.core.system import one_blas_thread
from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.space.domains import Domain
from shadho_celery.space.features import Array, features, likeness
from shadho_celery.space.split import Subspace

#: prior variances in the log odds: of the constant, of the sum over single labels, and of the sum over pairs of labels
LEVEL, SINGLE, PAIR = 4.0, 100.0, 50.0
#: maximum number of Newton steps, and step size below which the mode is reached
STEPS, SMALL_STEP = 30, 1e-3
#: number of trials that are kept after a fit; and maximum number of trials including those since the fit. So a fit
#: takes a millisecond or two, and linear algebra libraries use no threads for it
MEMORY, MOST = 50, 60
#: a trial with a smaller effect on the log odds, which is at most 1, adds little information
LITTLE_PULL = 0.05
#: a new fit is made after each trial with the outcome, and when the number of trials has grown by this fraction
GROWTH = 0.1
#: prior probability that a trial runs out of memory on a class, used once a first trial has run out of memory
TOO_LARGE = 0.1
#: number of latest trials from which the model of a new compute class learns
LOG = 200


class FailureModel:
    """Predicts the probability of an outcome, such as a failure, from the params of one subspace. It is fitted when
    needed.
    """

    def __init__(self, domains: Mapping[str, Domain], prior: float) -> None:
        """`prior` is the probability of the outcome before there are trials."""
        self._domains = domains
        self._is_numeric = [domain.is_numeric for domain in domains.values()]
        #: prior mean of the log odds
        self._level = math.log(prior / (1.0 - prior))
        self._params: list[Params] = []
        self._outcomes: list[bool] = []
        #: features of the trials in the last fit, and the effect of each of them on the log odds
        self._fitted: tuple[Array, Array] = np.empty((0, len(domains))), np.empty(0)
        #: True once a trial has had the outcome
        self.any = False
        self._new = 0
        self._due = False

    def tell(self, params: Params, outcome: bool) -> None:
        """Learn from an ended trial. `outcome` is True if it had the outcome."""
        self._params.append({**params})
        self._outcomes.append(outcome)
        self.any |= outcome
        self._new += 1
        self._due |= outcome or self._new > GROWTH * len(self._params)
        if len(self._params) > MOST:
            self._fit() if self.any else self._forget(np.ones(len(self._params)))

    def chances(self, params_list: Sequence[Params]) -> Array:
        """Return the probability of the outcome for n sets of params, shape (n,). It is 0 until a trial has had the
        outcome.
        """
        if not self.any:
            return np.zeros(len(params_list))
        if self._due:
            self._fit()
        rows, pulls = self._fitted
        return np.asarray(scipy.special.expit(self._level + self._kernel(self._features(params_list), rows) @ pulls))

    def _features(self, params_list: Sequence[Params]) -> Array:
        return features(params_list, self._domains, inactive=math.nan)

    @one_blas_thread()
    def _fit(self) -> None:
        """Find the mode by Newton's method.

        The effect of a trial, from -1 to 1, is small if its outcome was expected.
        """
        rows, values = self._features(self._params), np.array(self._outcomes).astype(float)
        kernel = self._kernel(rows, rows)
        odds = pulls = np.zeros(len(rows))
        for _ in range(STEPS):
            chances = scipy.special.expit(self._level + odds)
            roots = np.sqrt(chances * (1.0 - chances))
            target = roots**2 * odds + values - chances
            factor = scipy.linalg.cho_factor(np.eye(len(rows)) + roots[:, None] * kernel * roots, lower=True)
            pulls = target - roots * scipy.linalg.cho_solve(factor, roots * (kernel @ target))
            step = kernel @ pulls - odds
            odds = odds + step
            if np.abs(step).max(initial=0.0) < SMALL_STEP:
                break
        self._fitted = rows, pulls
        self._new, self._due = 0, False
        self._forget(np.abs(pulls))

    def _kernel(self, left: Array, right: Array) -> Array:
        """Return the covariances of the log odds, shape (left, right): a constant plus single labels plus pairs of
        labels.
        """
        single, pairs = likeness(left, right, self._is_numeric)
        return LEVEL + SINGLE * single + PAIR * pairs

    def _forget(self, pulls: Array) -> None:
        """Drop the trials with the least effects until MEMORY are left.

        If all trials have an effect, the oldest ones are dropped, so that the ratio of outcomes stays about the same.
        """
        kept = list(range(len(pulls)))
        while len(kept) > MEMORY:
            least = int(pulls[kept].argmin())
            kept.pop(least if pulls[kept[least]] < LITTLE_PULL else 0)
        self._params = [self._params[place] for place in kept]
        self._outcomes = [self._outcomes[place] for place in kept]


class MemoryBound:
    """Predicts the probability that params of one subspace run out of memory on a class, without knowing bytes.

    A trial that is too large for a class is too large for all smaller classes. A trial that fits a class fits all
    larger classes.
    """

    def __init__(self, domains: Mapping[str, Domain]) -> None:
        self._domains = domains
        #: latest trials: params, class, and True if the trial ran out of memory there
        self._log: deque[tuple[Params, str, bool]] = deque(maxlen=LOG)
        self._told = 0
        #: True once a trial has run out of memory
        self._any = False
        #: by a class with all larger classes, and the class with all smaller ones: the model of the class, and the
        #: number of trials from which it has learned
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[FailureModel, int]] = {}

    def tell(self, params: Params, compute_class: str, *, fits: bool) -> None:
        """Learn from a trial. `fits` is False if it ran out of memory on `compute_class`."""
        self._log.append((params, compute_class, not fits))
        self._told += 1
        self._any |= not fits

    def chance(self, params: Params, compute_class: str, classes_by_memory: Sequence[str]) -> float:
        """Return the probability that params run out of memory on a class. `classes_by_memory` start with the smallest.

        The probability is 0 until a trial has run out of memory on this class or a larger one.
        """
        if not self._any:
            return 0.0
        return float(self._model(compute_class, classes_by_memory).chances([params])[0])

    def _model(self, compute_class: str, classes_by_memory: Sequence[str]) -> FailureModel:
        """Return the model of a class, after it has learned from the new trials."""
        order = tuple(classes_by_memory) if compute_class in classes_by_memory else (compute_class,)
        place = order.index(compute_class)
        upwards, downwards = order[place:], order[: place + 1]
        model, read = self._known.get((upwards, downwards)) or (FailureModel(self._domains, TOO_LARGE), 0)
        new = min(self._told - read, len(self._log))
        for params, name, too_large in islice(self._log, len(self._log) - new, None):
            if name in (upwards if too_large else downwards):
                model.tell(params, too_large)
        self._known[upwards, downwards] = model, self._told
        return model


#: prior probability that a trial fails, used once a first trial has failed
FAILS = 0.2
#: number of draws from the prior. One by one, each is accepted with its probability of success, and the first accepted
#: one is chosen. If none is accepted, the one with the highest probability is chosen
DRAWS = 32
#: proposals may ignore failures until there are this fraction of the failures that random search would have had. So
#: regions beyond failing ones are reached, but slowly
BOLD = 0.3
#: least probability of success that is used
_LEAST = 1e-9

#: maximum number of failed trials, and of other trials, from which the model learns at a time
LATEST = 100


class FailureAvoidance:
    """Lets a sampler avoid params of a subspace that are likely to fail. It has no effect before the first failure."""

    def __init__(self, subspace: Subspace) -> None:
        self._failures = FailureModel(subspace.domains, FAILS)
        #: params of the trials that have finished since the last proposal, each with True if the trial failed
        self._untold: list[tuple[Params, bool]] = []
        #: number of finished trials that a model had proposed, and number of these that failed
        self._guessed = self._failed = 0

    def tell(self, trial: Trial, guessed: bool) -> None:
        """Record a finished trial. `guessed` is True if a model has proposed it."""
        failed = trial.state is TrialState.FAILED
        self._untold.append((trial.params, failed))
        if guessed:
            self._guessed += 1
            self._failed += failed

    @property
    def any(self) -> bool:
        """True once a trial has failed."""
        self._learn()
        return self._failures.any

    def draw(self, generator: np.random.Generator, subspace: Subspace) -> Params:
        """Return a draw from the prior of a subspace. Draws that are likely to fail are accepted less often."""
        if not self.any:
            return subspace.sample(generator, 1)[0]
        draws = subspace.sample(generator, DRAWS)
        chances = self._failures.chances(draws)
        taken = np.flatnonzero(generator.random(DRAWS) >= chances)
        return draws[int(taken[0]) if len(taken) else int(chances.argmin())]

    def weights(self, candidates: Sequence[Params], generator: np.random.Generator, subspace: Subspace) -> Array:
        """Return terms for failures, shape (n,), to be added to the log expected improvement of n candidates.

        The candidates are from `subspace`.
        """
        weights = np.zeros(len(candidates))
        if not self.any:
            return weights
        usual = float(self._failures.chances(subspace.sample(generator, DRAWS)).mean())
        random_failures = usual * self._guessed
        if self._failed + 1 > BOLD * random_failures:
            chances = self._failures.chances(candidates)
            weights = np.log(np.maximum(1.0 - chances, _LEAST))
            safe = chances <= usual
            if self._failed > random_failures and safe.any():
                weights = np.where(safe, weights, -np.inf)
        return weights

    def _learn(self) -> None:
        """Learn from the trials since the last call.

        If there are many, as after a resumption, only the latest failed and the latest other trials are used.
        """
        counts = [0, 0]
        kept: list[tuple[Params, bool]] = []
        for params, failed in reversed(self._untold):
            counts[failed] += 1
            if counts[failed] <= LATEST:
                kept.append((params, failed))
        for params, failed in reversed(kept):
            self._failures.tell(params, failed)
        self._untold.clear()
