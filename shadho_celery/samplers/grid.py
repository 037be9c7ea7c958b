"""Grid search: tries each combination of a few values of every label once, in a seeded order that covers the grid."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.space.domains import Categorical, Domain
from shadho_celery.space.split import Key, Subspace
from shadho_celery.space.tree import Value

#: number of values of a continuous label; maximum number of values of a rounded or integer label. A choice has all of
#: its options
LEVELS, MOST = 5, 20
#: maximum number of random steps that are tried; then the step is 1
STEPS = 64


class GridSampler:
    """Grid search within one subspace. Once all points have been tried, it returns fewer params than requested."""

    adaptive = False

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        self._subspace = subspace
        self._levels = {label: levels(domain) for label, domain in subspace.domains.items()}
        #: points that were not proposed yet; points of cancelled trials, which are proposed again
        self._points = subspace.space.allowed(self._walk(np.random.default_rng(entropy)))
        self._again: deque[Params] = deque()
        self._taken: set[Key] = set()

    @property
    def size(self) -> int:
        """Number of combinations of the labels' values. It may exceed the number of points, because labels may be
        inactive.
        """
        return math.prod(map(len, self._levels.values()))

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        taken = self._taken | {self._subspace.key(trial.params) for trial in pending}
        asked: list[Params] = []
        while len(asked) < n:
            params = self._again.popleft() if self._again else next(self._points, None)
            if params is None:
                break
            if self._subspace.key(params) not in taken:
                asked.append(params)
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial.state is TrialState.CANCELLED:
                self._again.append({**trial.params})
            else:
                self._taken.add(self._subspace.key(trial.params))

    def _walk(self, generator: np.random.Generator) -> Iterator[Params]:
        """Yield each point of the grid once.

        The places are start + step * i (modulo the size), which are all places if step and size have no common divisor.
        """
        size = self.size
        start = _below(size, generator)
        steps = (1 + _below(size, generator) for _ in range(STEPS))
        step = next((step for step in steps if math.gcd(step, size) == 1), 1)
        for index in range(size):
            if (params := self._at((start + step * index) % size)) is not None:
                yield params

    def _at(self, place: int) -> Params | None:
        """Return the point at a place of the grid.

        Places that differ only in inactive labels have the same point. It is returned for the place where these labels
        have their first values; for the other places, None is returned.
        """
        params: dict[str, Value] = {**self._subspace.fixed}
        for label, values in self._levels.items():
            place, index = divmod(place, len(values))
            params[label] = values[index]
        active = self._subspace.space.active(params)
        is_first = all(params[label] == values[0] for label, values in self._levels.items() if label not in active)
        return {label: params[label] for label in active} if is_first else None


def levels(domain: Domain) -> list[Value]:
    """Return the values of a label in the grid: all options, all values of a label with few values, else quantiles."""
    if isinstance(domain, Categorical):
        return [place for place in range(domain.first, domain.first + domain.count) if domain.probability(place) > 0]
    cells = domain.cardinality(1.0 - 1e-9)
    number = LEVELS if cells is None else min(cells, MOST)
    masses = (np.arange(number) + 0.5) / number
    if cells is not None and cells <= MOST:
        # Rounded values at the ends are less probable than others, so finer quantiles are used to reach them.
        masses = (np.arange(50 * MOST) + 0.5) / (50 * MOST)
    return list(dict.fromkeys(domain.quantile(masses).tolist()))


def _below(size: int, generator: np.random.Generator) -> int:
    """Return a random integer below `size`, which may be too large for numpy's integers."""
    return int.from_bytes(generator.bytes(8 + size.bit_length() // 8), "little") % size
