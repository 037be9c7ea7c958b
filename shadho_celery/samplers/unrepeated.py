"""A sampler of the whole space as the sampler of one subspace, where no point is proposed twice.

Points are repeated only after all points of a finite subspace have been tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from shadho_celery.core.trial import Params, Trial
from shadho_celery.samplers.base import Learner, WholeSampler
from shadho_celery.space.domains import Discrete, Domain
from shadho_celery.space.split import Key, Subspace
from shadho_celery.space.tree import Value

#: number of draws from the prior to replace a point that was tried; after that, all points are searched one by one
DRAWS = 64
#: mixed into the seed for these draws
_STREAM = 0x75


class Unrepeated(Learner):
    """Passes on another sampler's proposals within a subspace, and replaces tried points by untried draws of the prior.

    Pending and failed trials count as tried, and cancelled trials do not. Once a finite subspace has no untried points,
    it returns fewer params than requested, unless it `may_repeat` points. For an infinite subspace it changes nothing.
    """

    def __init__(self, sampler: WholeSampler, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        self.sampler = sampler
        self.adaptive = sampler.adaptive
        #: True once points may be proposed again
        self.may_repeat = False
        #: number of points of the subspace; None until all have been tried
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
        """Return an untried draw for the trial at this place, else any untried point, or None if there is none."""
        generator = np.random.default_rng([*self._entropy, _STREAM, place])
        others = chain(self._subspace.sample(generator, DRAWS), points(self._subspace, generator))
        return next((params for params in others if self._is_new(params, waiting)), None)


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
