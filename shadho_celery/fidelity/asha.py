"""ASHA: a trial is promoted as soon as it is among the best 1 / eta of its rung. No trial waits for others."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence
from itertools import accumulate

from shadho_celery.core.columns import feasible_loss, feasible_losses
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.fidelity.brackets import Result, best_of, rung_of
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.rounds import Rounds, Wanted

#: maximum number of trials of one rung that are offered at a time
MOST_OFFERED = 32


class Rung:
    """Results at one budget, and the promotions from it."""

    def __init__(self) -> None:
        #: sorted pairs (loss, origin) of all results; and of the results that were not promoted
        self._all: list[tuple[float, int]] = []
        self.stayed: list[tuple[float, int]] = []
        #: by origin, in the order of the results: the loss
        self.losses: dict[int, float] = {}
        #: by origin: number of its trial on the next rung
        self.promoted: dict[int, int] = {}
        #: results with several losses; and the candidates, with the numbers on which they depend
        self._several: list[Result] = []
        self._best: tuple[tuple[int, int, int], list[int]] = (0, 0, 0), []

    def __len__(self) -> int:
        return len(self._all)

    def tell(self, origin: int, loss: float, losses: tuple[float, ...] = ()) -> None:
        """Add the loss of a trial on this rung, and its `losses` if it has several. `origin` is its origin."""
        if len(losses) > 1:
            self._several.append((losses, origin))
        insort(self._all, (loss, origin))
        self.losses[origin] = loss
        if origin not in self.promoted:
            insort(self.stayed, (loss, origin))

    def candidates(self, count: int) -> list[int]:
        """Return the origins of those of the best `count` results that were not promoted, the best first.

        Failed trials are left out. At most MOST_OFFERED origins are returned.
        """
        if count < 1 or not self.stayed:
            return []
        if self._several:
            now = len(self._several), len(self.promoted), count
            if self._best[0] != now:
                self._best = now, best_of(self._several, count, self.promoted)[:MOST_OFFERED]
            return [origin for origin in self._best[1] if origin not in self.promoted]
        worst = self._all[min(count, len(self._all)) - 1]
        end = min(bisect_right(self.stayed, worst), MOST_OFFERED)
        return [origin for loss, origin in self.stayed[:end] if loss < math.inf]

    def promote(self, origin: int, number: int) -> None:
        """Record that an origin was promoted to the next rung, as the trial with this number."""
        if origin in self.losses and origin not in self.promoted:
            del self.stayed[bisect_left(self.stayed, (self.losses[origin], origin))]
        self.promoted[origin] = number

    def take_back(self, origin: int, number: int) -> None:
        """Undo the promotion of an origin, if it was promoted as the trial with this number."""
        if self.promoted.get(origin) == number:
            del self.promoted[origin]
            if origin in self.losses:
                insort(self.stayed, (self.losses[origin], origin))


class Asha(Rounds):
    """Asynchronous successive halving. The highest rung with a candidate comes first, then a new trial.

    A candidate is a trial among the best floor(n / eta) of the n results of its rung so far that was not promoted yet.
    Failed trials rank last. A cancelled trial is ignored, and its origin may be promoted again. Source: Li, Jamieson,
    Rostamizadeh, Gonina, Ben-tzur, Hardt, Recht, Talwalkar, "A System for Massively Parallel Hyperparameter Tuning",
    MLSys 2020, algorithm 2.
    """

    def __init__(self, ladder: Ladder, limit: int | None = None) -> None:
        """With a `limit` on trials, new ones start on the lowest rung whose round of ``1 + eta + ...`` trials fits."""
        self._budgets: Sequence[float] = ladder.budgets
        self._eta = ladder.eta
        rounds = accumulate(ladder.eta**above for above in range(ladder.top + 1))
        self._start: int = ladder.top + 1 - max(sum(limit is None or size <= limit for size in rounds), 1)
        #: True once no more new trials are drawn
        self._is_finite = False
        self._rungs = [Rung() for _ in self._budgets]

    def offers(self, slots: int = 0) -> Sequence[Wanted]:
        promotions = [
            Wanted(budget=self._budgets[place + 1], rung=place + 1, origin=origin)
            for place in range(len(self._rungs) - 2, -1, -1)
            for origin in self._promotable(place)
        ]
        first = self._first()
        return [*promotions, Wanted(budget=self._budgets[first], rung=first)]

    def _promotable(self, place: int) -> Sequence[int]:
        """Return the origins that may be promoted from a rung, the best first."""
        rung = self._rungs[place]
        # A rung that gets no more trials promotes at least its best trial, even if it has fewer than eta trials.
        return rung.candidates(-(-len(rung) // self._eta) if self._is_finite else len(rung) // self._eta)

    def _first(self) -> int:
        """Return the index of the rung on which a new trial starts."""
        return self._start

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
            self._rungs[place].tell(origin, feasible_loss(trial), feasible_losses(trial))
        elif place:
            self._rungs[place - 1].take_back(origin, trial.number)

    def end_draws(self) -> None:
        self._is_finite = True

    @property
    def promotable(self) -> Collection[int]:
        # Each of them is promoted once enough others have ended with a higher loss.
        return {origin for rung in self._rungs[:-1] for loss, origin in rung.stayed if loss < math.inf}
