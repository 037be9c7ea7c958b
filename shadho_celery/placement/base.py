"""Role of a placement policy, which gives each free slot its trial; and the records that it is asked with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Trial

#: whether a class has the slots, and likely the memory, for a trial
Fits = Callable[[Trial, ComputeClass], bool]


class Load(Protocol):
    """Slots used by attempts of a study."""

    def taken(self, compute_class: str) -> int:
        """Return the number of slots of a class."""

    def running(self) -> Mapping[str, int]:
        """Return the number of slots of each machine."""


class Slot(NamedTuple):
    """A free slot."""

    compute_class: ComputeClass
    #: slots that the study's attempts take
    load: Load
    #: moment of the study's clock
    now: float = 0.0


class Offers(NamedTuple):
    """What a free slot may get, beside the trials that the policy has drawn ahead."""

    #: by subspace, the trials that it is behind its share, the one whose turn it is first; empty for WHOLE
    backlogs: Mapping[str, float]
    #: subspaces in which a new trial may be drawn, or WHOLE; the one whose turn it is first
    open: Sequence[str]
    #: trials that may be promoted, as they would be added to the study; the one whose turn it is first
    promotions: Sequence[Trial] = ()
    #: budget and rung of a new trial
    budget: float | None = None
    rung: int | None = None


class Choice(NamedTuple):
    """What a free slot gets."""

    #: a trial that is to be promoted or was drawn ahead; or the subspace, or WHOLE, in which to draw a new one
    picked: Trial | str
    #: the machine whose queue a promoted trial goes to; None for any of the class
    only_on: str | None = None
    #: another trial that was drawn ahead: it has waited too long, and goes to the next slot that it fits
    overdue: Trial | None = None


class Policy(Protocol):
    """Gives each free slot its trial."""

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """Update the classes with live workers, strongest first."""

    def tell(self, trials: Sequence[Trial], following: Mapping[str, int] | None = None) -> None:
        """Learn from finished trials, before the cost model does.

        For a part of an earlier run's trials, `following` counts by subspace those that come after them.
        """

    def wants(self) -> Mapping[str, int]:
        """Return by subspace, or for WHOLE, how many trials are to be drawn ahead now."""

    def offer(self, trials: Sequence[Trial]) -> None:
        """Take trials drawn ahead to choose from, all of one subspace or of WHOLE, in the order of their draws."""

    def pick(self, slot: Slot, offers: Offers, fits: Fits) -> Choice | None:
        """Return what a free slot gets; None if it gets nothing of all this. A trial is returned at most once."""
