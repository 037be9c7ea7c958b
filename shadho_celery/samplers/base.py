"""The role of a sampler: it proposes params in one subspace, and learns from their losses."""

from __future__ import annotations

from typing import Protocol

from shadho_celery.core.trial import Params, Trial


class Sampler(Protocol):
    """Proposes the params of one subspace's trials. Asks and tells; draws nothing but from its seed."""

    #: True if the proposals depend on the losses; else the set of trials is fixed by the seed alone
    adaptive: bool

    def ask(self, index: int) -> Params:
        """Return the params of the subspace's trial number `index` (from 0): the drawn value of every active label."""

    def tell(self, trial: Trial) -> None:
        """Learn from a finished trial of this subspace, of this run or of an earlier one."""
