"""Independent draws from the search space's own distributions.

Protocol of a sampler: it proposes params, in one subspace or in the whole space, and learns from their losses.

`Stream` is the base class of samplers whose trials have places in a seeded stream, and `Learner` that of samplers that
learn from each trial.
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

    Each subspace has its own sampler, called with the subspace and its seed as integers. A class with ``spans_space =
    True`` has one sampler, called with the whole space as one subspace: it chooses the subspaces itself.
    """

    #: True if the proposals depend on the losses; otherwise the seed alone determines the set of trials
    adaptive: bool

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        """Return the params of the subspace's next `n` trials: the drawn value of every active label.

        `pending` are the subspace's unfinished trials, including those that wait to be sent. Together with the trials
        passed to `tell` they are all trials so far: their number is the index of the next trial in the subspace's
        seeded stream. Fewer than `n` params mean that the subspace, or the space, is exhausted.
        """

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learn from finished trials of this subspace, of this or an earlier run. Each trial is passed once.

        `loss` is the first of several `losses`, which are all minimised. A constraint is violated if `violation` is
        above 0.
        """


class WholeSampler(Protocol):
    """Learns from the trials of the whole space, and proposes params within one of its subspaces.

    It is created for the whole space as one subspace. By itself it is a `Sampler` of that subspace.
    """

    adaptive: bool

    def ask(self, n: int, pending: Collection[Trial], within: Subspace | None = None) -> list[Params]:
        """Return the params of the next `n` trials of a subspace, as `Sampler.ask` does. None is the whole space.

        `pending` are the unfinished trials of the whole space.
        """

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learn from finished trials, as `Sampler.tell` does, in the order of their results."""

    def outlook(self, parts: Sequence[Subspace], pending: int) -> Mapping[str, float]:
        """Return for each subspace the weight of its next trials beside its probability. The best one has 1.

        `pending` is the number of unfinished trials. Until there are enough results, the only subspace with a weight is
        that of the next point of a sequence that covers the whole space. Returns the same object while nothing changes.
        """


#: factory of samplers, called with a subspace and its seed as integers
MakeSampler = Callable[[Subspace, Sequence[int]], Sampler]


def called(make: MakeSampler) -> Any:
    """Return the class or function that a factory calls. A `partial` lacks the attributes of its class."""
    return called(make.func) if isinstance(make, partial) else make


def name_of(make: MakeSampler) -> str:
    """Return the name of a user's class or function that creates samplers."""
    own = called(make)
    return getattr(own, "__name__", type(own).__name__)


def spans_space(make: MakeSampler) -> bool:
    """Return True if this factory makes one sampler for the whole space."""
    return getattr(called(make), "spans_space", False) is True


class Stream:
    """Base class of samplers that number a subspace's trials in the order of asking, and have a seed."""

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        self._subspace = subspace
        self._entropy = tuple(entropy)
        #: number of trials passed to `tell`, including cancelled ones
        self._told = 0

    def _places(self, n: int, pending: Collection[Trial]) -> range:
        """Return the places of the next n trials in the subspace's stream."""
        first = self._told + len(pending)
        return range(first, first + n)


class Learner(Stream):
    """Learns from all trials of a subspace that were not cancelled, and remembers which params they tried.

    What it has learned depends only on the trials in the order in which they were told. Each proposal has its own
    generator, seeded by its place. A resumed study therefore continues where it was.
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
        """Return the random generator for the proposal at a place of the stream."""
        return np.random.default_rng([*self._entropy, place])

    def _is_new(self, params: Params, taken: Collection[Key]) -> bool:
        """Return True if these params were not tried and their key is not in `taken`."""
        return (key := self._subspace.key(params)) not in self._tried and key not in taken


#: number of params drawn at a time, because numpy's cost is per call
BLOCK = 64


class RandomSampler(Stream):
    """Random search. A subspace's trials are a prefix of one stream, however many are requested at a time."""

    adaptive = False

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        self._block = -1
        self._draws: list[dict[str, Value]] = []

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        first = self._told + len(pending)
        asked: list[Params] = []
        for place in range(first, first + n):
            block, row = divmod(place, BLOCK)
            if block != self._block:
                self._draws = self._subspace.sample(np.random.default_rng([*self._entropy, block]), BLOCK)
                self._block = block
            asked.append(self._draws[row])
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        self._told += len(trials)
