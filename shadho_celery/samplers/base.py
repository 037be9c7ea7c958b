"""The role of a sampler: it proposes params, in one subspace or in the whole space, and learns from their losses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from shadho_celery.core.trial import Params, Trial


class Sampler(Protocol):
    """Proposes the params of one subspace's trials. Asks and tells; draws nothing but from its seed.

    Each subspace has a sampler of its own, called with the subspace and the words of its seed. Of a class with
    ``spans_space = True`` there is one, called with the whole space as one subspace: it chooses the subspaces itself.
    """

    #: True if the proposals depend on the losses; else the set of trials is fixed by the seed alone
    adaptive: bool

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        """Return the params of the subspace's next `n` trials: the drawn value of every active label.

        `pending` are its trials that have not finished, those that wait to be sent included. With those told, they are
        all trials so far: their number is the place of the next trial in the subspace's seeded stream. Fewer than
        `n` mean that there are no others: the subspace, or the space, is exhausted.
        """

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learn from finished trials of this subspace, each once, of this run or of an earlier one.

        `loss` is the first of several `losses`, which are all minimised; a `violation` above 0 breaks a constraint.
        """
