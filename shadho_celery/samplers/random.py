"""Independent draws from the search space's own distributions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from shadho_celery.core.trial import Params, Trial
from shadho_celery.samplers.base import Stream
from shadho_celery.space.split import Subspace
from shadho_celery.space.tree import Value

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
