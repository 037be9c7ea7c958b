"""What a trial of certain params will do, judged by the past trials whose params were most alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: past trials that a prediction is made of
NEIGHBOURS = 20
#: latest trials that are remembered: 100 predictions then take about two milliseconds
MEMORY = 2000
#: with fewer trials all of them are neighbours
MIN_TRIALS = 2 * NEIGHBOURS
#: after this many trials only each eighth is used to compare the two ways of predicting
EXAMINED, EXAMINED_LATER = 200, 8
#: how fast the record of past errors forgets
DECAY = 0.02
#: normal quantiles that stand in for trials while there are few
STANDING_IN = np.array([-1.28, -0.52, 0.0, 0.52, 1.28])
#: with at least so many trials they are not needed any more
ENOUGH = 20


class Neighbours:
    """The latest trials of one subspace: a row of features in [0, 1], a value, and the group the value belongs to.

    Values are judged as departures from their group's centre, which the caller knows best at the time of asking: here
    a compute class's log seconds. Params count only where they have shown that they help: each trial is first
    predicted from its neighbours and from all trials, and what erred less of late is used (prequential; Dawid 1984).
    """

    def __init__(self, dimensions: int) -> None:
        self._features = np.empty((16, dimensions))
        self._values = np.empty(16)
        self._groups = np.empty(16, dtype=np.intp)
        self._told = 0
        #: mean absolute errors of late: from the neighbours, from all
        self._errors = np.zeros(2)

    def __len__(self) -> int:
        return min(self._told, MEMORY)

    @property
    def are_useful(self) -> bool:
        """True where the params tell more than the subspace as a whole."""
        return self._told > MIN_TRIALS and bool(self._errors[0] < self._errors[1])

    @property
    def middle(self) -> float:
        """The median of the values; there must be one."""
        return float(np.median(self._values[: len(self)]))

    def tell(self, row: Array, value: float, group: int, centres: Array) -> None:
        """Remember a trial; `row` of shape (d,), `centres` of shape (groups,) as of now."""
        if self._told >= MIN_TRIALS and (self._told < EXAMINED or self._told % EXAMINED_LATER == 0):
            self._examine(row, value - float(centres[group]), centres)
        if self._told == len(self._values) < MEMORY:
            self._grow()
        place = self._told % len(self._values)
        self._features[place], self._values[place], self._groups[place] = row, value, group
        self._told += 1

    def departures(self, rows: Array, quantiles: Array, centres: Array, spread: float) -> Array:
        """Quantiles, shape (n, q), of how far values depart from their centre at `rows`, shape (n, d).

        `spread` is the standard deviation that is believed in as long as there are few trials.
        """
        known = self._departures(centres)
        if len(known) < ENOUGH:
            known = np.concatenate([known, STANDING_IN * spread])
        if not self.are_useful:
            return np.tile(np.quantile(known, quantiles), (len(rows), 1))
        near: Array = np.quantile(known[self._nearest(rows)], quantiles, axis=1).T
        return near

    def _examine(self, row: Array, departure: float, centres: Array) -> None:
        known = self._departures(centres)
        near = np.median(known[self._nearest(row[None, :])[0]])
        self._errors += DECAY * (np.abs([near - departure, np.median(known) - departure]) - self._errors)

    def _departures(self, centres: Array) -> Array:
        kept = len(self)
        departures: Array = self._values[:kept] - centres[self._groups[:kept]]
        return departures

    def _nearest(self, rows: Array) -> NDArray[np.intp]:
        """Places of the nearest trials, shape (n, NEIGHBOURS)."""
        known = self._features[: len(self)]
        squares = np.square(known).sum(axis=1) - 2.0 * rows @ known.T  # but for a constant of each row
        return np.argpartition(squares, NEIGHBOURS - 1, axis=1)[:, :NEIGHBOURS]

    def _grow(self) -> None:
        room = min(MEMORY, 2 * len(self._values))
        more = room - len(self._values)
        self._features = np.concatenate([self._features, np.empty((more, self._features.shape[1]))])
        self._values = np.concatenate([self._values, np.empty(more)])
        self._groups = np.concatenate([self._groups, np.empty(more, dtype=np.intp)])
