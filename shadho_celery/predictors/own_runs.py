"""Departures of a trial's seconds from what is expected, as foretold by the runs of its own params so far.

What the params do to the seconds is learned from many trials; what else a trial has of its own, such as the data that
it takes, shows in its first run. A departure is a + e, a the trial's own and e new in each run. Of n runs with a mean
departure m the next one is expected to depart by n r m / (1 + (n - 1) r), with r the part of the variance that is a's:
the correlation of two runs of a trial (best linear prediction, as in Searle, Casella, McCulloch, "Variance Components",
1992, chapter 7).
"""

from __future__ import annotations

from collections import deque

from shadho_celery.predictors.features import Array

#: latest pairs of runs that the correlation is taken from, and the least number of them
LATEST, ENOUGH = 128, 12


class OwnRuns:
    """Learns how much of a departure a trial's next run repeats.

    A departure is from what is believed now: at the first runs little was.
    """

    def __init__(self) -> None:
        #: by origin, column of the class and log seconds of a unit of work of each run
        self._runs: dict[int, list[tuple[int, float]]] = {}
        #: departures of a trial's latest run and the mean of those before
        self._pairs: deque[tuple[float, float]] = deque(maxlen=LATEST)
        self._correlation = 0.0

    def __contains__(self, origin: int) -> bool:
        """Return whether a run of an origin is known."""
        return origin in self._runs

    def tell(self, origin: int, column: int, work: float, expected: Array | None = None) -> None:
        """Learn a run's log seconds of a unit of work on a class.

        `expected` are those without regard to earlier runs, by column; they are needed where there are earlier ones.
        """
        if expected is not None and origin in self._runs:
            self._pairs.append((work - float(expected[column]), self._mean(origin, expected)))
            self._correlation = self._correlated()
        self._runs.setdefault(origin, []).append((column, work))

    def departure(self, origin: int, expected: Array) -> float:
        """Return the departure that is expected of an origin's next run; 0 without earlier ones."""
        if origin not in self._runs:
            return 0.0
        count, correlation = len(self._runs[origin]), self._correlation
        return count * correlation * self._mean(origin, expected) / (1.0 + (count - 1) * correlation)

    def forget(self) -> None:
        """Forget all runs."""
        self._runs.clear()
        self._pairs.clear()
        self._correlation = 0.0

    def _mean(self, origin: int, expected: Array) -> float:
        runs = self._runs[origin]
        return sum(work - float(expected[column]) for column, work in runs) / len(runs)

    def _correlated(self) -> float:
        if len(self._pairs) < ENOUGH:
            return 0.0
        product = sum(one * other for one, other in self._pairs)
        squares = (sum(one * one for one, _ in self._pairs) * sum(other * other for _, other in self._pairs)) ** 0.5
        return min(max(0.0, product / squares), 1.0) if squares else 0.0
