"""The role of rounds: they say which trials there are to be, where those depend on one another.

Ask, add, tell: values in, decisions out. A trial is one evaluation at one budget, so that a study's "one result a
trial" is one result on each rung.
"""

from __future__ import annotations

import math
from typing import Protocol

from msgspec import Struct

from shadho_celery.core.trial import Trial


class Wanted(Struct, frozen=True, kw_only=True):
    """A trial that may be sent now."""

    #: how much of the fidelity it is to be given; None for all of it
    budget: float | None = None
    rung: int | None = None
    #: number of the trial whose params, seed and checkpoints it carries on; None where a new one is to be drawn
    origin: int | None = None
    #: trials that are drawn anew until the end of its round, those of all earlier rounds and those that were cancelled
    #: included; None: no such number
    drawn: int | None = None


class Rounds(Protocol):
    """Decides which trials there are to be, from what came of those there were."""

    def ask(self) -> Wanted | None:
        """Return what may be sent now; None while results have to be waited for. Asking again changes nothing."""

    def add(self, trial: Trial) -> None:
        """Enter a trial that came of what was asked for. All trials of an earlier run are added first, in order."""

    def tell(self, trial: Trial) -> None:
        """Take note of a trial that has finished; one that is not of the present round is passed over."""

    @property
    def size(self) -> int | None:
        """Trials of the present round; None where there are no rounds."""

    @property
    def left(self) -> float:
        """Trials of the present round that are not added yet; infinitely many where there are no rounds."""


class Endless:
    """No rounds: every trial is a new one, and is given all of the fidelity."""

    size: int | None = None
    left: float = math.inf

    def ask(self) -> Wanted | None:
        return Wanted()

    def add(self, trial: Trial) -> None:
        pass

    def tell(self, trial: Trial) -> None:
        pass
