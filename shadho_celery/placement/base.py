"""Base of placement policies, each of which chooses a trial for each free slot, and the records that it uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Trial
from shadho_celery.space.features import Array

#: function that returns whether a class has the slots, and probably the memory, for a trial
Fits = Callable[[Trial, ComputeClass], bool]

#: function that returns for each trial the log of the factor by which it costs more in a slot than usual in the class
Excess = Callable[[Sequence[Trial]], Array]


class Load(Protocol):
    """Counts the slots that a study's live attempts use."""

    def taken(self, compute_class: str) -> int:
        """Return the number of slots of a class that live attempts use."""

    def running(self) -> Mapping[str, int]:
        """Return for each machine the number of slots of live attempts that run there, or that may only run there."""


class Slot(NamedTuple):
    """A free slot of a compute class, for which a policy chooses a trial."""

    compute_class: ComputeClass
    #: counts the slots that the study's live attempts use
    load: Load
    #: time on the study's clock, in seconds
    now: float = 0.0
    #: function that returns for each trial the log of the factor by which it costs more in this slot than usual in the
    #: class; None if trials cost as usual
    excess: Excess | None = None
    #: seconds until the limit on time; infinity without one
    seconds_left: float = math.inf


class Offers(NamedTuple):
    """Choices of a policy for a free slot, besides the trials that were drawn ahead for it."""

    #: by subspace: the number of trials by which it is behind its share, the next subspace in turn first; empty if one
    #: sampler draws in the whole space (WHOLE)
    backlogs: Mapping[str, float]
    #: names of the subspaces in which a new trial may be drawn, or WHOLE; the next one in turn first
    open: Sequence[str]
    #: promoted trials in the form in which they would be added to the study; the next one in turn first
    promotions: Sequence[Trial] = ()
    #: budget and rung that a new trial would have
    budget: float | None = None
    rung: int | None = None


class Choice(NamedTuple):
    """The trial that a policy has chosen for a free slot, or the subspace in which to draw a new one."""

    #: a promoted trial or a trial drawn ahead; or the name of the subspace, or WHOLE, in which to draw a new trial
    picked: Trial | str
    #: the only machine that may run a promoted trial; None for any machine of the class
    only_on: str | None = None


class Policy:
    """Chooses a trial for each free slot."""

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """Replace the classes that have live workers. `classes` begin with the strongest class."""

    def tell(self, trials: Sequence[Trial], following: Mapping[str, int] | None = None) -> None:
        """Learn from finished trials.

        If `trials` are a block of an earlier run's trials, `following` has the number of trials in later blocks, by
        subspace.
        """

    def wants(self) -> Mapping[str, int]:
        """Return for each subspace, or for WHOLE, how many trials should be drawn ahead now."""
        return {}

    def offer(self, trials: Sequence[Trial]) -> None:
        """Add trials drawn ahead, from which `pick` may choose. Their order is that of the draws."""

    def pick(self, slot: Slot, offers: Offers, fits: Fits) -> Choice | None:
        """Return the choice for a free slot, or None to leave it free. No trial is returned twice."""
        raise NotImplementedError

    def prices(self, subspace: str) -> Mapping[str, float]:
        """Return the price of a second on each live class for a subspace's trials; {} if there are no prices."""
        return {}
