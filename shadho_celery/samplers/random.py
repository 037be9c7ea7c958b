"""The sampler `random`, which draws from the space's distributions, and the protocols and base classes of all samplers.

A `Sampler` proposes params in one subspace, and learns from their losses; a `WholeSampler` learns in the whole space.
`Stream` is the base class of samplers whose trials have places in a seeded stream. `Learner` is the base class of
samplers that learn from each trial.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.space.split import Key, Subspace
from shadho_celery.space.tree import Value


class Sampler(Protocol):
    """Proposes the params of one subspace's trials (ask and tell). All its random draws come from its seed.

    Each subspace has its own sampler, which is created with the subspace and a seed of several integers. If a class has
    ``spans_space = True``, there is only one sampler, which is created with the whole space as one subspace, and
    chooses the subspaces itself.
    """

    #: True if the proposals depend on the losses; otherwise the seed alone determines the set of trials
    adaptive: bool

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        """Return the params of the subspace's next `n` trials: the drawn value of every active label.

        `pending` are the subspace's unfinished trials, including those that wait to be sent. The number of pending
        trials plus the number of trials passed to `tell` is the place of the next trial in the subspace's seeded
        stream. Fewer than `n` params mean that the subspace has no more params.
        """

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learn from finished trials of this subspace, in this or an earlier run. Each trial is passed once.

        If a trial has several `losses`, `loss` is the first one. All losses are minimised. A trial violates a
        constraint if `violation` is above 0.
        """


class WholeSampler(Protocol):
    """Learns from the trials of the whole space, and proposes params within one of its subspaces.

    It is created with the whole space as one subspace. Called without `within`, it is a `Sampler` of that subspace.
    """

    adaptive: bool

    def ask(self, n: int, pending: Collection[Trial], within: Subspace | None = None) -> list[Params]:
        """Return the params of the next `n` trials of the subspace `within`, as `Sampler.ask` does; None is the whole
        space.

        `pending` are the unfinished trials of the whole space.
        """

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learn from finished trials, as `Sampler.tell` does, in the order of their results."""

    def outlook(self, parts: Sequence[Subspace], pending: int) -> Mapping[str, float]:
        """Return for each subspace a factor of its probability in the division of the next trials. The greatest factor
        is 1.

        `pending` is the number of unfinished trials. Until there are enough results, only one subspace has a factor
        above 0: that of the next point in a sequence that covers the whole space. While the factors are unchanged, the
        same object is returned.
        """


#: factory of samplers, which is called with a subspace and a seed of several integers
MakeSampler = Callable[[Subspace, Sequence[int]], Sampler]


def called(make: MakeSampler) -> Any:
    """Return the class or function that a factory calls. This unwraps a `partial`, which lacks the attributes of its
    class.
    """
    return called(make.func) if isinstance(make, partial) else make


def name_of(make: MakeSampler) -> str:
    """Return the name of a user's class or function that creates samplers."""
    own = called(make)
    return getattr(own, "__name__", type(own).__name__)


def spans_space(make: MakeSampler) -> bool:
    """Return True if this factory makes one sampler for the whole space."""
    return getattr(called(make), "spans_space", False) is True


class Stream:
    """Base class of samplers with a seed, whose trials have places in the order in which they were proposed."""

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        self._subspace = subspace
        self._entropy = tuple(entropy)
        #: number of trials passed to `tell`, cancelled trials included
        self._told = 0

    def _places(self, n: int, pending: Collection[Trial]) -> range:
        """Return the places of the next n trials in the subspace's stream."""
        first = self._told + len(pending)
        return range(first, first + n)


class LearnsBudgets:
    """Base class of samplers that learn from trials at all budgets together."""

    #: budget of the trials for which params are asked next; None in a study without budgets
    budget: float | None = None


class Learner(Stream):
    """Base class of samplers that learn from all trials except cancelled ones, and remember which params were tried.

    What they learn depends only on the trials and the order in which they were told. Each proposal has its own random
    generator, seeded by its place. So a resumed study continues as if it had not been interrupted.
    """

    adaptive = True

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        self._tried: set[Key] = set()

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self._told += 1
            if trial.state is not TrialState.CANCELLED:
                self._tried.add(self._subspace.key(trial.params))
                self._learn(trial)

    def _learn(self, trial: Trial) -> None:
        """Learn from an ended trial that was not cancelled."""

    def _generator(self, place: int) -> np.random.Generator:
        """Return the random generator for the proposal at this place of the stream."""
        return np.random.default_rng([*self._entropy, place])

    def _is_new(self, params: Params, taken: Collection[Key]) -> bool:
        """Return True if these params were not tried and their key is not in `taken`."""
        return (key := self._subspace.key(params)) not in self._tried and key not in taken


#: number of params drawn at a time, because a call of numpy takes about as long for many as for one
BLOCK = 64


class RandomSampler(Stream):
    """Random search. The trials of a subspace are the first draws of one stream, however they are requested."""

    adaptive = False

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        self._block = -1
        self._draws: list[dict[str, Value]] = []

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        asked: list[Params] = []
        for place in self._places(n, pending):
            block, row = divmod(place, BLOCK)
            if block != self._block:
                self._draws = self._subspace.sample(np.random.default_rng([*self._entropy, block]), BLOCK)
                self._block = block
            asked.append(self._draws[row])
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        self._told += len(trials)
