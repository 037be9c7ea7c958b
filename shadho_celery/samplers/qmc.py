"""Quasi-random points, which cover the space more evenly than independent draws: scrambled Sobol sequence.

Source: Owen, "Scrambling Sobol' and Niederreiter-Xing Points", Journal of Complexity 14, 1998.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from shadho_celery.core.trial import Params, Trial
from shadho_celery.samplers.base import Stream
from shadho_celery.space.split import Subspace

#: number of points computed at a time
BLOCK = 64


class QmcSampler(Stream):
    """Quasi-random search. A subspace's trials are a prefix of one sequence, however many are requested at a time."""

    adaptive = False

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        self._points = np.empty((0, len(subspace.domains)))
        self._sequence: Any = None

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        return [self.point(place) for place in self._places(n, pending)]

    def tell(self, trials: Sequence[Trial]) -> None:
        self._told += len(trials)

    def point(self, index: int) -> Params:
        """Return the params at a place of the sequence: each label's quantile, then the active ones."""
        domains = self._subspace.domains
        if not domains:
            return self.centre()
        if index >= len(self._points):
            self._sequence = self._sequence or _sobol(len(domains), self._entropy)
            more = [self._sequence.random(BLOCK) for _ in range(1 + (index - len(self._points)) // BLOCK)]
            self._points = np.concatenate([self._points, *more])
        return self._subspace.at(self._points[index])

    def centre(self) -> Params:
        """Return the params at the median of each label's distribution."""
        return self._subspace.at(np.full(len(self._subspace.domains), 0.5))


def _sobol(dimensions: int, seed: Sequence[int]) -> Any:
    from scipy.stats import qmc  # takes half a second to import, and not every search needs it

    return qmc.Sobol(dimensions, seed=np.random.default_rng(seed))
