"""Choice of a sampler by the space and the history: `gp`, `tpe`, or both alternating. The start covers the space.

A Gaussian process learns fastest if losses are a smooth function of few labels. Before every proposal, its
leave-one-out predictions of the losses are checked. Density estimates work with more labels, discontinuities, noise and
long histories, and cost less. With many short trials, the process would keep the machines waiting. The choice depends
on the limit, the counts and the recorded seconds, never on the clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from shadho_celery.core.trial import Params, Trial
from shadho_celery.samplers.gp import GpSampler
from shadho_celery.samplers.tpe import TpeSampler
from shadho_celery.space.split import Subspace

#: maximum number of labels for a Gaussian process
MOST_LABELS = 30
#: a Gaussian process is used, however short the trials are, in studies of up to MOST_TRIALS trials, and for the first
#: AT_FIRST trials of longer studies; running trials are included
MOST_TRIALS, AT_FIRST = 500, 100
#: afterwards: least seconds of a trial for each running or waiting trial, so that no slot waits for a proposal
SECONDS = 1.0
#: number of latest trials whose seconds are used
LATEST = 50
#: leave-one-out R² of the process below which every second proposal comes from the Parzen estimator
LEAST_R_SQUARED = 0.1


class AutoSampler:
    """Uses a Gaussian process, a Parzen estimator, or both alternating. Both learn from every trial."""

    adaptive = True

    def __init__(self, subspace: Subspace, entropy: Sequence[int], *, limit: int | None = None) -> None:
        """`limit` is the study's limit on trials, or None."""
        self._gp = GpSampler(subspace, entropy)
        self._tpe = TpeSampler(subspace, entropy)
        self._labels = len(subspace.domains)
        self._limit = limit
        self._told = 0
        #: number of losses of a trial: more than one in a study of several objectives
        self._losses = 1
        self._seconds: list[float] = []
        #: which sampler proposed the latest params, and why
        self.choice = "the first trials cover the space"

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        if not self._labels:
            self.choice = "there is nothing to choose"
            return self._gp.ask(n, pending)
        if not self._gp.is_started:
            return self._gp.ask(n, pending)
        if why := self._why_not_gp(pending):
            self.choice = f"tpe: {why}"
            return self._tpe.ask(n, pending)
        r_squared = self._gp.r_squared or 0.0
        words = f"predicts {max(r_squared, 0.0):.0%} of the variance of the losses"
        if r_squared >= LEAST_R_SQUARED:
            self.choice = f"gp: it {words}"
            return self._gp.ask(n, pending)
        self.choice = f"gp and tpe alternating: gp {words}"
        turn = (self._told + len(pending)) % 2
        first = (n + 1 - turn) // 2
        asked = self._gp.ask(first, pending)
        return asked + self._tpe.ask(
            n - first, [*pending, *(Trial(number=-1, subspace="", params=params) for params in asked)]
        )

    def tell(self, trials: Sequence[Trial]) -> None:
        self._told += len(trials)
        self._losses = max([self._losses, *(len(trial.outcome.losses) for trial in trials)])
        self._seconds += [trial.outcome.seconds for trial in trials if trial.outcome.seconds is not None]
        del self._seconds[:-LATEST]
        self._gp.tell(trials)
        self._tpe.tell(trials)

    def _why_not_gp(self, pending: Collection[Trial]) -> str | None:
        """Return the reason not to use a Gaussian process, or None if it may be used."""
        if self._losses > 1:
            return f"it learns {self._losses} losses at once"
        if self._labels > MOST_LABELS:
            return f"{self._labels} hyperparameters are more than {MOST_LABELS}"
        is_short = self._limit is not None and self._limit <= MOST_TRIALS
        if self._told + len(pending) <= (MOST_TRIALS if is_short else AT_FIRST):
            return None
        seconds = statistics.median(self._seconds) if self._seconds else 0.0
        if seconds < SECONDS * (1 + len(pending)):
            return f"a trial takes {seconds:.2g} s, which is too short for gp's proposals"
        return None
