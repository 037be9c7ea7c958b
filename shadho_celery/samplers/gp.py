"""Bayesian optimisation with a Gaussian process: propose the params with the greatest expected improvement.

Sources: expected improvement, Jones, Schonlau, Welch, "Efficient Global Optimization of Expensive Black-Box Functions",
1998; its logarithm, whose gradient never vanishes, Ament, Daulton, Eriksson, Balandat, Bakshy, "Unexpected Improvements
to Expected Improvement for Bayesian Optimization", NeurIPS 2023. For constraints see `gaussian_process`.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import compress, islice

import numpy as np
import scipy
from numpy.typing import NDArray

from shadho_celery.core.system import one_blas_thread
from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.samplers.avoidance import FailureAvoidance
from shadho_celery.samplers.gaussian_process import ConstraintModel, GaussianProcess, Rungs
from shadho_celery.samplers.qmc import QmcSampler
from shadho_celery.samplers.random import Learner, LearnsBudgets
from shadho_celery.space.domains import UNIT_MASS, Domain
from shadho_celery.space.features import Array, features
from shadho_celery.space.split import Key, Subspace, parts_of
from shadho_celery.study.forecast import Forecast

#: number of results before the model proposes params: for the whole space; and at least, for a subspace
MOST_RANDOM, LEAST_RANDOM = 10, 4
#: maximum number of trials from which the process learns: the best ones, a third, and the latest others. With many
#: labels it is less, so that the distance matrices of all labels together have at most CELLS entries
MOST, CELLS = 300, 2**22
#: number of latest failed trials that are treated as observed, so that params near them are not proposed
MOST_FAILED = 50
#: a new fit is made when the number of results has grown by this factor
GROWTH = 1.1
#: candidates are DRAWS draws from the prior, and points near the NEAR best trials: for each of these, EACH points for
#: each of the WIDTHS
DRAWS, NEAR, EACH, WIDTHS = 400, 5, 10, (0.2, 0.05, 0.01, 0.001)
#: greatest standardised distance of a bad loss from the median, in distances of the best loss from the median
FAR = 4.0
#: a known trial counts as feasible if the log probability is at least this
LIKELY = math.log(0.5)
#: fraction of the labels that a step moves; at least one label moves
MOVED = 0.3
#: a label hardly matters if another value lowers the log improvement by less than this
LITTLE = 0.05
#: below this number of standard deviations, log improvement is computed by another formula, because the usual one
#: underflows
NEAR_Z = -1.0
#: at this expected improvement of the best loss, in standard deviations of the losses, the shares of subspaces depend
#: half on it and half on the expected improvement of each subspace's own best loss; below, more on the latter
LITTLE_LEFT = 0.01
#: number that is mixed into the seed for the candidates of an outlook
_OUTLOOK = 0x6F
#: number of best candidates from which a local maximisation starts, and its maximum number of steps
CLIMBS, CLIMB_STEPS = 4, 40
#: in a study with budgets: if the loss of this many new trials on the lowest rung has not become better, every second
#: new trial below the top is a quasi-random point, because the process may have missed a small good region
STUCK = 20
#: greatest variance of the error of a rung, where the losses have the variance 1
MOST_ERROR = 100.0
#: for quick proposals: growth between two fits, number of draws from the prior, and number of local maximisations
QUICK_GROWTH, QUICK_DRAWS, QUICK_CLIMBS = 3.0, 100, 1


#: results from which a process learns: features, shape (n, labels); standardised losses, shape (n,); and their rungs,
#: None in a study without budgets
History = tuple[Array, Array, Rungs | None]


class GpSampler(Learner, LearnsBudgets):
    """Bayesian optimisation of the whole space or a subspace.

    Failed trials only lower the chance of similar proposals. In a study with budgets, it learns from the latest result
    of each origin, as a prediction of its loss at the top with an error, see `Forecast` and `Rungs`.
    """

    def __init__(self, subspace: Subspace, entropy: Sequence[int], *, budgets: Sequence[float] = ()) -> None:
        """`budgets` are those of the rungs, the lowest first; () in a study without budgets."""
        super().__init__(subspace, entropy)
        self._budgets = [*budgets]
        #: for each loss: the origin and the rung of its trial
        self._origins: list[int] = []
        self._rungs: list[int] = []
        #: losses of new trials on the lowest rung
        self._first_losses: list[float] = []
        self._domains: Mapping[str, Domain] = subspace.domains
        self._random = min(MOST_RANDOM, max(LEAST_RANDOM, round(2 * MOST_RANDOM * subspace.probability)))
        is_numeric = [domain.is_numeric for domain in self._domains.values()]
        parts = parts_of(subspace)
        pinned = {label for part in parts for label in part.fixed} & {*self._domains}
        active = max(part.most_drawn + len(pinned & {*part.fixed}) for part in parts)
        self._constraints = ConstraintModel(is_numeric, active)
        uses = Counter(label for part in parts for label in part.domains)
        #: labels that only one branch of the space has
        self._only_here = {label for label, count in uses.items() if count == 1}
        structure = [place for place, label in enumerate(self._domains) if label in pinned]
        #: a process in which all subspaces share results, and a process in which each subspace has only its own results
        self._processes = [GaussianProcess(is_numeric, active=active)]
        if structure:
            self._processes.append(GaussianProcess(is_numeric, structure, active))
        #: the process that predicts better, which is used for proposals
        self._process: GaussianProcess = self._processes[0]
        continuous = [each.is_numeric and each.cardinality(UNIT_MASS) is None for each in self._domains.values()]
        self._climbed = np.array(continuous, dtype=bool)
        self._sequence = QmcSampler(subspace, entropy)
        self._avoidance = FailureAvoidance(subspace)
        #: features of the results; and params of the latest results, whose features are computed when needed
        self._rows: list[Array] = []
        self._new: list[Params] = []
        self._losses = array("d")
        #: for each loss, 1 if its trial was pruned; and 1 if its trial violated a constraint
        self._pruned, self._broken = array("b"), array("b")
        #: for each loss, the constraints of its trial
        self._told_constraints: list[Mapping[str, float]] = []
        self._failed: list[Params] = []
        #: True if proposals should be quick. Then fits are rarer after the first fit with at least `rare_from` results.
        #: A resumed study must make the same fits, so `rare_from` is at least the number of results before the first
        #: quick proposal
        self.is_quick, self.rare_from = False, 0
        #: latest outlook, and the number of trials told at that time
        self._outlook: Mapping[str, float] = {}
        self._looked_at = -1
        #: number of results in the latest fit; number of results that the process has learned, -1 if it must learn
        #: again
        self._fitted, self._learned = 0, -1
        #: budget of the next trial for which it has learned them
        self._learned_for: float | None = None

    @property
    def is_started(self) -> bool:
        """True once there are enough results for a proposal by the model, which needs labels."""
        return bool(self._domains) and len(self._losses) >= self._random

    @property
    def is_shared(self) -> bool:
        """True if results in one subspace change the predictions in another one."""
        return self._process is self._processes[0]

    @property
    @one_blas_thread()
    def r_squared(self) -> float:
        """Leave-one-out R² of the Gaussian process, which must have enough results."""
        self._learn_history()
        return self._process.r_squared

    def ask(self, n: int, pending: Collection[Trial], within: Subspace | None = None) -> list[Params]:
        part = within or self._subspace
        if not self.is_started:
            begun = [*self._new, *self._failed, *(trial.params for trial in pending)]
            asked: list[Params] = []
            for place in self._places(n, pending):
                asked.append(self._start(place, part, [*begun, *asked]))
            return asked
        return self._guesses(n, pending, part)

    @one_blas_thread()
    def _guesses(self, n: int, pending: Collection[Trial], part: Subspace) -> list[Params]:
        self._learn_history()
        waiting = [trial.params for trial in pending]
        # The losses of failed and pending trials are not known. They are supposed, because repeating these trials adds
        # no information.
        unknown = [*self._failed[-MOST_FAILED:], *waiting[-MOST:]]
        if unknown:
            self._suppose(unknown)
        taken = {self._subspace.key(params) for params in waiting}
        asked: list[Params] = []
        for place in self._places(n, pending):
            if place % 2 and self._is_stuck:
                params = self._sequence.point(place, part)
            else:
                params = self._guess(self._generator(place), taken, part)
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
            self._new.append(trial.params)
            self._losses.append(float(loss))
            self._origins.append(trial.number if trial.origin is None else trial.origin)
            # Trials of a warm start have no budget.
            self._rungs.append(self._budgets.index(trial.budget) if trial.budget in self._budgets else 0)
            if trial.origin is None and not self._rungs[-1]:
                self._first_losses.append(float(loss))
            self._pruned.append(trial.state is TrialState.PRUNED)
            self._broken.append(trial.outcome.violation > 0)
            self._told_constraints.append(trial.outcome.constraints)

    @property
    def _is_stuck(self) -> bool:
        """True if new trials on the lowest rung have not become better, and the next one starts below the top."""
        first = self._first_losses
        is_cheap = self._budgets and self.budget != self._budgets[-1]
        return bool(is_cheap) and len(first) > STUCK and min(first[-STUCK:]) >= min(first[:-STUCK])

    def _start(self, place: int, part: Subspace, begun: Sequence[Params]) -> Params:
        """Return the params of an initial trial: the centre of the part at place 0, then quasi-random points.

        In the first trial of a branch, labels that no other branch has are at their medians, so that the branches can
        be compared. `begun` are the params of earlier trials. Once a trial has failed, a draw that is unlikely to fail
        is returned.
        """
        if self._avoidance.any:
            return self._avoidance.draw(self._generator(place), part)
        if place == 0:
            return self._sequence.centre(part)
        is_first = part is not self._subspace and not any(map(part.contains, begun))
        return self._sequence.point(place, part, self._only_here if is_first else ())

    def _learn_history(self) -> None:
        """Fit the process to the history if it has grown enough, then learn all of it.

        Fits use the first trials of the history, in fixed numbers, so a resumed study makes the same fits.
        """
        while (number := self._next_fit()) <= len(self._losses):
            number = max(number, self._random)
            known, constraints = self._history(number)
            for process in self._processes:
                process.fit(*known)
                process.learn(*known)
            self._process = max(self._processes, key=lambda each: each.r_squared)
            self._constraints.learn(known[0], constraints, fit=True)
            # The processes have learned only the results of the fit.
            self._fitted, self._learned = number, -1
        if self._learned != len(self._losses) or self._learned_for != self.budget:
            known, constraints = self._history(len(self._losses))
            self._process.learn(*known)
            self._constraints.learn(known[0], constraints, fit=False)
            self._learned, self._learned_for = len(self._losses), self.budget

    def _next_fit(self) -> int:
        """Return the number of results to which the process will be fitted next."""
        growth = QUICK_GROWTH if self.is_quick and self._fitted >= self.rare_from else GROWTH
        return max(self._fitted + 1, math.ceil(growth * self._fitted))

    def _suppose(self, params_list: Sequence[Params]) -> None:
        self._process.suppose(self._features(params_list))
        self._learned = -1

    def _history(self, number: int) -> tuple[History, list[Mapping[str, float]]]:
        """Return what is learned from the first `number` results, and their constraints.

        If there are too many results, only the best and the latest ones are used. Feasible results count as better than
        others.
        """
        self._rows += [*self._features(self._new)]
        self._new.clear()
        losses = np.frombuffer(self._losses)[:number]
        pruned = np.frombuffer(self._pruned, np.bool_)[:number]
        if pruned.any() and not pruned.all():
            # A pruned trial was one of the worse ones early in its training, so its loss counts as at least the median
            # of complete trials.
            losses = np.where(pruned, np.maximum(losses, np.median(losses[~pruned])), losses)
        kept: Sequence[int] = range(number)
        rungs: Rungs | None = None
        if self._budgets:
            kept, losses, rungs = self._at_top(losses)
        most = min(MOST, math.isqrt(CELLS // len(self._domains)))
        if len(kept) > most:
            broken = np.frombuffer(self._broken, np.bool_)[kept]
            best = {*_least(losses[kept], broken, most // 3).tolist()}
            latest = (index for index in reversed(range(len(kept))) if index not in best)
            kept = [kept[index] for index in sorted([*best, *islice(latest, most - len(best))])]
        values = standardised(losses[kept])
        if rungs is not None:
            middle, least = np.argsort(values, kind="stable")[[len(kept) // 2, 0]]
            difference = losses[kept][middle] - losses[kept][least]
            unit = (values[middle] - values[least]) / difference if difference > 0 else 0.0
            rungs = rungs._replace(known=rungs.known[kept], errors=np.minimum(rungs.errors * unit**2, MOST_ERROR))
        rows = np.array([self._rows[place] for place in kept])
        return (rows, values, rungs), [self._told_constraints[place] for place in kept]

    def _at_top(self, losses: Array) -> tuple[list[int], Array, Rungs]:
        """Return the places of the latest result of each origin, and for all results the predicted loss at the top and
        the rung.
        """
        results: list[dict[int, float]] = [{} for _ in self._budgets]
        places: dict[int, int] = {}
        for place, loss in enumerate(losses.tolist()):
            results[self._rungs[place]][self._origins[place]] = loss
            places[self._origins[place]] = place
        forecast = Forecast(results)
        known = np.array(self._rungs[: len(losses)])
        predicted = [forecast.top_loss(rung, loss) for rung, loss in zip(known.tolist(), losses.tolist(), strict=True)]
        next_rung = self._budgets.index(self.budget) if self.budget in self._budgets else 0
        return sorted(places.values()), np.array(predicted), Rungs(known, np.array(forecast.errors), next_rung)

    def _guess(self, generator: np.random.Generator, taken: set[Key], part: Subspace) -> Params:
        order, best = self._known()
        best = self._to_improve(part, order, best)
        candidates = self._candidates(generator, self._process.rows[self._nearest(order, part)], part)
        worth = self._worth(candidates, best, generator, part)
        order = np.argsort(-worth, kind="stable")
        climbed: list[tuple[float, Params]] = []
        if self._climbed.any():
            for place in order[: QUICK_CLIMBS if self.is_quick else CLIMBS]:
                params = self._climb(candidates[place], best)
                if part.space.allows(params):
                    climbed.append((float(self._worth([params], best, generator, part)[0]), params))
        climbed += [(float(worth[place]), candidates[place]) for place in order]
        climbed.sort(key=lambda each: -each[0])
        most, params = next((each for each in climbed if self._is_new(each[1], taken)), climbed[0])
        return self._spread(params, most, best, generator, part)

    def outlook(self, parts: Sequence[Subspace], pending: int) -> Mapping[str, float]:
        """Return a weight for each part: the root of the expected improvement of its best candidate.

        If little improvement of the best loss is expected, the expected improvement of the part's own best loss counts,
        too. The process may be wrong about a part with few trials, such as a part whose good losses are in a narrow
        valley.
        """
        if not self.is_started:
            return self._sequence.outlook(parts, self._told + pending)
        if self._told != self._looked_at:
            self._looked_at, self._outlook = self._told, self._gains(parts)
        return self._outlook

    @one_blas_thread()
    def _gains(self, parts: Sequence[Subspace]) -> Mapping[str, float]:
        self._learn_history()
        generator = np.random.default_rng([*self._entropy, _OUTLOOK, self._told])
        order, best = self._known()
        found = []
        for part in parts:
            near = self._process.rows[self._nearest(order, part)]
            candidates = self._candidates(generator, near, part, DRAWS // len(parts) + EACH)
            worths = self._worths(candidates, (best, self._to_improve(part, order, best)), generator, part)
            found.append([float(worth.max()) for worth in worths])
        values, own = np.array(found).T
        even = np.array([part.probability for part in parts])
        left = math.exp(values.max())
        of_own = LITTLE_LEFT / (LITTLE_LEFT + left)
        weights = (1.0 - of_own) * _rooted(values, even) + of_own * _rooted(own, even)
        return dict(zip((part.name for part in parts), (weights / weights.max()).tolist(), strict=True))

    def _to_improve(self, part: Subspace, order: NDArray[np.intp], best: float | None) -> float | None:
        """Return the loss to improve in a part: that of its best trial, or `best` if none of its trials is feasible.

        `order` and `best` are as `_known` returns them.
        """
        if best is None or part is self._subspace:
            return best
        own = order[self._in(part, order)][:1]
        row = self._process.rows[own]
        if not own.size or (self._constraints.any and self._constraints.log_chances(row)[0] < LIKELY):
            return best
        return float(self._process.predict(row)[0][0])

    def _nearest(self, order: NDArray[np.intp], part: Subspace) -> NDArray[np.intp]:
        """Return the indexes of the rows near which candidates are drawn: the best rows of the part, and the best of
        all rows.
        """
        if part is self._subspace:
            return order[:NEAR]
        own = self._in(part, order)
        return np.concatenate([order[own][:NEAR], order[:NEAR][~own[:NEAR]]])

    def _in(self, part: Subspace, order: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return for each of the rows with these indexes whether it belongs to a part of the space."""
        rows = self._process.rows[order]
        own = np.ones(len(rows), dtype=bool)
        for column, label in enumerate(self._domains):
            if label in part.fixed:
                own &= rows[:, column] == self._domains[label].to_unit([part.fixed[label]])[0]
        return own

    def _spread(
        self, params: Params, value: float, best: float | None, generator: np.random.Generator, part: Subspace
    ) -> Params:
        """Return the params with new draws of those labels that hardly affect their worth, which is `value`.

        Otherwise many trials would get the same value of such a label. Values spread over its distribution teach more.
        If the costs on classes depend on the label, all classes find suitable trials.
        """
        draw = part.sample(generator, 1)[0]
        # Options are not redrawn, because they may activate other labels.
        numbers = (label for label, domain in part.domains.items() if domain.is_numeric)
        labels = [label for label in numbers if label in params and label in draw]
        if not labels:
            return params

        found = self._worth([{**params, label: draw[label]} for label in labels], best, generator, part)
        free = [label for label, each in zip(labels, found, strict=True) if each > value - LITTLE]
        spread = {**params, **{label: draw[label] for label in free}}
        is_as_good = self._worth([spread], best, generator, part)[0] > value - LITTLE
        return spread if is_as_good and part.space.allows(spread) else params

    def _known(self) -> tuple[NDArray[np.intp], float | None]:
        """Return the indexes of the known rows, the best first; and the best predicted loss, None if no row is
        feasible.
        """
        means, _ = self._process.predict(self._process.rows)
        if not self._constraints.any:
            return np.argsort(means, kind="stable"), float(means.min())
        chances = self._constraints.log_chances(self._process.rows)
        feasible = chances >= LIKELY
        if not feasible.any():
            return np.argsort(-chances, kind="stable"), None
        return np.lexsort((means, ~feasible)), float(means[feasible].min())

    def _worth(
        self, candidates: Sequence[Params], best: float | None, generator: np.random.Generator, part: Subspace
    ) -> Array:
        """Return the log of the expected improvement of `best` times the probability that a candidate is feasible, with
        the terms for failures.

        If `best` is None, no improvement counts.
        """
        return self._worths(candidates, (best,), generator, part)[0]

    def _worths(
        self,
        candidates: Sequence[Params],
        bests: Sequence[float | None],
        generator: np.random.Generator,
        part: Subspace,
    ) -> list[Array]:
        """Return `_worth` of the candidates for each loss of `bests`."""
        rows, avoiding = self._features(candidates), self._avoidance.weights(candidates, generator, part)
        chances = self._constraints.log_chances(rows)
        means, deviations = self._process.predict(rows)
        gains = (
            0.0 if best is None else log_improvement((best - means) / deviations) + np.log(deviations) for best in bests
        )
        return [gain + chances + avoiding for gain in gains]

    def _candidates(
        self, generator: np.random.Generator, best: Array, part: Subspace, draws: int | None = None
    ) -> list[Params]:
        """Return candidates: draws from the prior, and the trials in `best` with some labels moved.

        Of a trial in another part of the space, the labels that both parts have are used.
        """
        if not part.domains:
            return [{**part.fixed}]
        labels = [*self._domains]
        centres = np.repeat(best[:, [labels.index(label) for label in part.domains]], EACH * len(WIDTHS), axis=0)
        widths = np.tile(np.repeat(WIDTHS, EACH), len(best))
        moved = generator.random(centres.shape) < max(MOVED, 1.0 / centres.shape[1])
        moved[np.arange(len(moved)), generator.integers(centres.shape[1], size=len(moved))] = True
        steps = np.where(moved, widths[:, None] * generator.normal(size=centres.shape), 0.0)
        columns = []
        for column, domain in enumerate(part.domains.values()):
            # Labels that the best trial lacks get values from their distributions.
            values = domain.sample(generator, len(centres))
            kept = ~np.isnan(centres[:, column])
            if not domain.is_numeric:
                kept &= ~moved[:, column]
            values[kept] = domain.from_unit(centres[kept, column] + domain.is_numeric * steps[kept, column])
            columns.append(values.tolist())
        near = [{**part.fixed, **dict(zip(part.domains, row, strict=True))} for row in zip(*columns, strict=True)]
        active = part.active
        return [
            *part.sample(generator, draws or (QUICK_DRAWS if self.is_quick else DRAWS)),
            *part.space.allowed({label: each[label] for label in active(each)} for each in near),
        ]

    def _climb(self, params: Params, best: float | None) -> Params:
        """Return the params at a local maximum of the worth near the given params.

        Only continuous labels are changed.
        """
        from scipy.optimize import minimize  # slow to import, and not every search needs it

        row = self._features([params])[0]
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
            z = (best - mean) / deviation
            level = float(_log_improvement_near(z) if z > NEAR_Z else _log_improvement_far(z))
            # Derivatives of log(deviation h(z)), where h' is the distribution function of the normal distribution, and
            # h - z h' its density.
            below = math.exp(float(scipy.special.log_ndtr(z)) - level)
            density = math.exp(-0.5 * z**2 - 0.5 * math.log(2 * math.pi) - level)
            slope = (-below * by_mean + density * by_deviation) / deviation
            return -level - math.log(deviation) - chance, -(slope + by_chance)[moved]

        bounds, steps = [(0.0, 1.0)] * int(moved.sum()), {"maxiter": CLIMB_STEPS}
        found = minimize(cost, row[moved], jac=True, method="L-BFGS-B", bounds=bounds, options=steps)
        labels = compress(self._domains, moved)
        units = zip(labels, found.x.tolist(), strict=True)
        return {**params, **{label: self._domains[label].from_unit([unit]).tolist()[0] for label, unit in units}}

    def _features(self, params_list: Sequence[Params]) -> Array:
        return features(params_list, self._domains, inactive=math.nan)


def _rooted(values: Array, even: Array) -> Array:
    """Return weights in proportion to the roots of gains, such that the weights times the probabilities sum to 1.

    The roots make shares less extreme, because the process may be wrong. `values` are the logs of the gains, and `even`
    the probabilities.
    """
    weights = np.exp(0.5 * (values - values.max())) if values.max() > -math.inf else np.ones(len(values))
    return np.asarray(weights / (even * weights).sum())


def _least(losses: Array, broken: NDArray[np.bool_], most: int) -> NDArray[np.intp]:
    """Return the indexes of the `most` least losses. Trials that have `broken` a constraint come after others."""
    feasible = np.flatnonzero(~broken)
    if len(feasible) > most:
        # Only the least losses are sorted, because sorting 100,000 takes longer than a proposal.
        best = feasible[losses[feasible] <= np.partition(losses[feasible], most - 1)[most - 1]]
        return np.asarray(best[np.argsort(losses[best], kind="stable")][:most])
    return np.lexsort((losses, broken))[:most]


def standardised(losses: Array) -> Array:
    """Return losses with mean 0 and variance 1, after bad losses were moved closer together.

    Distances from the median are measured in units of the best loss's distance. A loss that is more than one unit above
    the median gets the distance 1 + log(distance), at most FAR. Without this, a loss of 1e9 would hide all differences
    between other losses.
    """
    finite = np.abs(losses[np.isfinite(losses)])
    # Losses are divided by the largest one, because differences of losses near 1e308 overflow.
    losses = np.nan_to_num(losses / (float(finite.max(initial=0.0)) or 1.0), posinf=1.0, neginf=-1.0)
    middle, best = float(np.median(losses)), float(losses.min())
    worse = losses[losses > best] - best
    scale = middle - best or (float(np.median(worse)) if len(worse) else 1.0)
    distances = np.minimum((losses - middle) / scale, 1e300)
    distances = np.where(distances > 1.0, np.minimum(1.0 + np.log(np.maximum(distances, 1.0)), FAR), distances)
    spread = float(distances.std())
    return np.asarray((distances - distances.mean()) / spread if spread > 0 else np.zeros(len(distances)))


def log_improvement(z: Array) -> Array:
    """Return log(density(z) + z distribution(z)): the log expected improvement in standard deviations (Ament, equation
    9).
    """
    found, near = np.empty_like(z), z > NEAR_Z
    found[near], found[~near] = _log_improvement_near(z[near]), _log_improvement_far(z[~near])
    return found


def _log_improvement_near(z: Array | float) -> Array:
    density = np.exp(-0.5 * (z * z) - 0.5 * math.log(2 * math.pi))
    return np.asarray(np.log(density + z * np.exp(scipy.special.log_ndtr(z))))


def _log_improvement_far(z: Array | float) -> Array:
    rest = 1.0 + z * math.sqrt(math.pi / 2) * scipy.special.erfcx(-z / math.sqrt(2.0))
    tail = np.where(z > -1e4, np.log(np.maximum(rest, 1e-300)), -2.0 * np.log(np.maximum(-z, 1.0)))
    return np.asarray(-0.5 * (z * z) - 0.5 * math.log(2 * math.pi) + tail)
