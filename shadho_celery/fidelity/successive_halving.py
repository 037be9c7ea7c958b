"""Successive halving: rounds of trials on a ladder of budgets, the best of a rung promoted to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.rounds import Wanted


@dataclass
class _Rung:
    """Trials of the present bracket at one budget."""

    budget: float
    #: results after which the next rung begins
    wanted: int
    #: trials sent for these results
    sent: int
    #: origins of the trials, the best first; None for new draws
    chosen: list[int] | None = None
    #: number of a trial -> its origin
    origins: dict[int, int] = field(default_factory=dict)
    #: (loss, origin) in the order of the results; an infinite loss for a failed trial
    losses: list[tuple[float, int]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.losses) >= min(self.wanted, self.sent)

    def best(self, most: int) -> list[int]:
        """Return the best `most` origins of the first `wanted` results, without failed trials."""
        return [origin for loss, origin in sorted(self.losses[: self.wanted])[:most] if loss < math.inf]


class SuccessiveHalving:
    """Many trials at a small budget, the best of them at a larger one, and so on; then the next bracket begins.

    A bracket's rungs have the budgets ``most * eta**-k`` down to `least`, and ``eta**k`` trials; the best 1 / eta of a
    rung are promoted to the next one. Promotion waits for a complete rung, so it depends on the losses alone. A failed
    trial counts as the worst, a cancelled one not at all. Source: Jamieson and Talwalkar, "Non-stochastic Best Arm
    Identification and Hyperparameter Optimization", AISTATS 2016; its form here is bracket s_max of Li et al.,
    "Hyperband", JMLR 18, 2018.

    With `backups` b every rung gets n + b *different* trials, and the next one begins after the first n results: slow
    trials are not waited for. This is biased if good trials are slow, as large models often are: late trials are not
    promoted, even with a low loss. The study keeps their results all the same. Copies of late trials (`speculation`)
    save most of that waiting and are not biased.
    """

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = [(ladder.most / ladder.eta**below, ladder.eta**below) for below in range(ladder.top, -1, -1)]
        self._backups = ladder.backups
        self._drawn = 0
        self._begin()

    @property
    def size(self) -> int:
        return self._rungs[self._place].sent

    @property
    def left(self) -> float:
        return self.size - len(self._rungs[self._place].origins)

    def ask(self) -> Wanted | None:
        rung = self._rungs[self._place]
        if self.left <= 0:
            return None
        if rung.chosen is None:
            return Wanted(budget=rung.budget, rung=0, drawn=self._drawn)
        there = set(rung.origins.values())
        origin = next(origin for origin in rung.chosen if origin not in there)
        return Wanted(budget=rung.budget, rung=self._place, origin=origin)

    def add(self, trial: Trial) -> None:
        place = self._place_of(trial)
        if place is None:
            return
        if trial.state is TrialState.CANCELLED:
            self._drawn += place == 0
            return
        if place == 0 and (self._has_moved_on or len(self._rungs[0].origins) >= self._rungs[0].sent):
            # Trials of earlier runs are all added before their results are told.
            self._begin()
        self._has_moved_on |= place > 0
        self._rungs[place].origins[trial.number] = trial.number if trial.origin is None else trial.origin

    def tell(self, trial: Trial) -> None:
        place = self._place_of(trial)
        if place is None or trial.number not in self._rungs[place].origins:
            return
        rung = self._rungs[place]
        if trial.state is TrialState.CANCELLED:
            # It says nothing about its params: a resumed study sends it again, or draws another one.
            del rung.origins[trial.number]
            self._drawn += place == 0
            return
        # What breaks a constraint is promoted after all that does not, like a failure.
        loss = trial.loss if trial.state is TrialState.COMPLETE and not trial.violation else None
        rung.losses.append((math.inf if loss is None else loss, rung.origins[trial.number]))
        self._advance()

    def _begin(self) -> None:
        """Begin a bracket."""
        self._rungs = [_Rung(budget, wanted, wanted + self._backups) for budget, wanted in self._ladder]
        self._place = 0
        self._has_moved_on = False
        self._drawn += self._rungs[0].sent

    def _advance(self) -> None:
        """Move to the first incomplete rung, maybe in the next bracket."""
        while self._rungs[self._place].is_complete:
            if self._place == len(self._rungs) - 1:
                self._begin()
                return
            last, self._place = self._rungs[self._place], self._place + 1
            rung = self._rungs[self._place]
            rung.chosen = last.best(rung.sent)
            rung.sent = len(rung.chosen)

    def _place_of(self, trial: Trial) -> int | None:
        """Return the rung of a trial; None for a trial of another ladder, for instance of an earlier run."""
        if trial.rung is None or trial.rung >= len(self._ladder) or trial.budget != self._ladder[trial.rung][0]:
            return None
        return trial.rung
