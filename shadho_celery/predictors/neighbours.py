"""Prediction for given params from the past trials with the most similar params."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shadho_celery.predictors.features import Array

#: number of past trials used for a prediction
NEIGHBOURS = 20
#: number of latest trials kept, so that 100 predictions take about two milliseconds
MEMORY = 2000
#: with fewer trials, all of them are neighbours
MIN_TRIALS = 2 * NEIGHBOURS
#: after this many trials, only one in this many is used to compare predictions from neighbours and from all trials
EXAMINED, EXAMINED_LATER = 200, 8
#: weight of the newest error in the moving average of errors
DECAY = 0.02
#: number of trials from which on a highest value is known; correlation above which values may depend on a feature, and
#: standard deviation of log values that count as equal
LEAST, RELATED, SAME = 3, 0.3, 0.02


class Neighbours:
    """Predicts a trial's value from the latest trials of one subspace: from the most similar ones, or from all of them.

    A trial has a row of features in [0, 1], and a value. Each trial is first predicted both from its neighbours and
    from all trials, and the method with the smaller recent error is used for predictions (prequential; Dawid 1984).
    """

    def __init__(self, dimensions: int) -> None:
        # Reserved at once, because pages that are never written take no memory.
        self._features = np.empty((MEMORY, dimensions))
        self._values = np.empty(MEMORY)
        self._told = 0
        #: mean absolute errors of recent predictions from the neighbours, and from all trials
        self._errors = np.zeros(2)

    def __len__(self) -> int:
        return min(self._told, MEMORY)

    @property
    def are_useful(self) -> bool:
        """Predictions from the neighbours are better than those from all trials."""
        return self._told > MIN_TRIALS and bool(self._errors[0] < self._errors[1])

    def tell(self, row: Array, value: float) -> None:
        """Store a trial. `row` has shape (d,)."""
        if self._told >= MIN_TRIALS and (self._told < EXAMINED or self._told % EXAMINED_LATER == 0):
            known = self._values[: len(self)]
            near = np.median(known[self._nearest(row[None, :])[0]])
            self._errors += DECAY * (np.abs([near - value, np.median(known) - value]) - self._errors)
        place = self._told % MEMORY
        self._features[place], self._values[place] = row, value
        self._told += 1

    def predict(self, rows: Array) -> Array:
        """Return the median value that is expected at each of `rows`, shapes (n, d) and (n,).

        There must be at least one trial.
        """
        known = self._values[: len(self)]
        if self.are_useful:
            return np.asarray(np.median(known[self._nearest(rows)], axis=1))
        return np.full(len(rows), np.median(known))

    def highest(self, row: Array) -> float | None:
        """Return the highest value of the most similar trials, or of all if these do not predict better.

        Return None if there are fewer than LEAST trials, or if a feature on which the values depend is outside the
        range of the trials.
        """
        known, values = self._features[: len(self)], self._values[: len(self)]
        if len(values) < LEAST:
            return None
        outside = (row < known.min(axis=0)) | (row > known.max(axis=0))
        if any(_are_related(column, values) for column in known[:, outside].T):
            return None
        return float(np.max(values[self._nearest(row[None, :])[0]] if self.are_useful else values))

    def _nearest(self, rows: Array) -> NDArray[np.intp]:
        """Return the indexes of the nearest trials, shape (n, NEIGHBOURS)."""
        known = self._features[: len(self)]
        squares = np.square(known).sum(axis=1) - 2.0 * rows @ known.T  # up to a constant for each row
        return np.argpartition(squares, NEIGHBOURS - 1, axis=1)[:, :NEIGHBOURS]


def _are_related(feature: Array, values: Array) -> bool:
    """Return whether values may depend on a feature: they are correlated, or the feature was the same in all trials."""
    spread = float(feature.std() * values.std())
    if not feature.std():
        return True
    product = (feature - feature.mean()) @ (values - values.mean()) / len(values)
    return bool(values.std() > SAME and abs(product) > RELATED * spread)
