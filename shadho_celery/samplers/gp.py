"""Bayesian optimisation with a Gaussian process: propose the params with the greatest expected improvement.

Sources: Jones, Schonlau, Welch, "Efficient Global Optimization of Expensive Black-Box Functions", 1998. Its logarithm,
which has slopes everywhere, is from Ament, Daulton, Eriksson, Balandat, Bakshy, "Unexpected Improvements to Expected
Improvement for Bayesian Optimization", NeurIPS 2023. Constraints: see `gaussian_process`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, log_ndtr
from threadpoolctl import ThreadpoolController

from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.predictors.features import features
from shadho_celery.samplers.base import Learner
from shadho_celery.samplers.failure_avoidance import FailureAvoidance
from shadho_celery.samplers.gaussian_process import ConstraintModel, GaussianProcess
from shadho_celery.samplers.qmc import QmcSampler
from shadho_celery.space.domains import UNIT_MASS, Domain
from shadho_celery.space.split import Key, Subspace

Array = NDArray[np.float64]

#: number of results before the model proposes: for the whole space (maximum), and for a small subspace (minimum)
MOST_RANDOM, LEAST_RANDOM = 10, 4
#: maximum number of trials from which the process learns, the best third and the latest others; and maximum number of
#: cells in the matrices of the labels, which may reduce it
MOST, CELLS = 300, 2**22
#: number of latest failed trials that count as observed, so that nothing is proposed near them
MOST_FAILED = 50
#: a new fit is made when the results have grown by this factor
GROWTH = 1.1
#: candidates: number of draws from the prior; number of best trials; and for each of these, number of points near it
#: for each of the widths
DRAWS, NEAR, EACH, WIDTHS = 400, 5, 10, (0.2, 0.05, 0.01, 0.001)
#: maximum effect of a bad loss, in distances of the best loss from the median
FAR = 4.0
#: log probability above which a known trial counts as feasible
LIKELY = math.log(0.5)
#: fraction of the labels that a step moves; at least one label moves
MOVED = 0.3
#: a label hardly matters if another value lowers the log improvement by less than this
LITTLE = 0.05
#: number of best candidates from which a local maximisation starts, and its maximum number of steps
CLIMBS, CLIMB_STEPS = 4, 40


class GpSampler(Learner):
    """Bayesian optimisation within one subspace. From failed trials it learns only where trials fail."""

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        self._domains: Mapping[str, Domain] = subspace.domains
        self._random = min(MOST_RANDOM, max(LEAST_RANDOM, round(2 * MOST_RANDOM * subspace.probability)))
        is_numeric = [domain.is_numeric for domain in self._domains.values()]
        self._process, self._constraints = GaussianProcess(is_numeric), ConstraintModel(is_numeric)
        continuous = [each.is_numeric and each.cardinality(UNIT_MASS) is None for each in self._domains.values()]
        self._climbed = np.array(continuous, dtype=bool)
        self._sequence = QmcSampler(subspace, entropy)
        self._avoidance = FailureAvoidance(subspace)
        self._rows: list[Array] = []
        self._losses = array("d")
        #: for each of them, 1 if its trial was pruned, and 1 if it violated a constraint
        self._pruned, self._broken = array("b"), array("b")
        #: constraints of the trials with these losses
        self._told_constraints: list[Mapping[str, float]] = []
        self._failed: list[Params] = []
        #: number of results to which the process was fitted; and number that it has learned, -1 if it must learn again
        self._fitted, self._learned = 0, -1

    @property
    def is_started(self) -> bool:
        """True once there are enough results for a proposal by the model."""
        return len(self._losses) >= self._random

    @property
    def r_squared(self) -> float | None:
        """Leave-one-out R² of the process; None before its first proposal."""
        if not self._domains or not self.is_started:
            return None
        with _threads().limit(limits=1, user_api="blas"):
            self._learn_history()
            return self._process.r_squared

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        if not self._domains or not self.is_started:
            return [self._start(place) for place in self._places(n, pending)]
        with _threads().limit(limits=1, user_api="blas"):
            return self._guesses(n, pending)

    def _guesses(self, n: int, pending: Collection[Trial]) -> list[Params]:
        self._learn_history()
        waiting = [trial.params for trial in pending]
        # The losses of failed and pending trials are not known, and repeating these trials adds no information.
        unknown = [*self._failed[-MOST_FAILED:], *waiting[-MOST:]]
        if unknown:
            self._suppose(unknown)
        taken = {self._subspace.key(params) for params in waiting}
        asked: list[Params] = []
        for place in self._places(n, pending):
            params = self._guess(self._generator(place), taken)
            asked.append(params)
            taken.add(self._subspace.key(params))
            if len(asked) < n:
                self._suppose([params])
        return asked

    def _learn(self, trial: Trial) -> None:
        self._avoidance.tell(trial, guessed=self.is_started)
        if trial.state is TrialState.FAILED:
            self._failed.append(trial.params)
        loss = trial.outcome.loss
        if loss is not None and not math.isnan(loss):
            self._rows.append(self._features([trial.params])[0])
            self._losses.append(float(loss))
            self._pruned.append(trial.state is TrialState.PRUNED)
            self._broken.append(trial.outcome.violation > 0)
            self._told_constraints.append(trial.outcome.constraints)

    def _start(self, place: int) -> Params:
        """Return the centre at place 0, then quasi-random points.

        Once trials have failed, return a draw that is unlikely to fail.
        """
        if self._avoidance.any:
            return self._avoidance.draw(self._generator(place))
        return self._sequence.centre() if place == 0 else self._sequence.point(place)

    def _learn_history(self) -> None:
        """Fit the process to the history if it has grown enough, then learn all of it.

        Fits use the first trials of the history, in fixed numbers, so a resumed study makes the same fits.
        """
        while (number := max(self._fitted + 1, math.ceil(GROWTH * self._fitted))) <= len(self._losses):
            number = max(number, self._random)
            rows, losses, told = self._history(number)
            self._process.fit(rows, losses)
            self._constraints.learn(rows, told, fit=True)
            self._fitted = number
        if self._learned != len(self._losses):
            rows, losses, told = self._history(len(self._losses))
            self._process.learn(rows, losses)
            self._constraints.learn(rows, told, fit=False)
            self._learned = len(self._losses)

    def _suppose(self, params_list: Sequence[Params]) -> None:
        self._process.suppose(self._features(params_list))
        self._learned = -1

    def _history(self, number: int) -> tuple[Array, Array, list[Mapping[str, float]]]:
        """Return rows, standardised losses and constraints of the first `number` results.

        Of too many results, only the best and the latest are used. Among the best, feasible ones come first.
        """
        losses = np.frombuffer(self._losses)[:number]
        pruned = np.frombuffer(self._pruned, np.bool_)[:number]
        if pruned.any() and not pruned.all():
            # The loss of a pruned trial is from the beginning of its training, and was among the worse ones there.
            losses = np.where(pruned, np.maximum(losses, np.median(losses[~pruned])), losses)
        most = min(MOST, math.isqrt(CELLS // len(self._domains)))
        kept: Sequence[int] = range(number)
        if number > most:
            best = {*_least(losses, np.frombuffer(self._broken, np.bool_)[:number], most // 3).tolist()}
            latest = (place for place in reversed(range(number)) if place not in best)
            kept = sorted([*best, *islice(latest, most - len(best))])
        rows = np.array([self._rows[place] for place in kept])
        return rows, standardised(losses[kept]), [self._told_constraints[place] for place in kept]

    def _guess(self, generator: np.random.Generator, taken: set[Key]) -> Params:
        order, best = self._known()
        candidates, rows = self._candidates(generator, self._process.rows[order[:NEAR]])
        worth = self._worth(rows, best) + self._avoidance.weights(candidates, generator)
        order = np.argsort(-worth, kind="stable")
        climbed: list[tuple[float, Params]] = []
        if self._climbed.any():
            for place in order[:CLIMBS]:
                params = self._climb(candidates[place], rows[place], best)
                value = self._worth(self._features([params]), best) + self._avoidance.weights([params], generator)
                climbed.append((float(value[0]), params))
        climbed += [(float(worth[place]), candidates[place]) for place in order]
        climbed.sort(key=lambda each: -each[0])
        most, params = next((each for each in climbed if self._is_new(each[1], taken)), climbed[0])
        return self._spread(params, most, best, generator)

    def _spread(self, params: Params, value: float, best: float | None, generator: np.random.Generator) -> Params:
        """Return the params, with worth `value`, with a new draw of those labels that hardly affect it.

        Otherwise many trials in a row would get the same value of such a label. Spread over its distribution they teach
        more, and machines with different costs by such a label all find suitable trials.
        """
        draw = self._subspace.sample(generator, 1)[0]
        # Not the options, which may activate other labels.
        numbers = (label for label, domain in self._domains.items() if domain.is_numeric)
        labels = [label for label in numbers if label in params and label in draw]
        if not labels:
            return params

        def worth(several: Sequence[Params]) -> Array:
            return self._worth(self._features(several), best) + self._avoidance.weights(several, generator)

        found = worth([{**params, label: draw[label]} for label in labels])
        free = [label for label, each in zip(labels, found, strict=True) if each > value - LITTLE]
        spread = {**params, **{label: draw[label] for label in free}}
        return spread if worth([spread])[0] > value - LITTLE else params

    def _known(self) -> tuple[NDArray[np.intp], float | None]:
        """Return the indexes of the known rows, the best first, and the loss to improve; None if no row is feasible."""
        means, _ = self._process.predict(self._process.rows)
        if not self._constraints.any:
            return np.argsort(means, kind="stable"), float(means.min())
        chances = self._constraints.log_chances(self._process.rows)
        feasible = chances >= LIKELY
        if not feasible.any():
            return np.argsort(-chances, kind="stable"), None
        return np.lexsort((means, ~feasible)), float(means[feasible].min())

    def _worth(self, rows: Array, best: float | None) -> Array:
        """Return the log of the expected improvement times the probability of being feasible.

        If `best` is None, return the log of that probability alone.
        """
        chances = self._constraints.log_chances(rows)
        if best is None:
            return chances
        means, deviations = self._process.predict(rows)
        return log_improvement((best - means) / deviations) + np.log(deviations) + chances

    def _candidates(self, generator: np.random.Generator, best: Array) -> tuple[list[Params], Array]:
        """Return candidates and their features: draws from the prior, and the `best` trials with some labels moved."""
        centres = np.repeat(best, EACH * len(WIDTHS), axis=0)
        widths = np.tile(np.repeat(WIDTHS, EACH), len(best))
        moved = generator.random(centres.shape) < max(MOVED, 1.0 / centres.shape[1])
        moved[np.arange(len(moved)), generator.integers(centres.shape[1], size=len(moved))] = True
        steps = np.where(moved, widths[:, None] * generator.normal(size=centres.shape), 0.0)
        columns = []
        for column, domain in enumerate(self._domains.values()):
            # A label that another option activates gets a value from its distribution.
            values = domain.sample(generator, len(centres))
            kept = ~np.isnan(centres[:, column])
            if not domain.is_numeric:
                kept &= ~moved[:, column]
            values[kept] = domain.from_unit(centres[kept, column] + domain.is_numeric * steps[kept, column])
            columns.append(values.tolist())
        near = [
            {**self._subspace.fixed, **dict(zip(self._domains, row, strict=True))} for row in zip(*columns, strict=True)
        ]
        active = self._subspace.space.active
        candidates: list[Params] = [
            *self._subspace.sample(generator, DRAWS),
            *({label: each[label] for label in active(each)} for each in near),
        ]
        return candidates, self._features(candidates)

    def _climb(self, params: Params, row: Array, best: float | None) -> Params:
        """Return the params at the local maximum of the improvement near the given ones, moving continuous labels."""
        from scipy.optimize import minimize  # slow to import, and not every search needs it

        moved = self._climbed & ~np.isnan(row)
        if not moved.any():
            return params

        def cost(values: Array) -> tuple[float, Array]:
            at = row.copy()
            at[moved] = values
            chance, by_chance = self._constraints.slopes(at)
            if best is None:
                return -chance, -by_chance[moved]
            mean, deviation, by_mean, by_deviation = self._process.slopes(at)
            z = np.array([(best - mean) / deviation])
            level = float(log_improvement(z)[0])
            # Derivatives of log(deviation h(z)), where h' is the Gaussian distribution and h - z h' its density.
            below = math.exp(float(log_ndtr(z[0])) - level)
            density = math.exp(-0.5 * float(z[0]) ** 2 - 0.5 * math.log(2 * math.pi) - level)
            slope = (-below * by_mean + density * by_deviation) / deviation
            return -level - math.log(deviation) - chance, -(slope + by_chance)[moved]

        found = minimize(
            cost, row[moved], jac=True, method="L-BFGS-B", bounds=[(0.0, 1.0)] * int(moved.sum()),
            options={"maxiter": CLIMB_STEPS},
        )  # fmt: skip
        climbed = {**params}
        units = iter(found.x.tolist())
        for label, domain, moves in zip(self._domains, self._domains.values(), moved, strict=True):
            if moves:
                climbed[label] = domain.from_unit([next(units)]).tolist()[0]
        return climbed

    def _features(self, params_list: Sequence[Params]) -> Array:
        return features(params_list, self._domains, inactive=math.nan)


def _least(losses: Array, broken: NDArray[np.bool_], most: int) -> NDArray[np.intp]:
    """Return the indexes of the `most` least losses. Trials with a `broken` constraint come after the others."""
    feasible = np.flatnonzero(~broken)
    if len(feasible) <= most:
        return np.lexsort((losses, broken))[:most]
    # Only those up to the greatest of them are sorted.
    best = feasible[losses[feasible] <= np.partition(losses[feasible], most - 1)[most - 1]]
    ordered: NDArray[np.intp] = best[np.argsort(losses[best], kind="stable")][:most]
    return ordered


@cache
def _threads() -> ThreadpoolController:
    """Return the controller that limits the threads of linear algebra libraries: several would wait for each other."""
    return ThreadpoolController()


def standardised(losses: Array) -> Array:
    """Return losses with mean 0 and variance 1, in which bad losses are closer together.

    If a loss is further above the median than the best is below it, the distance counts by its logarithm, up to FAR. A
    loss of 1e9 would otherwise hide all differences between the others.
    """
    finite = np.abs(losses[np.isfinite(losses)])
    # In units of the largest, because a difference of losses of 1e308 overflows.
    losses = np.nan_to_num(losses / (float(finite.max(initial=0.0)) or 1.0), posinf=1.0, neginf=-1.0)
    middle, best = float(np.median(losses)), float(losses.min())
    worse = losses[losses > best] - best
    scale = middle - best or (float(np.median(worse)) if len(worse) else 1.0)
    distances = np.minimum((losses - middle) / scale, 1e300)
    distances = np.where(distances > 1.0, np.minimum(1.0 + np.log(np.maximum(distances, 1.0)), FAR), distances)
    spread = float(distances.std())
    return np.asarray((distances - distances.mean()) / spread if spread > 0 else np.zeros(len(distances)))


def log_improvement(z: Array) -> Array:
    """Return log(density(z) + z distribution(z)): expected improvement in standard deviations; Ament, equation 9."""
    found = np.empty_like(z)
    near = z > -1.0
    some = z[near]
    density = np.exp(-0.5 * some**2 - 0.5 * math.log(2 * math.pi))
    found[near] = np.log(density + some * np.exp(log_ndtr(some)))
    far = z[~near]
    rest = 1.0 + far * math.sqrt(math.pi / 2) * erfcx(-far / math.sqrt(2.0))
    tail = np.where(far > -1e4, np.log(np.maximum(rest, 1e-300)), -2.0 * np.log(np.maximum(-far, 1.0)))
    found[~near] = -0.5 * far**2 - 0.5 * math.log(2 * math.pi) + tail
    return found
