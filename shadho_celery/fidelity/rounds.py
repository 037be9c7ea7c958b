"""The base class of rounds, which offer the trials of a search: new trials, and promotions to higher rungs.

Rounds get values and return decisions, without I/O. A trial is one evaluation at one budget. `Replay` brings the rounds
of a resumed study into the state that they had.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from shadho_celery.core.trial import Params, Trial


class Wanted(Struct, frozen=True, kw_only=True):
    """Description of a trial that may be sent now: a new draw, or a promotion."""

    #: its budget; None if it is not limited
    budget: float | None = None
    rung: int | None = None
    #: number of the trial whose params, seed and checkpoints it continues; None for a new draw
    origin: int | None = None
    #: its params, if the rounds propose params themselves; None if the sampler proposes them
    params: Params | None = None
    #: name of the rounds that propose these params
    sampler: str | None = None
    #: number of new draws in the search up to the end of this round, cancelled draws included; None if it is not fixed
    drawn: int | None = None
    #: number of new draws that its round still needs, this one included; they may all be drawn at once
    left: float = 1.0


class Round(NamedTuple):
    """The current round of a search, and a notice about the rounds for the user."""

    #: number of its trials; None if there are no rounds
    size: int | None = None
    #: number of its trials that were not added yet; infinity if there are no rounds
    left: float = math.inf
    #: sentence for the user about what the rounds have chosen, or None
    notice: str | None = None


class Rounds:
    """Offers the trials of a search, given the results of earlier ones.

    This base class is used for a study without budgets: every trial is a new draw without a budget.
    """

    @property
    def present(self) -> Round:
        """The current round."""
        return Round()

    def offers(self, slots: int = 0) -> Sequence[Wanted]:
        """Return the trials that may be sent now, the next one in turn first; [] while the rounds wait for results.

        Placement may choose another trial than the first one. A call does not change the offers. `slots` is the number
        of slots of all classes.
        """
        return _ENDLESS

    def add(self, trial: Trial) -> None:
        """Add a trial that was offered and is now sent. Trials of earlier runs are added in the same order, see
        `Replay`.
        """

    def tell(self, trial: Trial) -> None:
        """Record a finished trial. Trials that do not belong to these rounds are ignored."""

    def end_draws(self) -> None:
        """Offer no more new draws, because all points of a finite search have been sent."""

    @property
    def promotable(self) -> Collection[int]:
        """Origins that may be promoted now or later, whose folders are needed. Those of unfinished trials may lack."""
        return ()


_ENDLESS = (Wanted(left=math.inf),)


class Replay:
    """Replays trials and results of earlier runs to the rounds of a resumed study, in the order of their times.

    The decisions of rounds depend on the results so far, so they make the same decisions as in the earlier run. A
    result is replayed at the time when its trial ended. The scheduler got it some milliseconds later, so the order may
    differ for trials that were sent in between.
    """

    def __init__(self, rounds: Rounds, trials: Iterable[Trial]) -> None:
        """`trials` are all trials, sorted by number. Trials without a time count as sent before all results."""
        self._rounds = rounds
        self._trials = iter(trials)
        self._next = next(self._trials, None)

    def tell(self, trial: Trial) -> None:
        """Add the trials that were sent before this result, its own trial included, then record the result."""
        at = -math.inf if trial.finished_at is None else trial.finished_at
        while (sent := self._next) is not None:
            if sent.number > trial.number and sent.asked_at is not None and sent.asked_at >= at:
                break
            self._add(sent)
        self._rounds.tell(trial)

    def end(self) -> None:
        """Add the trials that were sent after all results."""
        while self._next is not None:
            self._add(self._next)

    def _add(self, trial: Trial) -> None:
        self._rounds.add(trial)
        self._next = next(self._trials, None)
