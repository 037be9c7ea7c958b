"""Tree-structured Parzen estimator: draw from regions that are dense in good trials and not in bad ones.

Sources: [B] Bergstra, Bardenet, Bengio, Kégl, "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011, section 4;
[W] Watanabe, "Tree-Structured Parzen Estimator: Understanding Its Algorithm Components and Their Roles for Better
Empirical Performance", arXiv 2304.11127, section 3.

Both densities are mixtures over whole trials (the multivariate form of [W]): values that worked together are drawn
together. A trial's kernel is the product of its labels' kernels; for a label that is inactive in the trial it is the
prior's. So each is a density over the tree: a choice is drawn first, then the labels that are active under it.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import logsumexp, ndtr, ndtri

from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.samplers.failure_avoidance import FailureAvoidance
from shadho_celery.space.domains import UNIT_MASS, Array, Categorical, Continuous, Domain, Normal, RandInt
from shadho_celery.space.split import Subspace

#: results before the first guess: the most, for the whole space, and the least, for a small part of it
MOST_RANDOM, LEAST_RANDOM = 10, 5
#: the share of trials that are good, gamma in [B], linear as in [W]; and their greatest number
GOOD_SHARE, MOST_GOOD = 0.1, 25
#: bad trials that a guess looks at, for its time's sake; of more, a random part
MOST_BAD = 300
#: draws from l(x), of which the best ratio wins
CANDIDATES = 24
#: a kernel's greatest width, in units of the range; the best one on our own benchmark (tests/benchmarks/samplers.py)
WIDTH = 0.1
#: the share of a trial's mass on a choice that goes by the law and not by the trial's own option
OPTION_WIDTH = 0.2
#: the prior of a bounded law is a Gaussian as wide as the range ([W]), that of a normal law is the law itself
PRIOR_WIDTH, NORMAL_WIDTH = 1.0, 0.5 / float(ndtri((1 + UNIT_MASS) / 2))

#: a trial's values by label, None for an inactive one
_Key = tuple[Any, ...]
_TINY = np.finfo(float).tiny


class TpeSampler:
    """TPE within one subspace. Failed and pruned trials count as bad, and so do pending ones."""

    adaptive = True

    def __init__(
        self,
        subspace: Subspace,
        entropy: Sequence[int],
        *,
        startup: int | None = None,
        candidates: int = CANDIDATES,
        gamma: float | None = None,
    ) -> None:
        """`startup` results of the whole space come before the first guess, for which `candidates` are drawn.

        With `gamma` the number of good trials is that of [B]'s authors' program: gamma times the root of all trials.
        """
        self._subspace = subspace
        self._entropy = tuple(entropy)
        self._count, self._gamma = candidates, gamma
        self._axes = {label: _axis(domain) for label, domain in subspace.domains.items()}
        self._random = min(MOST_RANDOM, max(LEAST_RANDOM, round(2 * MOST_RANDOM * subspace.probability)))
        if startup is not None:
            self._random = max(1, round(startup * subspace.probability))
        #: (loss, order of telling, values, NaN for inactive labels), the least loss first
        self._told: list[tuple[float, int, list[float]]] = []
        self._successes = 0
        self._avoidance = FailureAvoidance(subspace)
        self._tried: set[_Key] = set()
        #: trials told, cancelled ones included
        self._count_told = 0

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        first = self._count_told + len(pending)
        can_guess = self._axes and len(self._told) >= self._random
        # The keys of trials without a result, those that are asked for here included.
        waiting = dict.fromkeys(self._key(trial.params) for trial in pending) if can_guess else {}
        asked = []
        for index in range(first, first + n):
            generator = np.random.default_rng([*self._entropy, index])
            params = self._guess(generator, waiting) if can_guess else self._avoidance.draw(generator)
            waiting[self._key(params)] = None
            asked.append(params)
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self._count_told += 1
            if trial.state is not TrialState.CANCELLED:
                self._learn(trial)

    def _learn(self, trial: Trial) -> None:
        key = self._key(trial.params)
        self._avoidance.tell(trial, guessed=len(self._told) >= self._random)
        loss = math.inf  # a failed trial is worse than any other, so that regions that fail are left
        if trial.state is TrialState.COMPLETE and trial.loss is not None and not math.isnan(trial.loss):
            loss = float(trial.loss)
            self._successes += 1
        insort(self._told, (loss, len(self._told), _row(key)))
        self._tried.add(key)

    def _key(self, params: Params) -> _Key:
        return tuple(params.get(label) for label in self._axes)

    def _guess(self, generator: np.random.Generator, waiting: Mapping[_Key, None]) -> Params:
        """Return the candidate of greatest l / g, and so of greatest expected improvement ([B], equation 3).

        The terms for failures are added to its logarithm. `waiting` are the keys of the pending trials.
        """
        good, bad = self._split(generator, waiting)
        candidates = self._candidates(good, generator)
        points = np.array([_row(self._key(params)) for params in candidates])
        ratios = self._log_density(good, points) - self._log_density(bad, points)
        worth = ratios + self._avoidance.weights(candidates, generator)
        best_first = [candidates[place] for place in np.argsort(-worth, kind="stable")]
        # Params that were tried or are pending are not tried again while there are others.
        fresh = (p for p in best_first if (key := self._key(p)) not in self._tried and key not in waiting)
        return next(fresh, best_first[0])

    def _split(self, generator: np.random.Generator, waiting: Mapping[_Key, None]) -> tuple[Array, Array]:
        """Return the values of good and of bad trials ([B], equation 2), each of shape (trials, labels)."""
        rows = [row for _, _, row in self._told]
        share = GOOD_SHARE * len(rows) if self._gamma is None else self._gamma * math.sqrt(len(rows))
        count = min(math.ceil(share), MOST_GOOD, self._successes)
        # Pending trials count as bad, so that many slots do not all get the same point.
        pending = [_row(key) for key in list(waiting)[-MOST_BAD:]]
        bad, room = rows[count:], MOST_BAD - len(pending)
        if len(bad) > room:
            bad = [bad[place] for place in generator.choice(len(bad), room, replace=False)]
        prior = [math.nan] * len(self._axes)  # a trial with nothing known
        return np.array([*rows[:count], prior]), np.array([*bad, *pending, prior])

    def _candidates(self, rows: Array, generator: np.random.Generator) -> list[Params]:
        """Draw from the mixture over `rows`: all labels of one draw from one row's kernel."""
        picks = generator.integers(len(rows), size=self._count)
        axes, narrowing = enumerate(self._axes.values()), _narrowing(rows)
        drawn = [axis.draw(rows[:, place], narrowing, picks, generator).tolist() for place, axis in axes]
        candidates: list[Params] = []
        for values in zip(*drawn, strict=True):
            params = {**self._subspace.fixed, **dict(zip(self._axes, values, strict=True))}
            candidates.append({label: params[label] for label in self._subspace.space.active(params)})
        return candidates

    def _log_density(self, rows: Array, points: Array) -> Array:
        """Return the logarithm of the mixture over `rows` at each of `points`, shape (points,)."""
        narrowing = _narrowing(rows)
        kernels = np.zeros((len(points), len(rows)))
        for place, axis in enumerate(self._axes.values()):
            active = np.flatnonzero(~np.isnan(points[:, place]))
            if not len(active):
                continue
            kernels[active] += axis.log_kernels(points[active, place], rows[:, place], narrowing)
        return np.asarray(logsumexp(kernels, axis=1) - math.log(len(rows)))


def _row(key: _Key) -> list[float]:
    return [math.nan if value is None else float(value) for value in key]


def _narrowing(rows: Array) -> Array:
    """Return the factor on each row's widths: narrower with more trials, less so with more labels (Scott's rule)."""
    labels = np.count_nonzero(~np.isnan(rows), axis=1)
    return np.asarray(float(len(rows)) ** (-1.0 / (labels + 4)))


class _Options:
    """A choice: a trial's kernel is its own option, with a part of the law mixed in."""

    def __init__(self, domain: Categorical) -> None:
        self._domain = domain
        law = np.array(domain.probabilities)
        # By option: the law, and the kernel of a trial with this option and with another one. Not a kernel for every
        # pair of options: of 10,000 options these would take gigabytes.
        masses = law, (1 - OPTION_WIDTH) + OPTION_WIDTH * law, OPTION_WIDTH * law
        self._law, self._own, self._other = (np.log(np.maximum(each, _TINY)) for each in masses)

    def draw(self, centres: Array, narrowing: Array, picks: Array, generator: np.random.Generator) -> Array:
        own = centres[picks]
        leaves = np.isnan(own) | (generator.random(len(own)) < OPTION_WIDTH)
        by_law = self._domain.sample(generator, len(own))
        return np.where(leaves, by_law, np.nan_to_num(own)).astype(np.int64)

    def log_kernels(self, values: Array, centres: Array, narrowing: Array) -> Array:
        options = values.astype(np.int64)[:, None]
        known = np.where(options == centres, self._own[options], self._other[options])
        return np.where(np.isnan(centres), self._law[options], known)


class _Line:
    """A numeric law: Gaussians in the unscaled variable, cut off at the ends of its range, which is [0, 1] here.

    There is one kernel for each of `centres`, the trials' values, NaN if the label is inactive.
    """

    def __init__(self, domain: Continuous | RandInt) -> None:
        self._domain = domain
        self._prior_width = NORMAL_WIDTH if isinstance(domain, Normal) else PRIOR_WIDTH

    def draw(self, centres: Array, narrowing: Array, picks: Array, generator: np.random.Generator) -> Array:
        """Draw a value from each of the kernels at the places `picks`."""
        means, sigmas = (each[picks] for each in self._gaussians(centres, narrowing))
        low, high = ndtr(-means / sigmas), ndtr((1 - means) / sigmas)
        units = means + sigmas * ndtri(low + generator.random(len(means)) * (high - low))
        return self._from_unit(np.clip(units, 0.0, 1.0))

    def log_kernels(self, values: Array, centres: Array, narrowing: Array) -> Array:
        """Return the logarithms of the kernels' densities, or masses, at `values`; shape (values, centres)."""
        means, sigmas = self._gaussians(centres, narrowing)
        inside = ndtr((1 - means) / sigmas) - ndtr(-means / sigmas)
        if (cells := self._cells(values)) is not None:  # a grid's value has the mass of all that is rounded to it
            low, high = (ndtr(np.subtract.outer(edges, means) / sigmas) for edges in cells)
            return np.asarray(np.log(np.maximum((high - low) / inside, _TINY)))
        distances = np.subtract.outer(self._to_unit(values), means) / sigmas
        return np.asarray(-0.5 * distances**2 - np.log(sigmas * inside * math.sqrt(2 * math.pi)))

    def _gaussians(self, centres: Array, narrowing: Array) -> tuple[Array, Array]:
        """Return means and standard deviations; the prior's for a missing value."""
        known = ~np.isnan(centres)
        means, sigmas = np.full(len(centres), 0.5), np.full(len(centres), self._prior_width)
        if known.any():
            means[known] = own = self._to_unit(centres[known])
            # The spread of the trials, the prior's 1/12 counted as one of them: so it stays above 0.
            spread = math.sqrt((float(((own - own.mean()) ** 2).sum()) + 1 / 12) / (len(own) + 1))
            sigmas[known] = min(spread, WIDTH) * narrowing[known]
            if (cells := self._cells(centres[known])) is not None:  # wide enough to reach the next value
                sigmas[known] = np.maximum(sigmas[known], (cells[1] - cells[0]) / 2)
        return means, sigmas

    def _to_unit(self, values: Array) -> Array:
        if isinstance(self._domain, RandInt):  # each value has an equal part of [0, 1]
            return (values - self._domain.first + 0.5) / self._domain.count
        return self._domain.to_unit(values)

    def _from_unit(self, units: Array) -> Array:
        return self._domain.quantile(units) if isinstance(self._domain, RandInt) else self._domain.from_unit(units)

    def _cells(self, values: Array) -> tuple[Array, Array] | None:
        """Return the ends of the cells that are rounded to each of these values; None if nothing is rounded."""
        half = 0.5 if isinstance(self._domain, RandInt) else (self._domain.step or 0.0) / 2
        return (self._to_unit(values - half), self._to_unit(values + half)) if half else None


def _axis(domain: Domain) -> _Options | _Line:
    if isinstance(domain, Categorical):
        return _Options(domain)
    assert isinstance(domain, (Continuous, RandInt))
    return _Line(domain)
