"""Quasi-random points, which cover the space more evenly than independent draws: scrambled Sobol sequence.

Source: Owen, "Scrambling Sobol' and Niederreiter-Xing Points", Journal of Complexity 14, 1998.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from shadho_celery.core.trial import Params, Trial
from shadho_celery.samplers.base import Stream
from shadho_celery.samplers.sobol import Sequence as SobolSequence
from shadho_celery.samplers.sobol import sobol
from shadho_celery.space.split import Subspace

#: number of points computed at a time
BLOCK = 64


class QmcSampler(Stream):
    """Quasi-random search. A subspace's trials are a prefix of one sequence, however many are requested at a time."""

    adaptive = False

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        self._points = np.empty((0, len(subspace.domains)))
        self._sequence: SobolSequence | None = None

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        return [self.point(place) for place in self._places(n, pending)]

    def tell(self, trials: Sequence[Trial]) -> None:
        self._told += len(trials)

    def point(self, index: int, within: Subspace | None = None, medians: Collection[str] = ()) -> Params:
        """Return the params at a place of the sequence: each label's quantile, then the active ones.

        With `within`, the params of a part of this subspace: its choices are fixed, and the quantiles are the same.
        Labels in `medians` are at their medians.
        """
        domains = self._subspace.domains
        if not domains:
            return self.centre()
        if index >= len(self._points):
            self._sequence = self._sequence or sobol(len(domains), np.random.default_rng(self._entropy))
            more = [self._sequence.random(BLOCK) for _ in range(1 + (index - len(self._points)) // BLOCK)]
            self._points = np.concatenate([self._points, *more])
        part = within or self._subspace
        masses = dict(zip(domains, self._points[index], strict=True)) | dict.fromkeys(medians, 0.5)
        return part.at(np.array([masses[label] for label in part.domains]))

    def outlook(self, parts: Sequence[Subspace], index: int) -> Mapping[str, float]:
        """Return for each part of the space 1 if the point at this place of the sequence is in it, else 0."""
        point = self.point(index)
        return {part.name: float(part.contains(point)) for part in parts}

    def centre(self, within: Subspace | None = None) -> Params:
        """Return the params at the median of each label's distribution."""
        part = within or self._subspace
        return part.at(np.full(len(part.domains), 0.5))
