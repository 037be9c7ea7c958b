"""Tree-structured Parzen estimator: draw from regions where good trials are dense and bad trials are not.

Sources: [B] Bergstra, Bardenet, Bengio, Kégl, "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011, section 4;
[W] Watanabe, "Tree-Structured Parzen Estimator: Understanding Its Algorithm Components and Their Roles for Better
Empirical Performance", arXiv 2304.11127, section 3; [O] Ozaki, Tanigaki, Watanabe, Nomura, Onishi, "Multiobjective
Tree-Structured Parzen Estimator", JAIR 73, 2022. With several losses, the good trials are those of the first fronts; of
the last of these fronts, the trials that cover the largest volume. Trials that violate a constraint rank after all
others, sorted by violation.

The density l(x) of good trials and the density g(x) of bad trials are mixtures over whole trials (the multivariate form
of [W]), so values that were good together are drawn together. The kernel of a trial is the product of the kernels of
its labels. For a label that is inactive in the trial, the kernel is the prior. So each mixture is a density over the
whole tree: a choice is drawn first, then the labels that are active below it.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import scipy
from numpy.typing import NDArray

from shadho_celery.core.trial import WELL, Params, Trial, TrialState
from shadho_celery.samplers.avoidance import FailureAvoidance
from shadho_celery.samplers.qmc import QmcSampler
from shadho_celery.samplers.random import Learner
from shadho_celery.space.domains import UNIT_MASS, Array, Categorical, Continuous, Discrete, Domain, Normal, RandInt
from shadho_celery.space.split import Key, Subspace
from shadho_celery.study.front import order_of

#: number of results before the model proposes params: for the whole space; and at least, for a subspace
MOST_RANDOM, LEAST_RANDOM = 10, 5
#: fraction of the trials that are good (gamma in [B], linear as in [W]); and maximum number of good trials
GOOD_SHARE, MOST_GOOD = 0.1, 25
#: maximum number of bad trials that a proposal uses, to save time; if there are more, a random sample is used
MOST_BAD = 300
#: the best trials of a subspace are searched among this number of best trials of the space, to save time
MOST_RANKED = 1000
#: maximum number of trials with several losses that are kept to find the best ones; if there are more, the worse half
#: is dropped
MOST_KEPT = 300
#: number of draws from l(x), among which the one with the greatest ratio l(x) / g(x) is used
CANDIDATES = 24
#: maximum number of times that candidates are drawn again because the space's `where` refuses them
REDRAWN = 20
#: one trial in EXPLORE * (number of labels + 1) continues the initial quasi-random sequence
EXPLORE = 2
#: number of points of the quasi-random sequence among which an untried point is searched
AHEAD = 256
#: maximum number of proposals from one estimate of the densities
AT_ONCE = 100
#: maximum width of a kernel, as a fraction of the range. This was the best value in our benchmark
#: (tests/benchmarks/samplers.py)
WIDTH = 0.1
#: the kernel of a trial on a choice is the trial's option, except for this fraction, which is the prior
OPTION_WIDTH = 0.2
#: width of the prior of a bounded distribution, a Gaussian as wide as the range ([W]). The prior of a normal
#: distribution is the distribution itself
PRIOR_WIDTH = 1.0

#: number of results between two outlooks; number of draws for an outlook, in all, and at least for each subspace
LOOK, DRAWS, LEAST_DRAWS = 10, 96, 6
#: number that is mixed into the seed for these draws
_OUTLOOK = 0x6F

_TINY = np.finfo(float).tiny
#: key by which trials are sorted: violation, negated step of a pruned trial (-infinity for a complete one), loss, and
#: order of telling
_Ranked = tuple[float, float, float, int]


class TpeSampler(Learner):
    """TPE in the whole space or in one subspace. Failed, pruned and pending trials count as bad."""

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        self._axes = {label: _axis(domain) for label, domain in subspace.domains.items()}
        self._random = min(MOST_RANDOM, max(LEAST_RANDOM, round(2 * MOST_RANDOM * subspace.probability)))
        #: values of the trials in the order of telling, NaN for an inactive label; rows after the last trial are unused
        self._rows = np.empty((MOST_RANDOM, len(self._axes)))
        #: sort keys of all trials, the best first
        self._ranked: list[_Ranked] = []
        #: the order of telling of each trial in `_ranked`, also kept as an array, because this is ten times as fast
        self._orders = array("q")
        #: the best trials with several losses
        self._several = _Several()
        #: by order of telling, 1 for a complete trial
        self._completed = array("b")
        #: latest outlook, and the number of trials told at that time
        self._outlook: Mapping[str, float] = {}
        self._looked_at = -LOOK
        self._avoidance = FailureAvoidance(subspace)
        self._sequence = QmcSampler(subspace, entropy)

    def ask(self, n: int, pending: Collection[Trial], within: Subspace | None = None) -> list[Params]:
        indices, part = self._places(n, pending), within or self._subspace
        if not self._axes or len(self._ranked) < self._random:
            return [self._start(index, [index], part) for index in indices]
        # Density estimates propose params near known trials, so one trial in `every` comes from the quasi-random
        # sequence.
        every = EXPLORE * (1 + len(self._axes))
        taken = {self._subspace.key(trial.params) for trial in pending}
        asked: dict[int, Params] = {}
        for index in range(-(-indices.start // every) * every, indices.stop, every):
            place = self._random + index // every
            asked[index] = self._start(index, range(place, place + AHEAD), part, taken)
            taken.add(self._subspace.key(asked[index]))
        guessed = [index for index in indices if index not in asked]
        for start in range(0, len(guessed), AT_ONCE):
            places = guessed[start : start + AT_ONCE]
            generators = [self._generator(index) for index in places]
            waiting = [*(trial.params for trial in pending), *asked.values()]
            asked.update(zip(places, self._guesses(generators, waiting, part), strict=True))
        return [asked[index] for index in indices]

    def outlook(self, parts: Sequence[Subspace], pending: int) -> Mapping[str, float]:
        """Return a weight for each part, from the expected improvement of draws from it ([B], equation 3).

        Half of the trials are divided by its root, because the densities may be wrong. The other half is divided by its
        square, because the improvement is bounded ([B]: by 1 / GOOD_SHARE), so its root differs little among parts.
        """
        if not self._axes or len(self._ranked) < self._random:
            return self._sequence.outlook(parts, self._told + pending)
        # A resumed study must have the same outlook, so the outlook is computed only from fixed numbers of first
        # trials.
        number = max(self._random, len(self._ranked) // LOOK * LOOK)
        if number != self._looked_at:
            self._looked_at, self._outlook = number, self._gains(parts, number)
        return self._outlook

    def _gains(self, parts: Sequence[Subspace], number: int) -> Mapping[str, float]:
        """Return the outlook from the first `number` trials."""
        generator = np.random.default_rng([*self._entropy, _OUTLOOK, number])
        good, bad = self._split(generator, (), self._subspace, number)
        share = good.size / (good.size + bad.size)
        size = max(LEAST_DRAWS, DRAWS // len(parts))
        candidates = np.concatenate([self._draw(good, size, generator, part) for part in parts])
        ratios = (good.log_factors(candidates) - bad.log_factors(candidates)).sum(axis=1)
        means = ratios.reshape(len(parts), size).mean(axis=1)
        gains = -np.logaddexp(math.log(share), math.log(1.0 - share) - means)
        gains, even = np.exp(gains - gains.max()), np.array([part.probability for part in parts])
        weights = sum(each / (even @ each) for each in (np.sqrt(gains), gains**2))
        return dict(zip((part.name for part in parts), (weights / weights.max()).tolist(), strict=True))

    def _start(self, index: int, places: Iterable[int], part: Subspace, taken: Collection[Key] | None = None) -> Params:
        """Return the first point at these places of the quasi-random sequence; with `taken`, the first point that is
        new.

        If there is no such point, or once a trial has failed, a draw that is unlikely to fail is returned.
        """
        points = () if self._avoidance.any else (self._sequence.point(place, part) for place in places)
        found = (params for params in points if taken is None or self._is_new(params, taken))
        return next(found, None) or self._avoidance.draw(self._generator(index), part)

    def _learn(self, trial: Trial) -> None:
        self._avoidance.tell(trial, guessed=len(self._ranked) >= self._random)
        place = len(self._ranked)
        # A failed trial is worse than all others, so that the search leaves failing regions.
        ranked = math.inf, math.inf, math.inf, place
        outcome = trial.outcome
        if trial.state in WELL and outcome.loss is not None and not math.isnan(outcome.loss):
            # A pruned trial is worse than a complete one, and better the later it was pruned.
            is_complete = trial.state is TrialState.COMPLETE
            stayed = math.inf if is_complete else float(trial.step or 0)
            ranked = outcome.violation, -stayed, float(outcome.loss), place
            if len(outcome.losses) > 1 and is_complete:
                self._several.add(ranked, tuple(outcome.losses.values()), outcome.violation)
        self._completed.append(ranked[1] == -math.inf)
        rank = bisect_left(self._ranked, ranked)
        self._ranked.insert(rank, ranked)
        self._orders.insert(rank, place)
        if place == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[place] = _row(self._subspace.key(trial.params))

    def _guesses(
        self, generators: Sequence[np.random.Generator], waiting: Sequence[Params], part: Subspace
    ) -> list[Params]:
        """Return for each generator the candidate with the greatest l / g, which has the greatest expected improvement.

        See [B], equation 3. Terms for failures are added to log(l / g). `waiting` are the params of pending trials. The
        densities l and g are estimated once per call. After each proposal, only its kernel is added to g, so that the
        next proposals differ from it.
        """
        keys = dict.fromkeys(map(self._subspace.key, waiting))
        good, bad = self._split(generators[0], keys, part)
        candidates = np.concatenate([self._draw(good, CANDIDATES, generator, part) for generator in generators])
        worse = bad.log_factors(candidates)
        ratios = (good.log_factors(candidates) - worse).sum(axis=1)
        guesses = []
        for place, generator in enumerate(generators):
            own = slice(place * CANDIDATES, (place + 1) * CANDIDATES)
            worth = ratios[own]
            if self._avoidance.any:
                worth = worth + self._avoidance.weights([*map(self._params, candidates[own])], generator, part)
            # Candidates that were tried or are pending are used only if there are no others.
            ordered = candidates[own][np.argsort(-worth, kind="stable")]
            proposed = map(self._params, ordered)
            guess = next((each for each in proposed if self._is_new(each, keys)), self._params(ordered[0]))
            guesses.append(guess)
            keys[self._subspace.key(guess)] = None
            if place + 1 == len(generators):
                break
            rest = slice(own.stop, None)
            more = np.logaddexp(worse[rest], bad.log_parts(_row(self._subspace.key(guess)), candidates[rest]))
            ratios[rest] += (worse[rest] - more).sum(axis=1)
            worse[rest] = more
        return guesses

    def _split(
        self, generator: np.random.Generator, waiting: Collection[Key], part: Subspace, first: int | None = None
    ) -> tuple[_Density, _Density]:
        """Return the densities of good and of bad trials ([B], equation 2) over the labels of a part of the space.

        With `first`, only this number of first trials is used, and only the first of several losses.
        """
        orders = np.frombuffer(self._orders, np.int64)
        orders = orders if first is None else orders[orders < first]
        number = len(orders)
        successes = int(np.count_nonzero(np.frombuffer(self._completed, np.bool_)[:first]))
        count = min(math.ceil(GOOD_SHARE * number), MOST_GOOD, successes)
        # Pending trials count as bad, so that slots do not all get the same point.
        pending = [_row(key) for key in list(waiting)[-MOST_BAD:]]
        good = self._best(count) if first is None else [*range(count)]
        if part.fixed and not self._several:
            good += [place for place in self._own_best(part, orders[:successes]) if place not in good]
        others, room = number - len(good), MOST_BAD - len(pending)
        bad: NDArray[np.intp] = np.arange(others) if others <= room else generator.choice(others, room, replace=False)
        # Convert places among the trials that are not good to places among all trials.
        if good == [*range(len(good))]:
            bad += len(good)
        else:
            for place in sorted(good):
                bad += bad >= place
        prior = [math.nan] * len(self._axes)  # a trial without active labels has the prior as its kernel
        axes, parts = [*self._axes.values()], self._parts(part)
        return (
            _Density(axes, np.vstack([self._rows[orders[good]], prior]), parts),
            _Density(axes, np.vstack([self._rows[orders[bad]], *pending, prior]), parts),
        )

    def _own_best(self, part: Subspace, orders: NDArray[np.int64]) -> list[int]:
        """Return the places in the ranking of a part's best trials, which are good compared with this part only.

        So proposals in the part may improve its own best loss, even if other parts have better losses. A part with
        fewer than five trials has none. `orders` are the orders of telling of the trials that may be good, the best
        first.
        """
        rows = self._rows[orders[:MOST_RANKED]]
        own = np.ones(len(rows), dtype=bool)
        for place, label in enumerate(self._axes):
            if label in part.fixed:
                own &= rows[:, place] == part.fixed[label]
        places: list[int] = np.flatnonzero(own).tolist()
        return places[: min(int(GOOD_SHARE * len(places) + 0.5), MOST_GOOD)]

    def _parts(self, part: Subspace) -> list[list[int]]:
        """Return the places of the labels of a part of the space, in groups of labels that are drawn together.

        With one loss, all labels are one group. With several losses, each label is drawn independently, as in [O],
        because the good trials on a front agree in some labels and differ in others.
        """
        places = [place for place, label in enumerate(self._axes) if label in part.domains or label in part.fixed]
        return [[place] for place in places] if self._several else [places]

    def _best(self, count: int) -> list[int]:
        """Return the places of the best `count` trials in the ranking, the best first."""
        if not self._several:
            return [*range(count)]
        best = [bisect_left(self._ranked, each) for each in self._several.best(count)]
        chosen = {*best}
        others = (place for place in range(len(self._ranked)) if place not in chosen)
        return [*best, *islice(others, count - len(best))]

    def _draw(self, density: _Density, size: int, generator: np.random.Generator, part: Subspace) -> Array:
        """Draw candidates that the space's `where` allows from a density.

        A candidate that is still refused after REDRAWN draws is replaced by a draw from the prior.
        """
        drawn, allows = self._drawn(density, size, generator, part), part.space.allows
        for _ in range(REDRAWN):
            refused = part.space.where and [place for place, row in enumerate(drawn) if not allows(self._params(row))]
            if not refused:
                return drawn
            drawn[refused] = self._drawn(density, len(refused), generator, part)
        priors = iter(part.sample(generator, size))
        return np.array([row if allows(self._params(row)) else _row(self._subspace.key(next(priors))) for row in drawn])

    def _drawn(self, density: _Density, size: int, generator: np.random.Generator, part: Subspace) -> Array:
        """Draw candidates of a part of the space from a density, with NaN for inactive labels."""
        pinned = {place: part.fixed[label] for place, label in enumerate(self._axes) if label in part.fixed}
        drawn = density.draw(size, generator, pinned)
        # The density may have labels of other parts of the space.
        drawn[:, [not (label in part.domains or label in part.fixed) for label in self._axes]] = math.nan
        if part.always_active is None:
            for row in drawn:
                active = self._params(row)
                row[[label not in active for label in self._axes]] = math.nan
        return drawn

    def _params(self, row: Array) -> Params:
        """Return the params of a row's active labels."""
        params = {**self._subspace.fixed}
        for (label, domain), value in zip(self._subspace.domains.items(), row.tolist(), strict=True):
            if not math.isnan(value):
                params[label] = int(value) if isinstance(domain, Discrete) else value
        return {label: params[label] for label in self._subspace.active(params)}


class _Several:
    """Trials with several losses that may be among the best.

    Whenever there are more than MOST_KEPT trials, the worse half by `order_of` is dropped, because the time to sort
    fronts grows with the square of their number. The kept half is at least six times as many trials as are ever good.
    """

    def __init__(self) -> None:
        #: trials in the order of telling: sort key, losses and violation
        self._kept: list[tuple[_Ranked, tuple[float, ...], float]] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def add(self, ranked: _Ranked, losses: tuple[float, ...], violation: float) -> None:
        self._kept.append((ranked, losses, violation))
        if len(self._kept) > MOST_KEPT:
            self._kept = [self._kept[place] for place in sorted(self._order(MOST_KEPT // 2))]

    def best(self, count: int) -> list[_Ranked]:
        """Return the best `count` trials, the best first."""
        return [self._kept[place][0] for place in self._order(count)]

    def _order(self, most: int) -> list[int]:
        _, losses, violations = zip(*self._kept, strict=True)
        return [*map(int, order_of(np.array(losses), np.array(violations), most))]


class _Density:
    """Density of trials: a product of mixtures, one for each group of labels that are drawn together."""

    def __init__(self, axes: Sequence[_Axis], rows: Array, parts: Sequence[Sequence[int]]) -> None:
        """`rows` are the trials and, as the last row, the prior. `parts` has the places of the labels in each group.

        A mixture uses only the trials in which a label of its group is active. Labels that are in no group are left
        out.
        """
        self._labels = len(axes)
        #: number of trials, the prior included
        self.size = len(rows)
        self._parts = []
        for places in parts:
            own = rows[:, places]
            if len(parts) > 1:
                own = np.concatenate([own[:-1][~np.isnan(own[:-1]).all(axis=1)], own[-1:]])
            self._parts.append((places, _Mixture([axes[place] for place in places], own)))

    def draw(self, size: int, generator: np.random.Generator, pinned: Mapping[int, float]) -> Array:
        """Return draws of values, shape (size, labels), on condition of the `pinned` values by place."""
        drawn = np.full((size, self._labels), math.nan)
        for places, mixture in self._parts:
            own = {place: pinned[label] for place, label in enumerate(places) if label in pinned}
            drawn[:, places] = mixture.draw(size, generator, own)
        return drawn

    def log_factors(self, points: Array) -> Array:
        """Return the logarithms of the mixtures at the points, shape (points, parts)."""
        factors = [mixture.log_density(points[:, places]) for places, mixture in self._parts]
        return factors[0][:, None] if len(factors) == 1 else np.stack(factors, axis=1)

    def log_parts(self, row: Sequence[float], points: Array) -> Array:
        """Return the logarithms of what one more trial would add to the mixtures at `points`.

        The shape is as in `log_factors`.
        """
        cut = [([row[place] for place in places], points[:, places], mixture) for places, mixture in self._parts]
        return np.stack([mixture.log_part(own, at) for own, at, mixture in cut], axis=1)


class _Mixture:
    """Mixture over whole trials, with a kernel for each row. It is the product of the kernels of the row's labels."""

    def __init__(self, axes: Sequence[_Axis], rows: Array) -> None:
        """Estimate the widths of the kernels. `rows` have shape (trials, labels), with NaN for inactive labels."""
        self._size = len(rows)
        narrowing = self._narrowing(rows)
        smooth = {place: axis for place, axis in enumerate(axes) if isinstance(axis, _Line) and not axis.is_grid}
        #: places of numbers without a grid. Their kernels are computed together, because this needs fewer calls of
        #: numpy
        self._smooth = [*smooth]
        self._gaussians = _Gaussians([*smooth.values()], rows[:, self._smooth], narrowing)
        #: by place of another label: its kernels
        self._others = {
            place: axis.kernels(rows[:, place], narrowing) for place, axis in enumerate(axes) if place not in smooth
        }

    def _narrowing(self, rows: Array) -> Array:
        """Return the factor of each row's widths, which is smaller for more trials and greater for more labels (Scott's
        rule).
        """
        labels = np.count_nonzero(~np.isnan(rows), axis=1)
        return np.asarray(float(self._size) ** (-1.0 / (labels + 4)))

    def draw(self, size: int, generator: np.random.Generator, pinned: Mapping[int, float]) -> Array:
        """Return draws of values, shape (size, labels), on condition of the values at these `pinned` places.

        All labels of a draw come from the kernel of one row.
        """
        if pinned:
            # The probability of a row is in proportion to its part of the density of the pinned values.
            levels = sum(self._others[place].logarithms(np.array([value]))[0] for place, value in pinned.items())
            chances = np.exp(levels - np.max(levels))
            picks = generator.choice(self._size, size, p=chances / chances.sum())
        else:
            picks = generator.integers(self._size, size=size)
        drawn = np.empty((size, len(self._smooth) + len(self._others)))
        masses = []
        # Draws are made in the order of the labels, because they come from one generator.
        for place in range(drawn.shape[1]):
            if place in pinned:
                drawn[:, place] = pinned[place]
            elif place in self._others:
                drawn[:, place] = self._others[place].draw(picks, generator)
            else:
                masses.append(generator.random(size))
        if masses:
            drawn[:, self._smooth] = self._gaussians.quantiles(picks, np.array(masses))
        return drawn

    def log_density(self, points: Array) -> Array:
        """Return the logarithm of the mixture at each of `points`, shape (points,)."""
        # scipy's `logsumexp` is not used, because it takes longer than all other steps here.
        terms = self._log_products(points, self._gaussians, self._others)
        most = terms.max(axis=1)
        return np.asarray(most + np.log(np.exp(terms - most[:, None]).sum(axis=1)) - math.log(self._size))

    def log_part(self, row: Sequence[float], points: Array) -> Array:
        """Return the logarithm of what one more trial would add to the density at `points`, shape (points,)."""
        rows = np.array([row])
        narrowing = self._narrowing(rows)
        gaussians = self._gaussians.of(rows[:, self._smooth], narrowing)
        others = {place: kernels.of(rows[:, place], narrowing) for place, kernels in self._others.items()}
        return self._log_products(points, gaussians, others)[:, 0] - math.log(self._size)

    def _log_products(self, points: Array, gaussians: _Gaussians, others: Mapping[int, _Kernels]) -> Array:
        """Return the logarithms of the products over labels of the kernels, shape (points, kernels).

        The kernel of an inactive label counts as 1.
        """
        found = np.zeros((len(points), gaussians.size))
        for place, each in others.items():
            values = points[:, place]
            active = ~np.isnan(values)
            if active.all():
                found += each.logarithms(values)
            elif active.any():
                found[active] += each.logarithms(values[active])
        return found + gaussians.log_products(points[:, self._smooth]) if self._smooth else found


def _row(key: Key) -> list[float]:
    return [math.nan if value is None else float(value) for value in key]


class _Options:
    """Axis of a choice. The kernel of a trial is its own option, mixed with the prior."""

    def __init__(self, domain: Categorical) -> None:
        self.domain = domain
        law = np.array(domain.probabilities)
        # Masses by option: of the prior; of the kernel of a trial with this option; and of the kernel of a trial with
        # another option. A table of all pairs of options would take gigabytes for 10,000 options.
        masses = law, (1 - OPTION_WIDTH) + OPTION_WIDTH * law, OPTION_WIDTH * law
        self.law, self.own, self.other = (np.log(np.maximum(each, _TINY)) for each in masses)

    def kernels(self, centres: Array, narrowing: Array) -> _Picks:
        """Return the kernels of trials with these options (`centres`)."""
        return _Picks(self, centres)


class _Picks:
    """Kernels on the axis of a choice, one for each trial. `centres` are the trials' options, NaN if inactive."""

    def __init__(self, axis: _Options, centres: Array) -> None:
        self._axis, self._centres = axis, centres

    def of(self, centres: Array, narrowing: Array) -> _Picks:
        return _Picks(self._axis, centres)

    def draw(self, picks: Array, generator: np.random.Generator) -> Array:
        own = self._centres[picks]
        leaves = np.isnan(own) | (generator.random(len(own)) < OPTION_WIDTH)
        return np.where(leaves, self._axis.domain.sample(generator, len(own)), own)

    def logarithms(self, values: Array) -> Array:
        """Return the logarithms of the kernels' masses at `values`, shape (values, centres)."""
        options = values.astype(np.int64)[:, None]
        known = np.where(options == self._centres, self._axis.own[options], self._axis.other[options])
        return np.where(np.isnan(self._centres), self._axis.law[options], known)


class _Line:
    """Axis of a numeric label. Values are mapped to a unit variable, whose range is [0, 1].

    Kernels are Gaussians in the unit variable, truncated to its range.
    """

    def __init__(self, domain: Continuous | RandInt) -> None:
        self._domain = domain
        is_normal = isinstance(domain, Normal)
        self.prior_width = 0.5 / float(scipy.special.ndtri((1 + UNIT_MASS) / 2)) if is_normal else PRIOR_WIDTH
        #: half the distance between two values of the grid; 0 without a grid
        self._half = 0.5 if isinstance(domain, RandInt) else (domain.step or 0.0) / 2

    @property
    def is_grid(self) -> bool:
        """True if values are rounded to a grid."""
        return self._half > 0

    def kernels(self, centres: Array, narrowing: Array) -> _Rounded:
        """Return the kernels of trials with these values (`centres`) on a grid."""
        return _Rounded(self, centres, float(_widths(self.to_unit(centres)[None])[0]), narrowing)

    def to_unit(self, values: Array) -> Array:
        if isinstance(self._domain, RandInt):  # each value has an equal part of [0, 1]
            return (values - self._domain.first + 0.5) / self._domain.count
        return self._domain.to_unit(values)

    def from_unit(self, units: Array) -> Array:
        return self._domain.quantile(units) if isinstance(self._domain, RandInt) else self._domain.from_unit(units)

    def cells(self, values: Array) -> tuple[Array, Array]:
        """Return for each of these values of a grid the ends of the interval that is rounded to it."""
        return self.to_unit(values - self._half), self.to_unit(values + self._half)


def _widths(units: Array) -> Array:
    """Return the widths of the kernels of each label, shape (labels,).

    `units` are the values of trials, mapped to [0, 1], shape (labels, trials), with NaN for inactive labels.
    """
    known = ~np.isnan(units)
    # If all labels are active in the same trials, they are computed as one array, with fewer calls of numpy.
    alike = len(units) > 0 and bool((known == known[0]).all())
    parts = [units[:, known[0]]] if alike else [row[own][None] for row, own in zip(units, known, strict=True)]
    spreads = []
    for part in parts:
        count = part.shape[1]
        middles = part.mean(axis=1, keepdims=True) if count else 0.5
        # The variance of the trials. The prior's variance, 1/12, counts as one more trial, so that it stays above 0.
        spreads.append(np.sqrt((np.square(part - middles).sum(axis=1) + 1 / 12) / (count + 1)))
    return np.asarray(np.minimum(np.concatenate([*spreads, np.empty(0)]), WIDTH))


class _Truncated:
    """Gaussians in the unit variable, truncated to its range [0, 1]. Their arrays have the trials on the last axis."""

    def __init__(self, means: Array, sigmas: Array) -> None:
        self._means, self._sigmas = means, sigmas
        self._low, self._high = scipy.special.ndtr(-means / sigmas), scipy.special.ndtr((1 - means) / sigmas)

    def units(self, picks: Array, masses: Array) -> Array:
        """Return the quantiles of the picked trials' kernels at these masses."""
        low, high = self._low[..., picks], self._high[..., picks]
        units = self._means[..., picks] + self._sigmas[..., picks] * scipy.special.ndtri(low + masses * (high - low))
        return np.asarray(units.clip(0.0, 1.0))


class _Gaussians(_Truncated):
    """Kernels on the axes of numbers without a grid, one for each label and trial.

    If `centres` has NaN, the label is inactive and the kernel is the prior. All arrays have the shape (labels, trials).
    """

    def __init__(self, axes: Sequence[_Line], centres: Array, narrowing: Array, widths: Array | None = None) -> None:
        """`centres` have shape (trials, labels).

        By default, the `widths` of the labels are computed from these trials.
        """
        self._axes, self.size = axes, len(centres)
        units = self._units(centres)
        known = ~np.isnan(units)
        self._widths = _widths(units) if widths is None else widths
        priors = np.array([axis.prior_width for axis in axes])
        sigmas = np.where(known, self._widths[:, None] * narrowing, priors[:, None])
        super().__init__(np.where(known, units, 0.5), sigmas)

    def of(self, centres: Array, narrowing: Array) -> _Gaussians:
        """Return kernels of other trials with the same widths."""
        return _Gaussians(self._axes, centres, narrowing, self._widths)

    def quantiles(self, picks: Array, masses: Array) -> Array:
        """Return the quantiles of the picked trials' kernels, shape (picks, labels). `masses` have shape (labels,
        picks).
        """
        values = [axis.from_unit(row) for axis, row in zip(self._axes, self.units(picks, masses), strict=True)]
        return np.asarray(np.array(values).T)

    def log_products(self, points: Array) -> Array:
        """Return the logarithms of the kernels' products over labels at `points`, shape (points, trials)."""
        # The logarithm of a Gaussian is a quadratic polynomial, so the sum over all labels is one matrix product.
        units = self._units(points)
        active = ~np.isnan(units)
        units = np.where(active, units, 0.0)
        powers = np.stack([units**2, units, active], axis=1, dtype=float)
        squared = 1.0 / self._sigmas**2
        constant = -0.5 * squared * self._means**2 - np.log(
            self._sigmas * (self._high - self._low) * math.sqrt(2 * math.pi)
        )
        factors = np.stack([-0.5 * squared, squared * self._means, constant], axis=1)
        rows = 3 * len(self._axes)
        return np.asarray(powers.reshape(rows, -1).T @ factors.reshape(rows, -1))

    def _units(self, values: Array) -> Array:
        """Map values of shape (n, labels) to numbers in [0, 1], shape (labels, n)."""
        units = np.empty(values.T.shape)
        for place, axis in enumerate(self._axes):
            units[place] = axis.to_unit(values[:, place])
        return units


class _Rounded(_Truncated):
    """Kernels on the axis of a number with a grid, one for each trial. A value has the mass of what is rounded to it.

    If `centres` has NaN, the label is inactive and the kernel is the prior.
    """

    def __init__(self, axis: _Line, centres: Array, width: float, narrowing: Array) -> None:
        self.axis = axis
        self._width = width
        known = ~np.isnan(centres)
        means, sigmas = np.full(len(centres), 0.5), np.full(len(centres), axis.prior_width)
        means[known] = axis.to_unit(centres[known])
        cells = axis.cells(centres[known])
        # A kernel is at least wide enough to reach the neighbouring values.
        sigmas[known] = np.maximum(width * narrowing[known], (cells[1] - cells[0]) / 2)
        super().__init__(means, sigmas)

    def of(self, centres: Array, narrowing: Array) -> _Rounded:
        """Return kernels of other trials with the same widths."""
        return _Rounded(self.axis, centres, self._width, narrowing)

    def draw(self, picks: Array, generator: np.random.Generator) -> Array:
        return self.axis.from_unit(self.units(picks, generator.random(len(picks))))

    def logarithms(self, values: Array) -> Array:
        """Return the logarithms of the kernels' masses at `values` of a grid, shape (values, centres)."""
        # A value has the probability of all numbers that are rounded to it. It is computed once for equal values.
        single, places = np.unique(values, return_inverse=True)
        low, high = (
            scipy.special.ndtr(np.subtract.outer(edges, self._means) / self._sigmas)
            for edges in self.axis.cells(single)
        )
        return np.asarray(np.log(np.maximum((high - low) / (self._high - self._low), _TINY)))[places]


_Axis = _Options | _Line
_Kernels = _Picks | _Rounded


def _axis(domain: Domain) -> _Axis:
    if isinstance(domain, Categorical):
        return _Options(domain)
    assert isinstance(domain, (Continuous, RandInt))
    return _Line(domain)
