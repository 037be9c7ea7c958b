"""ASHA: a trial is promoted as soon as it is among the best 1 / eta of its rung. No trial waits for others."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import islice

from shadho_celery.core.best import feasible_loss
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.fidelity.brackets import rung_of
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.rounds import Round, Wanted

#: maximum number of trials of one rung that are offered at a time
MOST_OFFERED = 32


class Rung:
    """Results at one budget, and the promotions from it."""

    def __init__(self) -> None:
        #: (loss, origin) of all results, and of the results that are not promoted, each with the best first
        self._all: list[tuple[float, int]] = []
        self._stayed: list[tuple[float, int]] = []
        #: by origin, in the order of the results: the loss
        self.losses: dict[int, float] = {}
        #: by origin: number of its trial on the next rung
        self.promoted: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._all)

    def tell(self, origin: int, loss: float) -> None:
        """Add a result."""
        insort(self._all, (loss, origin))
        self.losses[origin] = loss
        if origin not in self.promoted:
            insort(self._stayed, (loss, origin))

    def candidates(self, count: int) -> list[int]:
        """Return the origins among the best `count` results that are not promoted, the best first.

        Failed trials are left out. At most MOST_OFFERED origins are returned.
        """
        if count < 1 or not self._stayed:
            return []
        worst = self._all[min(count, len(self._all)) - 1]
        end = min(bisect_right(self._stayed, worst), MOST_OFFERED)
        return [origin for loss, origin in self._stayed[:end] if loss < math.inf]

    def promote(self, origin: int, number: int) -> None:
        """Record that an origin was promoted to the next rung, as the trial with this number."""
        self.promoted[origin] = number
        if origin in self.losses:
            place = bisect_left(self._stayed, (self.losses[origin], origin))
            if place < len(self._stayed) and self._stayed[place][1] == origin:
                del self._stayed[place]

    def take_back(self, origin: int, number: int) -> None:
        """Undo the promotion of an origin as the trial with this number, unless another trial has replaced that one."""
        if self.promoted.get(origin) == number:
            del self.promoted[origin]
            if origin in self.losses:
                insort(self._stayed, (self.losses[origin], origin))


class Asha:
    """Asynchronous successive halving. The highest rung with a candidate comes first, then a new trial.

    A candidate is among the best floor(n / eta) of the n results of its rung so far, and is not promoted yet. A failed
    trial counts as the worst. A cancelled trial is ignored, and its origin may be promoted again. Source: Li, Jamieson,
    Rostamizadeh, Gonina, Ben-tzur, Hardt, Recht, Talwalkar, "A System for Massively Parallel Hyperparameter Tuning",
    MLSys 2020, algorithm 2.
    """

    def __init__(self, ladder: Ladder) -> None:
        self._budgets: Sequence[float] = ladder.budgets
        self._eta = ladder.eta
        #: True once there are no more new draws
        self._is_finite = False
        self._rungs = [Rung() for _ in self._budgets]

    @property
    def present(self) -> Round:
        # There are no rounds: promotions do not wait for a complete rung.
        return Round()

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
        # A rung that no longer grows promotes its best trial, even if it has fewer than eta trials.
        return rung.candidates(-(-len(rung) // self._eta) if self._is_finite else len(rung) // self._eta)

    def _first(self) -> int:
        """Return the rung on which a new trial starts."""
        return 0

    def add(self, trial: Trial) -> None:
        place = rung_of(trial, self._budgets)
        if trial.origin is None or trial.state is TrialState.CANCELLED:
            return
        if place is None and trial.budget is not None:
            # The trial reached this budget under another ladder, so its checkpoint is already past lower budgets.
            for lower, budget in enumerate(islice(self._budgets, 1, None)):
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
            self._rungs[place].tell(origin, feasible_loss(trial))
        elif place:
            self._rungs[place - 1].take_back(origin, trial.number)

    def end_draws(self) -> None:
        self._is_finite = True
