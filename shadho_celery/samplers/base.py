"""The role of a sampler: it proposes params, in one subspace or in the whole space, and learns from their losses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from shadho_celery.core.trial import Params, Trial


class Sampler(Protocol):
    """Proposes the params of one subspace's trials (ask and tell). All its random draws come from its seed.

    Each subspace has its own sampler, called with the subspace and its seed as integers. A class with ``spans_space =
    True`` has one sampler, called with the whole space as one subspace: it chooses the subspaces itself.
    """

    #: True if the proposals depend on the losses; otherwise the seed alone determines the set of trials
    adaptive: bool

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        """Return the params of the subspace's next `n` trials: the drawn value of every active label.

        `pending` are its trials that have not finished, including those that wait to be sent. Together with the told
        ones they are all trials so far: their number is the index of the next trial in the subspace's seeded stream.
        Fewer than `n` params mean that the subspace, or the space, is exhausted.
        """

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learn from finished trials of this subspace, of this or an earlier run. Each trial is told once.

        `loss` is the first of several `losses`, which are all minimised. A constraint is violated if `violation` is
        above 0.
        """
