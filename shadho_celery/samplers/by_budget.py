"""Samplers by budget: one sampler learns the losses of each budget. Of the budgets with enough results, the sampler
of the highest one proposes the params.

Source: Falkner, Klein, Hutter, "BOHB: Robust and Efficient Hyperparameter Optimization at Scale", ICML 2018, section
3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from msgspec.structs import replace

from shadho_celery.core.trial import Outcome, Params, Trial, TrialState
from shadho_celery.samplers.base import MakeSampler, WholeSampler
from shadho_celery.space.split import Subspace, parts_of

#: a budget has enough results if it has this many more results than labels, and at least this many
MORE, LEAST = 3, 10

_CANCELLED = Outcome(state=TrialState.CANCELLED)


class ByBudget:
    """Lets the sampler of the highest budget with enough results propose params.

    Losses of two budgets cannot be compared. For a sampler, a trial of another budget counts like a cancelled trial: it
    only takes a place in the seeded stream. A failed trial counts at every budget.
    """

    adaptive = True

    def __init__(
        self,
        make: MakeSampler,
        budgets: Sequence[float],
        subspace: Subspace,
        entropy: Sequence[int],
    ) -> None:
        """`make` creates the sampler of one budget. `budgets` are those of the rungs, the lowest first."""
        #: by budget
        self.samplers = {budget: make(subspace, entropy) for budget in budgets}
        self._lowest = budgets[0]
        # In the whole space, the labels of one of its subspaces, with the choices that lead to it.
        labels = max(len(part.domains) + len(part.fixed) - len(subspace.fixed) for part in parts_of(subspace))
        self._enough = max(LEAST, labels + MORE)
        self._known: Counter[float] = Counter()
        #: the sampler that was asked last
        self.sampler = self.samplers[self._lowest]

    @property
    def budget(self) -> float | None:
        """The highest budget with enough results, or None if no budget has enough."""
        return max((b for b, known in self._known.items() if known >= self._enough), default=None)

    def ask(self, n: int, pending: Collection[Trial], within: Subspace | None = None) -> list[Params]:
        self._choose()
        if within is None:
            return self.sampler.ask(n, pending)
        return cast(WholeSampler, self.sampler).ask(n, pending, within)

    def outlook(self, parts: Sequence[Subspace], pending: int) -> Mapping[str, float]:
        self._choose()
        return cast(WholeSampler, self.sampler).outlook(parts, pending)

    def _choose(self) -> None:
        budget = self.budget
        self.sampler = self.samplers[self._lowest if budget is None else budget]

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            # Trials of earlier studies, from a warm start, have no budget.
            budget = self._lowest if trial.budget is None else trial.budget
            # The loss of a pruned trial belongs to a lower budget than its own.
            self._known[budget] += budget in self.samplers and trial.state is TrialState.COMPLETE
        for budget, sampler in self.samplers.items():
            sampler.tell([self._seen(trial, budget) for trial in trials])

    def _seen(self, trial: Trial, budget: float) -> Trial:
        """Return a trial as it is passed to the sampler of a budget."""
        own = self._lowest if trial.budget is None else trial.budget
        if own == budget or trial.state in {TrialState.FAILED, TrialState.CANCELLED}:
            return trial
        return replace(trial, state=TrialState.CANCELLED, outcome=_CANCELLED)
