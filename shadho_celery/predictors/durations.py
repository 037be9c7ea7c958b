"""Durations of trials by subspace and compute class, learned from noisy measurements.

The logarithm of a trial's seconds is modelled as a_j + b_c + u_jc + noise for subspace j and class c: an effect of the
subspace, an effect of the class, and the departure of their pair, u_jc ~ N(0, tau^2). Columns may form groups, such as
the widths of one class: a column without trials then has the effect of its group. Effects and variances are estimated
from the trials (empirical Bayes). The estimate of a pair with few trials is close to a_j + b_c, and that of a pair with
many trials is close to its measurements. Source: Morris, "Parametric Empirical Bayes Inference", JASA 78, 1983, in its
two-way form.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: prior variance of log seconds within a pair; prior variance of u; and number of trials or pairs for which a prior
#: counts
NOISE_VARIANCE, PAIR_VARIANCE, BELIEF = 0.25, 0.1, 4.0
#: ridge penalty of the effects of subspaces and classes, in units of the weight of the pair with the most evidence
RIDGE = 0.02
#: iterations of alternating least squares for an estimate, which start from the previous estimate
ROUNDS = 8
#: a trial that is further from its estimate counts as this many standard deviations from it, because of stragglers
FAR_OUT = 4.0
#: a new estimate is made when the trials have grown by this fraction, so its cost per trial falls over time
GROWTH = 0.02


class Estimate(NamedTuple):
    """Estimates for every pair of subspace and class, in log seconds, shapes (subspaces, classes)."""

    mean: Array
    #: posterior standard deviation of u, the pair's own effect
    deviation: Array
    #: standard deviation of the log seconds of single trials within a pair
    noise: float


class Durations:
    """Learns a table of log seconds by subspace (rows) and compute class (columns, added as classes appear)."""

    def __init__(self, rows: int) -> None:
        #: by pair: number of trials, and sums of weights, of weight times log seconds, and of weight times their square
        self._told = np.zeros((4, rows, 0))
        #: the same four numbers for running trials whose seconds are extrapolated, or that have run unusually long; and
        #: the number of those that are extrapolated
        self._open = np.zeros((4, rows, 0))
        self._extrapolated = np.zeros((rows, 0))
        self._row_part = np.zeros(rows)
        self._column_part = np.zeros(0)
        #: by column: its group, and the effect that it is assumed to have beside others of the group
        self._group_of: list[int] = []
        self._usual = np.zeros(0)
        self._pair_variance = PAIR_VARIANCE
        #: by column: number of trials, as plain ints, because they are read in every turn
        self.by_column: list[int] = []
        self._trials = 0
        self._estimated_at = -1
        self._estimate: Estimate | None = None
        #: number of changes of the estimate
        self.version = 0

    def add_column(self, group: int | None = None, usual: float = 0.0) -> None:
        """Add the column of a class without trials.

        Columns with the same `group` are assumed to differ by their `usual` log seconds. By default, a column is alone.
        """
        self._group_of.append(-1 - len(self._group_of) if group is None else group)
        self._usual = np.append(self._usual, usual)
        blank = np.zeros((4, len(self._row_part), 1))
        self._told, self._open = (np.concatenate([table, blank], axis=2) for table in (self._told, self._open))
        self._extrapolated = np.concatenate([self._extrapolated, blank[0]], axis=1)
        self._column_part = np.append(self._column_part, 0.0)
        self.by_column.append(0)
        self._estimate = None

    def forget(self) -> None:
        """Forget all trials, and keep the classes."""
        self._told[:], self._open[:], self._extrapolated[:] = 0.0, 0.0, 0.0
        self._row_part[:], self._column_part[:] = 0.0, 0.0
        self._pair_variance = PAIR_VARIANCE
        self.by_column = [0] * len(self.by_column)
        self._trials, self._estimated_at, self._estimate = 0, -1, None

    def tell(self, row: int, column: int, log_seconds: float, weight: float = 1.0) -> None:
        """Learn from a trial of the subspace `row` on the class `column`, which took this many log seconds. The
        variance of its noise is divided by `weight`.
        """
        estimate = self.estimate()
        count = int(self._told[0, row, column])
        if count >= 5:
            centre = float(estimate.mean[row, column])
            reach = FAR_OUT * math.hypot(estimate.noise / math.sqrt(weight), float(estimate.deviation[row, column]))
            log_seconds = min(max(log_seconds, centre - reach), centre + reach)
        self._told[:, row, column] += (1.0, weight, weight * log_seconds, weight * log_seconds**2)
        self.by_column[column] += 1
        self._trials += 1
        # A late class has few of the many trials. After the trials 1, 2, 4, 8, ... of a pair, a new estimate is due.
        if (count + 1) & count == 0:
            self._estimate = None

    def suppose(self, running: Sequence[tuple[int, int, float, float, bool]]) -> None:
        """Replace what is known of the running trials: row, column, log seconds, weight, and whether the seconds are
        extrapolated to the whole trial, which then counts like an ended one, or are those so far.

        A trial that has run much longer than expected for its pair counts as if it ended now. A pair that is much
        slower than its subspace and class suggest is therefore noticed before its first trial ends.
        """
        estimate = self.estimate()
        supposed, self._extrapolated = np.zeros_like(self._open), np.zeros_like(self._extrapolated)
        for row, column, log_seconds, weight, is_total in running:
            self._extrapolated[row, column] += is_total
            if is_total or log_seconds > estimate.mean[row, column] + estimate.noise:
                supposed[:, row, column] += (1.0, weight, weight * log_seconds, weight * log_seconds**2)
        if supposed.any() or self._open.any():
            self._open = supposed
            self._estimate = None

    @property
    def measured(self) -> Array:
        """Number of ended and extrapolated trials, shape (subspaces, columns)."""
        return np.asarray(self._told[0] + self._extrapolated)

    def estimate(self) -> Estimate:
        """Return the current estimate. It is one second for all pairs before there are trials."""
        due = self._trials >= self._estimated_at + max(1, int(GROWTH * self._estimated_at))
        if self._estimate is None or due:
            self._estimate = self._fit()
            self._estimated_at = self._trials
            self.version += 1
        return self._estimate

    def _fit(self) -> Estimate:
        count, weights, total, squares = self._told + self._open
        tried = np.where(weights > 0, weights, 1.0)
        measured = total / tried
        within = float((squares - weights * measured**2).sum())
        freedom = float(np.maximum(count - 1.0, 0.0).sum())
        noise = (max(within, 0.0) + BELIEF * NOISE_VARIANCE) / (freedom + BELIEF)
        # A pair's mean differs from a_j + b_c by u_jc and by the mean of its noise: the weight is the inverse of the
        # sum of both variances, and 0 for a pair without trials.
        weight = np.where(count > 0, 1.0 / (self._pair_variance + noise / tried), 0.0)
        common = float((weight * measured).sum() / max(weight.sum(), 1e-12))
        # Effects by alternating weighted least squares, with weights in units of the largest one, so that the ridge
        # depends on the noise and not on the number of trials. Without trials, effects are the common mean and 0.
        scaled = weight / max(float(weight.max(initial=0.0)), 1e-12)
        by_row, by_column = scaled.sum(axis=1) + RIDGE, scaled.sum(axis=0) + RIDGE
        for _ in range(ROUNDS):
            rest = scaled * (measured - self._column_part)
            self._row_part = (rest.sum(axis=1) + RIDGE * common) / by_row
            rest = scaled * (measured - self._row_part[:, None])
            self._column_part = (rest.sum(axis=0) + RIDGE * self._group_part(by_column - RIDGE)) / by_column
        prior = self._row_part[:, None] + self._column_part
        own = (measured - prior) * self._pair_variance * weight
        variance = self._pair_variance * (1.0 - self._pair_variance * weight)
        # One step of expectation maximisation for each fit is enough, because a fit follows every few trials.
        self._pair_variance = float((own**2 + variance).sum() + BELIEF * PAIR_VARIANCE) / (own.size + BELIEF)
        return Estimate(prior + own, np.sqrt(variance), math.sqrt(noise))

    def _group_part(self, weights: Array) -> Array:
        """Return the effect of each column by the weighted mean of its group; 0 for a column that is alone."""
        if len(set(self._group_of)) == len(self._group_of):
            return np.zeros(len(self._group_of))
        groups, places, sizes = np.unique(self._group_of, return_inverse=True, return_counts=True)
        total = np.bincount(places, weights * (self._column_part - self._usual), len(groups))
        means = (total / (np.bincount(places, weights, len(groups)) + RIDGE))[places]
        return np.where(sizes[places] > 1, means + self._usual, 0.0)


def estimated(told: Iterable[tuple[int, int, float]], shape: tuple[int, int]) -> Array:
    """Return the mean log seconds of each subspace on each class, of this shape, by trials as those of `tell`."""
    durations = Durations(shape[0])
    for _ in range(shape[1]):
        durations.add_column()
    for each in told:
        durations.tell(*each)
    return durations.estimate().mean


def filled(
    means: Mapping[tuple[str, str], float], subspaces: Collection[str], classes: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Return the mean seconds of each of the `subspaces` on each class: the known `means`, or estimates from them.

    `means` are by subspace and class. A class without any known mean counts as a mean class.
    """
    rows = {name: row for row, name in enumerate(subspaces)}
    columns = {name: column for column, name in enumerate(dict.fromkeys([*classes, *(name for _, name in means)]))}
    told = [(rows[subspace], columns[name], math.log(seconds)) for (subspace, name), seconds in means.items()]
    estimates = np.exp(estimated(told, (len(rows), len(columns))))
    return {
        subspace: {name: means.get((subspace, name), float(estimates[row, columns[name]])) for name in columns}
        for subspace, row in rows.items()
    }
