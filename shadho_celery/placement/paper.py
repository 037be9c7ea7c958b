"""SHADHO's own placement: subspaces ranked by complexity and performance, on compute classes ranked by strength.

Complexity depends only on a subspace's domains, and performance on its finished trials. Source: Kinnison,
Kremer-Herman, Thain, Scheirer, "SHADHO: Massively Scalable Hardware-Aware Distributed Hyperparameter Optimization",
arXiv 1707.01428, whose "priority" is our performance.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

import numpy as np

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.system import one_blas_thread
from shadho_celery.core.trial import Trial
from shadho_celery.placement.base import Slot
from shadho_celery.placement.policies import FifoPolicy
from shadho_celery.space.features import Array, complexity, features
from shadho_celery.space.split import Subspace

T = TypeVar("T")
U = TypeVar("U", bound=Hashable)

#: performance of a subspace before there are enough losses
START_VALUE = 1.0
#: number of losses needed for a fit: with fewer, nearly every function would look flat, and noise could look rough. The
#: original SHADHO refreshed its scores after ten results, too.
MIN_TRIALS = 10
#: number of Gaussian processes fitted for one score, and maximum number of trials in the random subset for each
FITS, SUBSET = 10, 80
#: losses that differ by less than this fraction of their size count as equal
ROUNDING = 1e-12

#: ranges of a fit: ln(length scale), in units of the unit cube's side, and log10(noise variance / signal variance).
#: With a long length scale, a mere slope needs a huge signal variance, so the lower limit of the ratio is low.
BOUNDS = ((math.log(0.05), math.log(10.0)), (-8.0, 1.0))
#: number of points of the first grid over length scale and noise ratio
GRID = (6, 4)
#: number of times that the steps of the grid are halved around its best point; after two times the step of ln(length
#: scale) is 0.26
HALVINGS = 2

#: the weight of the subspace at position k of a class is exp(-DECAY k)
DECAY = 0.5
#: number of results between two updates of the performance scores (as in the paper)
REFRESH_RESULTS = 10
#: a subspace is scored again when this fraction of its latest trials is new: computing a score takes about ten
#: milliseconds, and fewer new trials would hardly change it
NEWS = 0.1
#: number of latest trials of a subspace that are used for its performance
HISTORY = 1000


@one_blas_thread()
def performance(rows: Array, losses: Array, generator: np.random.Generator) -> float:
    """Return how much a subspace's loss varies with its params: 0 or more, and START_VALUE while there are few losses.

    It is the median of signal share / length scale over `FITS` Gaussian processes, each fitted to a random subset of
    the trials. `rows` of features have shape (n, d) in [0, 1], and `losses` shape (n,). Trials whose loss is not finite
    are left out. The result is 0 for constant losses, and START_VALUE for fewer than MIN_TRIALS losses. A subset is 80
    % of the trials and at most `SUBSET` of them, so the time does not grow with the history. A variation that is too
    fine for the number of trials counts as noise: for 80 trials of two params, more than about five periods along a
    side.

    Source: SHADHO, arXiv 1707.01428, changed: SHADHO took max - min of 1 / length scale from an unfitted kernel.
    """
    known = np.flatnonzero(np.isfinite(losses))
    if len(known) < MIN_TRIALS:
        return START_VALUE
    size = min(SUBSET, math.ceil(0.8 * len(known)))
    chosen = (known[generator.choice(len(known), size, replace=False)] for _ in range(FITS))
    return float(np.median([_roughness(rows[places], losses[places]) for places in chosen]))


def _roughness(rows: Array, losses: Array) -> float:
    """Return signal share / length scale of the Gaussian process (RBF plus white noise) that fits these trials best.

    The signal share is the signal variance / (signal + noise variance), and 0 if pure noise explains the losses as
    well. The length scale is in units of the unit cube's side. `rows` have shape (m, d), and `losses` shape (m,). The
    greatest marginal likelihood is searched on a grid, whose steps are then halved around the best point.
    """
    size = np.abs(losses).max()
    scaled = losses / (size or 1.0)  # a diverged trial's 1e300 would overflow in the variance
    if np.ptp(scaled) <= ROUNDING:
        return 0.0
    standardised = np.asarray((scaled - scaled.mean()) / scaled.std())
    norms = np.square(rows).sum(axis=1)
    squares = np.maximum(norms[:, None] + norms - 2.0 * rows @ rows.T, 0.0)  # rounding may leave -1e-16
    # Both axes descend, because the first one of equal fits is used: the one with the longer length scale and more
    # noise.
    axes = [np.linspace(high, low, points) for (low, high), points in zip(BOUNDS, GRID, strict=True)]
    steps = [axis[0] - axis[1] for axis in axes]
    best, gain = (axes[0][0], axes[1][0]), -math.inf
    for _ in range(1 + HALVINGS):
        gains = _gains(squares, standardised, *axes)
        row, column = divmod(int(gains.argmax()), len(axes[1]))
        if gains[row, column] > gain:
            best, gain = (axes[0][row], axes[1][column]), float(gains[row, column])
        steps = [step / 2 for step in steps]
        axes = [
            np.clip([at + step, at, at - step], *bounds) for at, step, bounds in zip(best, steps, BOUNDS, strict=True)
        ]
    # A signal has two fitted parameters. The Bayesian information criterion requires that two parameters raise the log
    # likelihood by more than ln m. Otherwise the best of many fits to pure noise would often have a short length scale
    # and a high score.
    return float(_signal_share(best[1]) / np.exp(best[0])) if gain > math.log(len(losses)) else 0.0


def _signal_share(log_noises: Array) -> Array:
    return 1.0 / (1.0 + 10.0**log_noises)


def _gains(squares: Array, standardised: Array, log_scales: Array, log_noises: Array) -> Array:
    """Return the log marginal likelihood minus that of pure noise, shape (a ln length scales, b log10 noise ratios).

    z are the standardised losses, and C their correlations. The total variance has its best value, z' C^-1 z / m
    (profile likelihood).
    """
    m = len(standardised)
    diagonal = np.arange(m)
    share = _signal_share(log_noises)[:, None, None]
    # C bordered with z: the last row of its Cholesky factor is L^-1 z, so one batched call gives determinant and
    # quadratic form. The corner only has to exceed z' C^-1 z, which is at most m * 1e8 here. An eigendecomposition
    # would do for all noise ratios at once, but takes as long as 12 Cholesky factors, or as hundreds of them if LAPACK
    # uses threads.
    bordered = np.empty((len(log_noises), m + 1, m + 1))
    gains = np.empty((len(log_scales), len(log_noises)))
    for row, log_scale in enumerate(log_scales):
        np.multiply(share, np.exp(squares * (-0.5 * math.exp(-2.0 * log_scale))), out=bordered[:, :m, :m])
        bordered[:, diagonal, diagonal] = 1.0
        bordered[:, m, :m] = standardised
        bordered[:, m, m] = 1e12
        factor = np.linalg.cholesky(bordered)  # reads the lower triangle only
        variance = np.square(factor[:, m, :m]).sum(axis=1) / m
        log_determinant = 2.0 * np.log(factor[:, diagonal, diagonal]).sum(axis=1)
        gains[row] = -0.5 * (m * np.log(variance) + log_determinant)
    return gains


def rank(names: Sequence[str], complexities: Mapping[str, float], performances: Mapping[str, float]) -> list[str]:
    """Return the subspaces in order: the first one is for the strongest class, the last one for the weakest class.

    Subspaces are sorted by the product of their positions (from 1) by complexity and by performance, both descending.
    The smallest product comes first. Equal scores and equal products keep the order of `names`. While all performances
    are equal, the position by performance is that in `names`, so `names` should be in descending complexity. Raises
    KeyError for a name without a score. Source: SHADHO, arXiv 1707.01428.
    """
    by_complexity = _positions(names, complexities)
    by_performance = _positions(names, performances)
    return sorted(names, key=lambda name: by_complexity[name] * by_performance[name])


def _positions(names: Sequence[str], scores: Mapping[str, float]) -> dict[str, int]:
    # `reverse` keeps equal scores in their old order, so ties are stable here too.
    descending = sorted(names, key=lambda name: scores[name], reverse=True)
    return {name: position for position, name in enumerate(descending, start=1)}


def pair(subspaces: Sequence[T], classes: Sequence[U]) -> dict[U, list[T]]:
    """Return the subspaces of each compute class, best first. Every subspace is in at least two neighbouring classes.

    Both arguments are ranked: index 0 is the top subspace and the strongest class. A single class gets all subspaces.
    Without subspaces every list is empty, and without classes the result is empty. Source: SHADHO, arXiv 1707.01428;
    the second class of each subspace is ours.
    """
    if len(classes) < 2 or not subspaces:
        return {name: list(subspaces) for name in classes}
    members: list[set[int]] = [set() for _ in classes]
    # The paper goes through the longer list L by i, and increments the place j in the shorter list S when i > ceil((j +
    # 1) |L| / |S| - 1), that is, when i |S| >= (j + 1) |L|. So j can be computed by an integer division, without
    # rounding errors.
    longer = max(len(subspaces), len(classes))
    for i in range(longer):
        subspace, place = i * len(subspaces) // longer, i * len(classes) // longer
        # The next class towards the middle; it exists, because there are at least two classes.
        neighbour = place + 1 if 2 * place < len(classes) else place - 1
        members[place].add(subspace)
        members[neighbour].add(subspace)
    return {name: [subspaces[k] for k in sorted(places)] for name, places in zip(classes, members, strict=True)}


def planck_weights(n: int) -> Array:
    """Return the probability of each of a class's n ranked subspaces that the class's next trial is from it, shape
    (n,).

    It is proportional to exp(-0.5 k) for position k. Source: SHADHO, arXiv 1707.01428 (truncated Planck distribution).
    """
    weights = np.exp(-DECAY * np.arange(n))
    return np.asarray(weights / weights.sum())


class PaperPolicy(FifoPolicy):
    """SHADHO's own policy: ranked subspaces on ranked classes, Planck weights within a class (arXiv 1707.01428).

    Promoted trials come first, as with `FifoPolicy`. A class takes trials of other subspaces if no subspace of its own
    is open, so no slot is idle while there is work.
    """

    def __init__(self, subspaces: Sequence[Subspace], generator: np.random.Generator) -> None:
        self._complexity = {s.name: complexity(s.domains.values()) for s in subspaces}
        # In descending complexity, because this order is the order by performance while all performances are equal.
        self._subspaces = {s.name: s for s in sorted(subspaces, key=lambda s: -self._complexity[s.name])}
        self._performance = dict.fromkeys(self._subspaces, START_VALUE)
        #: by subspace: features and loss of each of its latest trials
        self._history: dict[str, deque[tuple[Array, float]]] = {name: deque(maxlen=HISTORY) for name in self._subspaces}
        #: by subspace: number of results since its last score
        self._news: Counter[str] = Counter()
        self._results = 0
        self._generator = generator
        self._classes: tuple[str, ...] = ()
        #: by class: its subspaces, the highest ranked first
        self.mapping: dict[str, list[str]] = {}

    def see(self, classes: Sequence[ComputeClass]) -> None:
        names = tuple(compute_class.name for compute_class in classes)
        if names != self._classes:
            self._classes = names
            self._rank()

    def tell(self, trials: Sequence[Trial], following: Mapping[str, int] | None = None) -> None:
        # A single subspace needs no ranking.
        if len(self._subspaces) < 2:
            return
        # Losses of different budgets cannot be compared, so those of promoted trials are left out.
        known = (t for t in trials if t.outcome.loss is not None and not t.rung and t.subspace in self._history)
        told = [(t.subspace, t.params, t.outcome.loss) for t in known]
        for name, results in groupby(sorted(told, key=itemgetter(0)), itemgetter(0)):
            _, params_list, losses = zip(*results, strict=True)
            self._news[name] += len(losses)
            # The history would drop these trials anyway, because usually at least half of the later trials have a loss.
            if (following or {}).get(name, 0) > 2 * HISTORY:
                continue
            rows = features(params_list[-HISTORY:], self._subspaces[name].domains)
            self._history[name].extend(zip(rows, losses[-HISTORY:], strict=True))
        self._results += len(told)
        if self._results >= REFRESH_RESULTS and not following:
            self._refresh()

    def _next(self, slot: Slot, names: Sequence[str]) -> str:
        ranked = [name for name in self.mapping.get(slot.compute_class.name, ()) if name in names]
        if len(ranked) < 2:
            return ranked[0] if ranked else names[0]
        return ranked[int(self._generator.choice(len(ranked), p=planck_weights(len(ranked))))]

    def _refresh(self) -> None:
        """Update the scores of subspaces with enough new results, and rank the subspaces."""
        for name, results in sorted(self._news.items()):
            if results >= NEWS * len(self._history[name]):
                rows, losses = zip(*self._history[name], strict=True)
                self._performance[name] = performance(np.array(rows), np.array(losses), self._generator)
                del self._news[name]
        self._results = 0
        self._rank()

    def _rank(self) -> None:
        self.mapping = pair(rank(list(self._subspaces), self._complexity, self._performance), self._classes)
