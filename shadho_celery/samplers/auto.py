"""Choice of a sampler by the space and the history: `gp`, `tpe`, or both by turns; the start covers the space.

A Gaussian process learns fastest where losses are a smooth function of few labels: before every guess it is checked how
well it foretells each loss from the others. Density estimates bear more labels, jumps, noise and long histories. The
choice never depends on the clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shadho_celery.core.trial import Params, Trial
from shadho_celery.samplers.gp import GpSampler
from shadho_celery.samplers.tpe import TpeSampler
from shadho_celery.space.split import Subspace

#: most labels, and most trials, with which a Gaussian process is asked
MOST_LABELS, MOST_TRIALS = 30, 500
#: part of the losses' variance that the process foretells, below which every second guess is the other one's
FORETOLD = 0.1


class AutoSampler:
    """Asks a Gaussian process, a Parzen estimator, or both by turns; both learn from every trial."""

    adaptive = True

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        self._gp = GpSampler(subspace, entropy)
        self._tpe = TpeSampler(subspace, entropy)
        self._labels = len(subspace.domains)
        self._told = 0
        #: what the next guess comes from, and why
        self.choice = "gp: the first trials cover the space"

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        if self._labels > MOST_LABELS:
            self.choice = f"tpe: {self._labels} hyperparameters are more than {MOST_LABELS}"
            return self._tpe.ask(n, pending) if self._gp.is_started else self._gp.ask(n, pending)
        if self._told > MOST_TRIALS:
            self.choice = f"tpe: there are more than {MOST_TRIALS} trials"
            return self._tpe.ask(n, pending)
        foretold = self._gp.foretold
        if foretold is None:
            return self._gp.ask(n, pending)
        words = f"it foretells {max(foretold, 0.0):.0%} of the differences between losses"
        if foretold >= FORETOLD:
            self.choice = f"gp: {words}"
            return self._gp.ask(n, pending)
        self.choice = f"gp and tpe by turns: {words.replace('it', 'gp', 1)}"
        turn = (self._told + len(pending)) % 2
        first = (n + 1 - turn) // 2
        asked = self._gp.ask(first, pending)
        return asked + self._tpe.ask(n - first, [*pending, *(_pending(params) for params in asked)])

    def tell(self, trials: Sequence[Trial]) -> None:
        self._told += len(trials)
        self._gp.tell(trials)
        self._tpe.tell(trials)


def _pending(params: Params) -> Trial:
    """Return a trial of these params that has not finished."""
    return Trial(number=-1, subspace="", params=params)
