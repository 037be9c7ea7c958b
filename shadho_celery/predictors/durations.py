"""Durations by subspace and compute class, learned from trials whose times vary much.

The logarithm of a trial's seconds is modelled as a_j + b_c + u_jc + noise for subspace j and class c: effects of row
and column, and the pair's departure from them, u_jc ~ N(0, tau^2). All of it is estimated from the trials (empirical
Bayes). A pair with few trials is estimated close to its row and column, and a pair with many trials close to its
measurements. Source: Morris, "Parametric Empirical Bayes Inference", JASA 78, 1983, in its two-way form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: prior variance of log seconds within a pair and variance of u; and the number of trials or pairs for which each
#: counts
NOISE_VARIANCE, PAIR_VARIANCE, BELIEF = 0.25, 0.1, 4.0
#: shrinkage of a row or a column of the table towards the overall mean, in units of a well-known pair's weight
RIDGE = 0.02
#: rounds of alternating least squares per estimate, which starts from the end of the last one
ROUNDS = 8
#: a trial further out than this many standard deviations counts as exactly that far out, because of stragglers
FAR_OUT = 4.0
#: a new estimate is made when the trials have grown by this fraction, so its cost per trial falls over time
GROWTH = 0.02


class Estimate(NamedTuple):
    """Estimate for every pair; shapes (subspaces, classes), in log seconds."""

    mean: Array
    #: standard deviation of the estimate of u, the pair's own effect
    deviation: Array
    #: b_c, shape (classes,): a class's log seconds minus the mean of all classes
    by_class: Array
    #: standard deviation of one trial within its pair
    noise: float


class Durations:
    """A table of log seconds by subspace (rows) and compute class (columns, added as classes appear)."""

    def __init__(self, rows: int) -> None:
        #: by pair: number of trials, sum of their weights, of weight times log seconds, of weight times its square
        self._told = np.zeros((4, rows, 0))
        #: the same four sums for trials that still run and have run unusually long
        self._open = np.zeros((4, rows, 0))
        self._row_part = np.zeros(rows)
        self._column_part = np.zeros(0)
        self._pair_variance = PAIR_VARIANCE
        #: number of trials by column, as plain ints because they are read every turn; and total
        self.by_column: list[int] = []
        self._trials = 0
        self._estimated_at = -1
        self._estimate: Estimate | None = None
        #: number of changes of the estimate
        self.version = 0

    def add_column(self) -> None:
        """Add a class of which nothing is known."""
        blank = np.zeros((4, len(self._row_part), 1))
        self._told, self._open = (np.concatenate([table, blank], axis=2) for table in (self._told, self._open))
        self._column_part = np.append(self._column_part, 0.0)
        self.by_column.append(0)
        self._estimate = None

    def forget(self) -> None:
        """Forget all trials, and keep the classes."""
        self._told[:], self._open[:] = 0.0, 0.0
        self._row_part[:], self._column_part[:] = 0.0, 0.0
        self._pair_variance = PAIR_VARIANCE
        self.by_column = [0] * len(self.by_column)
        self._trials, self._estimated_at, self._estimate = 0, -1, None

    def tell(self, row: int, column: int, log_seconds: float, weight: float = 1.0) -> None:
        """Learn from a trial of the pair with this duration. Its noise has the variance of one trial divided by
        `weight`.
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
        # A class that appears late has few trials among many. The first trials of a pair always trigger an estimate.
        if (count + 1) & count == 0:
            self._estimate = None

    def suppose(self, running: Sequence[tuple[int, int, float, float]]) -> None:
        """Learn from all currently running trials: row, column, log seconds so far and weight.

        A trial that has run longer than expected for its pair counts as if it ended now. A pair that is much slower
        than its row and column suggest is therefore noticed before its first trial ends.
        """
        estimate = self.estimate()
        supposed = np.zeros_like(self._open)
        for row, column, log_seconds, weight in running:
            if log_seconds > estimate.mean[row, column] + estimate.noise:
                supposed[:, row, column] += (1.0, weight, weight * log_seconds, weight * log_seconds**2)
        if supposed.any() or self._open.any():
            self._open = supposed
            self._estimate = None

    def estimate(self) -> Estimate:
        """Return the current estimate; for a table without trials, one second for all pairs."""
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
        # A pair's mean differs from a_j + b_c by its own effect and by the noise left in it; 0 for a pair without
        # trials.
        weight = np.where(count > 0, 1.0 / (self._pair_variance + noise / tried), 0.0)
        common = float((weight * measured).sum() / max(weight.sum(), 1e-12))
        # Effects by alternating weighted least squares, in units of the heaviest pair, so that the ridge shrinks with
        # the noise and not with the number of trials. Without trials they are the common mean and 0.
        scaled = weight / max(float(weight.max(initial=0.0)), 1e-12)
        by_row, by_column = scaled.sum(axis=1) + RIDGE, scaled.sum(axis=0) + RIDGE
        for _ in range(ROUNDS):
            rest = scaled * (measured - self._column_part)
            self._row_part = (rest.sum(axis=1) + RIDGE * common) / by_row
            rest = scaled * (measured - self._row_part[:, None])
            self._column_part = rest.sum(axis=0) / by_column
        prior = self._row_part[:, None] + self._column_part
        own = (measured - prior) * self._pair_variance * weight
        variance = self._pair_variance * (1.0 - self._pair_variance * weight)
        # One step of expectation maximisation per fit is enough, because trials arrive steadily.
        self._pair_variance = float((own**2 + variance).sum() + BELIEF * PAIR_VARIANCE) / (own.size + BELIEF)
        return Estimate(prior + own, np.sqrt(variance), self._column_part.copy(), math.sqrt(noise))
