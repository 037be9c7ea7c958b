"""Repeats: trials with the params of an earlier trial under other seeds, so that luck does not decide which is best.

`Repeats` finds the trials to repeat, and the best trial by the mean loss of it and its repeats. It is made from the
finished trials, so a resumed study continues as before.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from itertools import combinations
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from shadho_celery.core.columns import feasible_loss
from shadho_celery.core.trial import Trial, TrialState, turned_first

#: number of best trials that are repeated
FEW = 3

#: negated budget of a trial, whether it lacks results or one of them is none, the mean of its losses, and its number
_Key = tuple[float, bool, float, int]


class Repeated(Struct, frozen=True, kw_only=True):
    """Results of a trial and its repeats: complete, feasible losses of the same params under several seeds."""

    #: number of results
    results: int
    mean: float
    #: standard deviation of a single loss
    deviation: float

    @property
    def words(self) -> str:
        """Text with the number of results and their standard deviation."""
        return f"mean of {self.results}, standard deviation {self.deviation:.3g}"

    def turned(self, objectives: Mapping[str, str]) -> Repeated:
        """Return the results with the mean as the objective returned it: negated if it is maximised."""
        return replace(self, mean=turned_first(self.mean, objectives))


class Repeats:
    """Orders feasible COMPLETE trials by budget, the highest first, then by the mean loss of a trial and its repeats.

    A trial of which a repeat has failed, was pruned or violates a constraint comes last. Cancelled repeats are ignored.
    """

    def __init__(self, wanted: int) -> None:
        #: number of results that each of the best trials gets, its own included; 1 in a study without repeats, where
        #: nothing is kept
        self.wanted = wanted
        #: by number of a trial: negated budget, number of its folder, and the losses of the trial and its repeats
        self._results: dict[int, tuple[float, int, list[float]]] = {}
        #: keys of the trials, in ascending order
        self._order: list[_Key] = []

    def tell(self, trial: Trial) -> None:
        """Add a finished trial. A trial comes before its repeats."""
        first, loss = int(trial.origin or 0) if trial.is_repeat else trial.number, feasible_loss(trial)
        if first in self._results and trial.state is not TrialState.CANCELLED:
            del self._order[bisect_left(self._order, self._key(first))]
        elif self.wanted > 1 and not trial.is_repeat and loss < math.inf:
            budget = math.inf if trial.budget is None else trial.budget
            self._results[first] = -budget, trial.folder, []
        else:
            return
        self._results[first][-1].append(loss)
        insort(self._order, self._key(first))

    def _key(self, number: int) -> _Key:
        budget, _, losses = self._results[number]
        # Losses are divided before they are added, because a sum of very large floats overflows.
        mean = math.fsum(loss / len(losses) for loss in losses)
        return budget, len(losses) < self.wanted or mean == math.inf, mean, number

    def of(self, number: int) -> Repeated | None:
        """Return the results of a trial and its repeats; None if it has no repeats, or if one of them is no result."""
        *_, losses = self._results.get(number, [[]])
        if (count := len(losses)) < 2 or math.inf in losses:
            return None
        # For equal losses this is exactly 0. `hypot` does not overflow.
        apart = math.hypot(*(one - other for one, other in combinations(losses, 2)))
        return Repeated(results=count, mean=self._key(number)[2], deviation=apart / math.sqrt(count * (count - 1)))

    def best_few(self, count: int) -> list[int]:
        """Return the numbers of at most `count` best trials: those with all their results first."""
        return [number for *_, number in self._order[:count]]

    def folders(self, count: int) -> list[int]:
        """Return the numbers of the folders of at most `count` best trials."""
        return [self._results[number][1] for number in self.best_few(count)]

    def lacking(self, pending: Mapping[int, int], budget: float | None) -> list[int]:
        """Return the numbers of the trials to repeat, the best first, each once for each result that it lacks.

        These are the best FEW trials. `pending` has the numbers of their repeats that have not ended. Only trials at
        the full `budget` are repeated, if there are budgets.
        """
        found = []
        # The best trials by their means are the best of those with all their results, or the best of the others.
        others = bisect_left(self._order, (-(budget or math.inf), True))
        few = [*self._order[: min(others, FEW)], *self._order[others : others + FEW]]
        for own, _, mean, number in sorted(few, key=itemgetter(0, 2, 3))[:FEW]:
            if mean < math.inf and -own >= (budget or 0.0):
                found += [number] * (self.wanted - len(self._results[number][-1]) - pending.get(number, 0))
        return found
