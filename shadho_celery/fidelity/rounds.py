"""Role of rounds: they offer the trials of a search, in particular trials that depend on others.

Offers, add, tell: values in, decisions out. A trial is one evaluation at one budget, so each result is stored once per
rung.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from shadho_celery.core.trial import Params, Trial


class Wanted(Struct, frozen=True, kw_only=True):
    """A trial that may be sent now."""

    #: its part of the fidelity; None for all
    budget: float | None = None
    rung: int | None = None
    #: number of the trial whose params, seed and checkpoints it continues; None for a new draw
    origin: int | None = None
    #: its params, from rounds that propose trials themselves; None to ask the sampler
    params: Params | None = None
    #: number of new draws until the end of its round, including earlier rounds and cancelled draws; None without a
    #: fixed number
    drawn: int | None = None
    #: number of new draws that its round still takes, including this one; this many may be drawn at once
    left: float = 1.0


class Round(NamedTuple):
    """The present round of a search, and what a user should know of the rounds."""

    #: its trials; None without rounds
    size: int | None = None
    #: trials of it that are not added yet; infinitely many without rounds
    left: float = math.inf
    #: a sentence on the choices of the rounds; None without one
    notice: str | None = None


class Rounds(Protocol):
    """Offers the trials of a search, given the results of earlier ones."""

    def offers(self, slots: int = 0) -> Sequence[Wanted]:
        """Return the trials that may be sent now, the one whose turn it is first; none while results are awaited.

        Placement may take another one than the first. To look again changes nothing. `slots` are those of the fleet.
        """

    def add(self, trial: Trial) -> None:
        """Add a trial that was offered. Those of an earlier run are added again, in order, see `Replay`."""

    def tell(self, trial: Trial) -> None:
        """Record a finished trial. A trial of another round is ignored."""

    def end_draws(self) -> None:
        """Expect no new draws: the search is finite, and all of its points have been sent."""

    @property
    def present(self) -> Round:
        """The present round."""


class Endless:
    """Used without rounds: every trial is a new one with all of the fidelity."""

    present = Round()

    def offers(self, slots: int = 0) -> Sequence[Wanted]:
        return ENDLESS

    def add(self, trial: Trial) -> None:
        pass

    def tell(self, trial: Trial) -> None:
        pass

    def end_draws(self) -> None:
        pass


#: its offers
ENDLESS = (Wanted(left=math.inf),)


class Replay:
    """Rounds that a resumed study tells its earlier results: each one after the trials that were sent before it.

    The choices of rounds depend on the results that they know, so this leads to the choices of the earlier run. A
    result counts from its trial's end. If trials were sent between that and its arrival, which takes milliseconds, the
    order differs.
    """

    def __init__(self, rounds: Rounds, trials: Iterable[Trial]) -> None:
        """`trials` are all that were sent, by number. Those without a time count as sent before all results."""
        self._rounds = rounds
        self._trials = iter(trials)
        self._next = next(self._trials, None)

    def tell(self, trial: Trial) -> None:
        """Add all trials that were sent before a result, including the result's own, and tell the result."""
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
