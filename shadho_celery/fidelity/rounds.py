"""Role of rounds: they offer the trials of a search, in particular trials that depend on others.

Offers, add, tell: values in, decisions out. A trial is one evaluation at one budget, so that a study's "one result a
trial" is one result on each rung.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from shadho_celery.core.trial import Params, Trial


class Wanted(Struct, frozen=True, kw_only=True):
    """Trial that may be sent now."""

    #: part of the fidelity for it; None for all
    budget: float | None = None
    rung: int | None = None
    #: number of the trial whose params, seed and checkpoints it continues; None for a new draw
    origin: int | None = None
    #: what it is to be, from rounds that propose trials themselves; None to ask the sampler
    params: Params | None = None
    #: new draws until the end of its round, with those of all earlier rounds and the cancelled ones; None if there is
    #: no such number
    drawn: int | None = None
    #: new draws that its round still takes, this one included: so many may be drawn at once
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
        """Enter a trial that was offered. Those of an earlier run are entered again, in order, see `Replay`."""

    def tell(self, trial: Trial) -> None:
        """Record a finished trial; one of another round is ignored."""

    def end_draws(self) -> None:
        """Expect no new draws: the search is finite, and all of its points have been sent."""

    @property
    def present(self) -> Round:
        """The present round."""


class Endless:
    """Absence of rounds: every trial is a new one with all of the fidelity."""

    present = Round()

    def offers(self, slots: int = 0) -> Sequence[Wanted]:
        return _ANY

    def add(self, trial: Trial) -> None:
        pass

    def tell(self, trial: Trial) -> None:
        pass

    def end_draws(self) -> None:
        pass


_ANY = (Wanted(left=math.inf),)
