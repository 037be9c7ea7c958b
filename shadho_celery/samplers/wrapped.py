"""Samplers that contain other samplers: `Unrepeated`, `ByBudget` and `OwnSampler`.

`Unrepeated` uses a sampler of the whole space for one subspace. It repeats points of a finite subspace only after all
of them have been tried. `OwnSampler` checks the params of a user's own sampler before trials are created from them.

`ByBudget` has a sampler for each budget, which learns only the losses at this budget. Of the budgets with enough
results, the sampler of the highest one proposes params. Source: Falkner, Klein, Hutter, "BOHB: Robust and Efficient
Hyperparameter Optimization at Scale", ICML 2018, section 3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from shadho_celery.core.checks import accepts, short
from shadho_celery.core.columns import TrialFacts
from shadho_celery.core.failures import user_code
from shadho_celery.core.trial import Outcome, Params, Trial, TrialState
from shadho_celery.errors import SpaceError, UsageError
from shadho_celery.samplers.random import Learner, MakeSampler, Sampler, WholeSampler, name_of
from shadho_celery.space.domains import Discrete, Domain
from shadho_celery.space.split import Key, Subspace, parts_of
from shadho_celery.space.tree import Value

#: number of draws from the prior to replace a point that was tried; if all were tried, the points are searched one by
#: one
DRAWS = 64
#: number that is mixed into the seed for these draws
_STREAM = 0x75


class Unrepeated(Learner):
    """Returns the proposals of another sampler within a subspace, and replaces points that were tried by new draws.

    Pending and failed trials count as tried, and cancelled trials do not. Once a finite subspace has no untried points,
    it returns fewer params than requested, unless it `may_repeat` points. For an infinite subspace it changes nothing.
    """

    def __init__(self, sampler: Sampler, subspace: Subspace, entropy: Sequence[int]) -> None:
        """`sampler` is a `WholeSampler`. The `Unrepeated` of several subspaces may share it."""
        super().__init__(subspace, entropy)
        self.sampler = cast(WholeSampler, sampler)
        self.adaptive = sampler.adaptive
        #: True once points may be proposed again
        self.may_repeat = False
        #: number of points of the subspace; None until all points have been tried
        self.points: int | None = None
        self._is_finite = all(domain.steps() is not None for domain in subspace.domains.values())

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        if not self._is_finite or self.may_repeat:
            return self.sampler.ask(n, pending, self._subspace)
        own = [trial for trial in pending if self._subspace.contains(trial.params)]
        waiting = {self._subspace.key(trial.params) for trial in own}
        asked: list[Params] = []
        for params, place in zip(self.sampler.ask(n, pending, self._subspace), self._places(n, own), strict=False):
            untried = params if self._is_new(params, waiting) else self._untried(waiting, place)
            if untried is None:
                self.points = len(self._tried | waiting)
                break
            asked.append(untried)
            waiting.add(self._subspace.key(untried))
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        super().tell(trials)
        self.sampler.tell(trials)

    def _untried(self, waiting: Collection[Key], place: int) -> Params | None:
        """Return a draw that was not tried, for the trial at this place; else any point that was not tried, or None."""
        generator = np.random.default_rng([*self._entropy, _STREAM, place])
        others = chain(self._subspace.sample(generator, DRAWS), points(self._subspace, generator))
        return next((params for params in others if self._is_new(params, waiting)), None)


def points(subspace: Subspace, generator: np.random.Generator) -> Iterator[Params]:
    """Yield each allowed point of a finite subspace once. The values of each label begin with a random one."""
    space = subspace.space

    def under(params: Mapping[str, Value]) -> Iterator[Params]:
        for block in space.walk(params):
            for label in block.labels:
                if label not in params:
                    for value in _values(subspace.domains[label], generator):
                        yield from under({**params, label: value})
                    return
        yield {label: params[label] for label in space.active(params)}

    return space.allowed(under(subspace.fixed))


def _values(domain: Domain, generator: np.random.Generator) -> Iterator[Value]:
    grid = domain.steps()
    assert grid is not None
    steps, size = grid
    start = int(generator.integers(steps.start, steps.stop))
    for place in chain(range(start, steps.stop), range(steps.start, start)):
        if not isinstance(domain, Discrete) or domain.probability(place) > 0:
            yield place * size


class ToldTrial(TrialFacts):
    """A trial as a user's sampler gets it: its facts as attributes, and its `outcome`, which samplers of ours use."""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the trial: state, losses and failure."""
        return self._trial.outcome


class OwnSampler:
    """A sampler of a user's class. It is taken to learn from losses unless its attribute `adaptive` is False."""

    def __init__(self, make: MakeSampler, subspace: Subspace, entropy: Sequence[int]) -> None:
        """Create the sampler by calling the user's class or function.

        Raises UsageError if it cannot be created, or lacks valid methods.
        """
        self._subspace, self._name = subspace, name_of(make)
        with user_code(f"sampler {self._name} failed in its constructor"):
            self.sampler: Any = make(subspace, entropy)
        self.adaptive = getattr(self.sampler, "adaptive", True) is not False
        #: generator of the params that replace proposals which the space's `where` refuses
        self._generator = np.random.default_rng([*entropy, _STREAM])
        if missing := [verb for verb in ("ask", "tell") if not callable(getattr(self.sampler, verb, None))]:
            lacks = f"sampler {self._name} lacks {' and '.join(missing)}"
            raise UsageError(f"{lacks}; it needs ask(n, pending) and tell(trials)")
        for verb, arguments in (("ask", "n, pending"), ("tell", "trials")):
            if not accepts(getattr(self.sampler, verb), len(arguments.split())):
                raise UsageError(
                    f"{verb} of sampler {self._name} takes other arguments; write def {verb}(self, {arguments})"
                )

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        """Return the proposals of the user's sampler. Proposals that the space's `where` refuses are replaced by draws.

        Raises UsageError for params outside the space, and if the user's code raises an exception.
        """
        with user_code(f"sampler {self._name} failed in ask"):
            returned = self.sampler.ask(n, [ToldTrial(trial) for trial in pending])
        if not isinstance(returned, Sequence):
            raise UsageError(f"sampler {self._name} returned {short(returned, 60)} from ask; return a list of params")
        asked = [*returned[:n]]
        for params in asked:
            try:
                self._subspace.space.check(params)
            except (SpaceError, TypeError) as error:
                raise UsageError(f"sampler {self._name} proposed {short(params, 200)}: {error}") from None
            if not self._subspace.contains(params):
                raise UsageError(f"sampler {self._name} left subspace {self._subspace.name}: {short(params, 200)}")
        # The user's sampler may not know the bounds between params, and would propose the same point again.
        return [self._subspace.first_allowed([params], self._generator) for params in asked]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Pass results to the user's sampler. Raises UsageError if the user's code raises an exception."""
        with user_code(f"sampler {self._name} failed in tell"):
            self.sampler.tell([ToldTrial(trial) for trial in trials])


#: a budget has enough results if it has at least LEAST, and MORE more than there are labels
MORE, LEAST = 3, 10

_CANCELLED = Outcome(state=TrialState.CANCELLED)


class ByBudget:
    """Lets the sampler of the highest budget with enough results propose params.

    Losses of different budgets cannot be compared. So the sampler of a budget gets trials of other budgets as cancelled
    trials: they only take places in its seeded stream. All samplers learn from failed trials.
    """

    adaptive = True

    def __init__(
        self,
        make: MakeSampler,
        budgets: Sequence[float],
        subspace: Subspace,
        entropy: Sequence[int],
    ) -> None:
        """`make` creates the sampler of one budget. `budgets` are the budgets of the rungs, the lowest first."""
        #: by budget
        self.samplers = {budget: make(subspace, entropy) for budget in budgets}
        self._lowest = budgets[0]
        # The greatest number of labels that a trial can have, without those that are fixed.
        labels = max(len(part.domains) + len(part.fixed) - len(subspace.fixed) for part in parts_of(subspace))
        self._enough = max(LEAST, labels + MORE)
        self._known: Counter[float] = Counter()
        #: the sampler that proposes params now
        self.sampler = self.samplers[self._lowest]

    @property
    def budget(self) -> float:
        """The highest budget with enough results; the lowest budget if there is none."""
        return max((b for b, known in self._known.items() if known >= self._enough), default=self._lowest)

    def ask(self, n: int, pending: Collection[Trial], within: Subspace | None = None) -> list[Params]:
        self._choose()
        if within is None:
            return self.sampler.ask(n, pending)
        return cast(WholeSampler, self.sampler).ask(n, pending, within)

    def outlook(self, parts: Sequence[Subspace], pending: int) -> Mapping[str, float]:
        self._choose()
        return cast(WholeSampler, self.sampler).outlook(parts, pending)

    def _choose(self) -> None:
        self.sampler = self.samplers[self.budget]

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            # Trials of a warm start have no budget.
            budget = self._lowest if trial.budget is None else trial.budget
            # Pruned trials do not count, because their losses belong to a lower budget.
            self._known[budget] += budget in self.samplers and trial.state is TrialState.COMPLETE
        for budget, sampler in self.samplers.items():
            sampler.tell([self._seen(trial, budget) for trial in trials])

    def _seen(self, trial: Trial, budget: float) -> Trial:
        """Return a trial as it is passed to the sampler of this budget."""
        own = self._lowest if trial.budget is None else trial.budget
        if own == budget or trial.state in {TrialState.FAILED, TrialState.CANCELLED}:
            return trial
        return replace(trial, state=TrialState.CANCELLED, outcome=_CANCELLED)
