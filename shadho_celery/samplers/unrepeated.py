"""Params of finite subspaces: no point is proposed twice while there are others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.samplers.base import Sampler
from shadho_celery.space.domains import Discrete, Domain
from shadho_celery.space.split import Key, Subspace
from shadho_celery.space.tree import Value

#: number of draws from the prior to replace a point that was tried; after that, all points are searched one by one
DRAWS = 64
#: mixed into the seed for these draws
_STREAM = 0x75


class Unrepeated:
    """Asks another sampler, and replaces each point that was tried by an untried draw from the prior.

    Pending and failed trials count as tried, cancelled ones do not. Once a finite subspace has no other points, it
    returns fewer params than asked for, unless it `may_repeat` them. For an infinite subspace it changes nothing.
    """

    def __init__(self, sampler: Sampler, subspace: Subspace, entropy: Sequence[int]) -> None:
        self.sampler = sampler
        self.adaptive = sampler.adaptive
        #: True once points may be proposed again
        self.may_repeat = False
        #: number of points of the subspace; None until all have been tried
        self.points: int | None = None
        self._subspace = subspace
        self._entropy = tuple(entropy)
        self._is_finite = all(domain.steps() is not None for domain in subspace.domains.values())
        self._tried: set[Key] = set()
        self._count_told = 0

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        if not self._is_finite or self.may_repeat:
            return self.sampler.ask(n, pending)
        first = self._count_told + len(pending)
        waiting = {self._subspace.key(trial.params) for trial in pending}

        def is_new(params: Params) -> bool:
            return (key := self._subspace.key(params)) not in self._tried and key not in waiting

        asked: list[Params] = []
        for index, params in enumerate(self.sampler.ask(n, pending), first):
            untried = params if is_new(params) else self._untried(is_new, index)
            if untried is None:
                self.points = len(self._tried | waiting)
                break
            asked.append(untried)
            waiting.add(self._subspace.key(untried))
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        self._count_told += len(trials)
        if self._is_finite:
            self._tried.update(
                self._subspace.key(each.params) for each in trials if each.state is not TrialState.CANCELLED
            )
        self.sampler.tell(trials)

    def _untried(self, is_new: Callable[[Params], bool], index: int) -> Params | None:
        """Return a new draw for the trial of this index, else any other new point, or None."""
        generator = np.random.default_rng([*self._entropy, _STREAM, index])
        others = chain(self._subspace.sample(generator, DRAWS), points(self._subspace, generator))
        return next(filter(is_new, others), None)


def points(subspace: Subspace, generator: np.random.Generator) -> Iterator[Params]:
    """Yield each point of a finite subspace once. The values of each label start from a drawn one."""
    space = subspace.space

    def under(params: Mapping[str, Value]) -> Iterator[Params]:
        for block in space.walk(params):
            for label in block.labels:
                if label not in params:
                    for value in _values(subspace.domains[label], generator):
                        yield from under({**params, label: value})
                    return
        yield {label: params[label] for label in space.active(params)}

    return under(subspace.fixed)


def _values(domain: Domain, generator: np.random.Generator) -> Iterator[Value]:
    grid = domain.steps()
    assert grid is not None
    steps, size = grid
    start = int(generator.integers(steps.start, steps.stop))
    for place in chain(range(start, steps.stop), range(steps.start, start)):
        if not isinstance(domain, Discrete) or domain.probability(place) > 0:
            yield place * size
