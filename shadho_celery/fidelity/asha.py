"""ASHA: a trial is promoted as soon as it is among the best 1 / eta of its rung. No trial waits for others."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence

from shadho_celery.core.columns import feasible_losses
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.fidelity.brackets import Result, best_of, rung_of
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.rounds import Rounds, Wanted

#: maximum number of trials of one rung that are offered at a time
MOST_OFFERED = 32


class Rung:
    """Results at one budget, and the promotions from it."""

    def __init__(self) -> None:
        #: all results, sorted; and the results that were not promoted
        self._all: list[Result] = []
        self.stayed: list[Result] = []
        #: by origin: its result; and the number of its trial on the next rung
        self._results: dict[int, Result] = {}
        self.promoted: dict[int, int] = {}
        #: the candidates with several losses, and the numbers on which they depend
        self._best: tuple[tuple[int, int, int], list[int]] = (0, 0, 0), []

    def __len__(self) -> int:
        return len(self._all)

    def tell(self, origin: int, losses: tuple[float, ...]) -> None:
        """Add the losses of a trial on this rung, see `feasible_losses`. `origin` is its origin."""
        result = self._results[origin] = losses, origin
        insort(self._all, result)
        if origin not in self.promoted:
            insort(self.stayed, result)

    def candidates(self, count: int) -> list[int]:
        """Return the origins of those of the best `count` results that were not promoted, the best first.

        Failed trials are left out. At most MOST_OFFERED origins are returned.
        """
        if count < 1 or not self.stayed:
            return []
        if len(self._all[0][0]) > 1:
            now = len(self._all), len(self.promoted), count
            if self._best[0] != now:
                self._best = now, best_of(self._all, count, self.promoted)[:MOST_OFFERED]
            return [origin for origin in self._best[1] if origin not in self.promoted]
        worst = self._all[min(count, len(self._all)) - 1]
        end = min(bisect_right(self.stayed, worst), MOST_OFFERED)
        return [origin for losses, origin in self.stayed[:end] if losses[0] < math.inf]

    def promote(self, origin: int, number: int) -> None:
        """Record that an origin was promoted to the next rung, as the trial with this number."""
        if origin in self._results and origin not in self.promoted:
            del self.stayed[bisect_left(self.stayed, self._results[origin])]
        self.promoted[origin] = number

    def take_back(self, origin: int, number: int) -> None:
        """Undo the promotion of an origin, if it was promoted as the trial with this number."""
        if self.promoted.get(origin) == number:
            del self.promoted[origin]
            if origin in self._results:
                insort(self.stayed, self._results[origin])


class Asha(Rounds):
    """Asynchronous successive halving. The highest rung with a candidate comes first, then a new trial.

    A candidate is a trial among the best floor(n / eta) of the n results of its rung so far that was not promoted yet.
    Failed trials rank last. A cancelled trial is ignored, and its origin may be promoted again. Source: Li, Jamieson,
    Rostamizadeh, Gonina, Ben-tzur, Hardt, Recht, Talwalkar, "A System for Massively Parallel Hyperparameter Tuning",
    MLSys 2020, algorithm 2.
    """

    def __init__(self, ladder: Ladder) -> None:
        self._budgets: Sequence[float] = ladder.budgets
        self._eta = ladder.eta
        #: True once no more new trials are drawn
        self._is_finite = False
        self._rungs = [Rung() for _ in self._budgets]

    def offers(self, slots: int = 0) -> Sequence[Wanted]:
        # A rung that gets no more trials promotes at least its best trial, even if it has fewer than eta trials.
        more = self._eta - 1 if self._is_finite else 0
        promotions = [
            Wanted(budget=self._budgets[place], rung=place, origin=origin)
            for place in range(len(self._rungs) - 1, 0, -1)
            for origin in self._rungs[place - 1].candidates((len(self._rungs[place - 1]) + more) // self._eta)
        ]
        return [*promotions, Wanted(budget=self._budgets[0], rung=0)]

    def add(self, trial: Trial) -> None:
        place = rung_of(trial, self._budgets)
        if trial.origin is None or trial.state is TrialState.CANCELLED:
            return
        if place is None and trial.budget is not None:
            # The trial reached this budget under another ladder. It counts as promoted to all lower budgets, because
            # its checkpoint is already past them.
            for lower, budget in enumerate(self._budgets[1:]):
                if budget <= trial.budget:
                    self._rungs[lower].promote(trial.origin, trial.number)
        elif place:
            self._rungs[place - 1].promote(trial.origin, trial.number)

    def tell(self, trial: Trial) -> None:
        place = rung_of(trial, self._budgets)
        if place is None:
            return
        origin = trial.number if trial.origin is None else trial.origin
        if trial.state is not TrialState.CANCELLED:
            self._rungs[place].tell(origin, feasible_losses(trial))
        elif place:
            self._rungs[place - 1].take_back(origin, trial.number)

    def end_draws(self) -> None:
        self._is_finite = True

    @property
    def promotable(self) -> Collection[int]:
        # Each of them is promoted once enough others have ended with a higher loss.
        return {origin for rung in self._rungs[:-1] for losses, origin in rung.stayed if losses[0] < math.inf}
