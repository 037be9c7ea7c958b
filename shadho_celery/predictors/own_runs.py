"""Departures of a trial's seconds from what is expected, as foretold by the runs of its own params so far.

What the params do to the seconds is learned from many trials; what else a trial has of its own, such as the data that
it takes, shows in its first run. A departure is a + e, a the trial's own and e new in each run. Of n runs with a mean
departure m the next one is expected to depart by n r m / (1 + (n - 1) r), with r the part of the variance that is a's:
the correlation of two runs of a trial (best linear prediction, as in Searle, Casella, McCulloch, "Variance Components",
1992, chapter 7).
"""

from __future__ import annotations

from collections import deque

#: latest pairs of runs that the correlation is taken from, and the least number of them
LATEST, ENOUGH = 128, 12


class OwnRuns:
    """Learns how much of a departure a trial's next run repeats."""

    def __init__(self) -> None:
        #: by origin, sum and number of the departures
        self._runs: dict[int, tuple[float, int]] = {}
        #: departures of a trial's latest run and the mean of those before
        self._pairs: deque[tuple[float, float]] = deque(maxlen=LATEST)
        self._correlation = 0.0

    def tell(self, origin: int, departure: float) -> None:
        """Learn the departure of a run from the log seconds that were expected without regard to earlier ones."""
        total, count = self._runs.get(origin, (0.0, 0))
        self._runs[origin] = total + departure, count + 1
        if count:
            self._pairs.append((departure, total / count))
            self._correlation = self._correlated()

    def departure(self, origin: int) -> float:
        """Return the departure that is expected of an origin's next run; 0 without earlier ones."""
        total, count = self._runs.get(origin, (0.0, 0))
        return total * self._correlation / (1.0 + (count - 1) * self._correlation) if count else 0.0

    def forget(self) -> None:
        """Forget all runs."""
        self._runs.clear()
        self._pairs.clear()
        self._correlation = 0.0

    def _correlated(self) -> float:
        if len(self._pairs) < ENOUGH:
            return 0.0
        product = sum(one * other for one, other in self._pairs)
        squares = (sum(one * one for one, _ in self._pairs) * sum(other * other for _, other in self._pairs)) ** 0.5
        return min(max(0.0, product / squares), 1.0) if squares else 0.0
