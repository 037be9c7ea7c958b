"""Pareto front of trials with several losses, and its hypervolume.

All losses are minimised. A point dominates another one if no loss is worse and at least one loss is better. Source: [F]
Fonseca, Paquete, Lopez-Ibanez, "An Improved Dimension-Sweep Algorithm for the Hypervolume Indicator", 2006.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: fraction of the range of a loss by which the reference point lies beyond the worst value
MARGIN = 0.1
#: greatest number of losses for an exact hypervolume, because its time grows exponentially with the number of losses
MOST_EXACT = 3
#: number of Sobol points that estimate the hypervolume of more than MOST_EXACT losses; a power of two
SAMPLES = 4096
#: the greatest float
_GREATEST = float(np.finfo(np.float64).max)


class Front:
    """Pareto front: the losses of trials that no other trial dominates. Of equal losses, only the first are kept."""

    def __init__(self) -> None:
        #: losses by trial number
        self._losses: dict[int, tuple[float, ...]] = {}

    def add(self, number: int, losses: Sequence[float]) -> bool:
        """Add the losses of a trial. Return whether it is on the front."""
        mine = tuple(losses)
        if any(_is_as_good(other, mine) for other in self._losses.values()):
            return False
        self._losses = {at: other for at, other in self._losses.items() if not _is_as_good(mine, other)}
        self._losses[number] = mine
        return True

    def __len__(self) -> int:
        return len(self._losses)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the trials on the front, sorted by the first loss."""
        return sorted(self._losses, key=self._losses.__getitem__)

    @property
    def points(self) -> Array:
        """Losses of the trials on the front, in the order of `numbers`, shape (trials, losses)."""
        return np.array([self._losses[number] for number in self.numbers])


def reference_point(losses: Array) -> Array:
    """Return a point worse than the worst value of each loss by MARGIN of the loss's range, shape (losses,).

    It is finite.
    """
    scale = sizes(losses)
    low, worst = np.ldexp([losses.min(axis=0), losses.max(axis=0)], -scale)
    with np.errstate(over="ignore"):
        return np.asarray(np.clip(np.ldexp(worst + MARGIN * (worst - low), scale), -_GREATEST, _GREATEST))


def hypervolume(points: Array, reference: Array) -> float:
    """Return the volume between the points, shape (n, losses), and the reference point, shape (losses,).

    It is exact up to MOST_EXACT losses; for more losses it is estimated.
    """
    return hypervolumes(points, reference, [len(points)])[0]


def hypervolumes(points: Array, reference: Array, counts: Sequence[int]) -> list[float]:
    """Return the hypervolume of the first `count` points for each count of `counts`, which increase.

    A hypervolume that is too large for a float is the greatest float.
    """
    # Differences of the greatest floats, and products of large ones, overflow.
    scale = sizes(np.vstack([points, reference]))
    found = _scaled(np.ldexp(points, -scale), np.ldexp(reference, -scale), counts)
    with np.errstate(over="ignore"):
        return [float(each) for each in np.minimum(np.ldexp(found, scale.sum()), _GREATEST)]


def _scaled(points: Array, reference: Array, counts: Sequence[int]) -> list[float]:
    """Return the same as `hypervolumes`, for losses from -1 to 1."""
    if points.shape[1] > MOST_EXACT:
        return _estimated(points, reference, counts)
    exact = _swept_plane if points.shape[1] == 2 else _swept_space
    found = []
    for count in counts:
        first = points[:count]
        found.append(exact(first[(first < reference).all(axis=1)], reference) if count else 0.0)
    return found


def _swept_plane(points: Array, reference: Array) -> float:
    points = points[first_front(points)]
    points = points[np.lexsort((points[:, 1], points[:, 0]))]
    above = np.concatenate([reference[1:], points[:-1, 1]])
    return float(((reference[0] - points[:, 0]) * (above - points[:, 1])).sum())


def _swept_space(points: Array, reference: Array) -> float:
    """Return the hypervolume of three losses, by a sweep over the last one ([F]).

    Between two points, the volume is the area under the front of the first two losses times the difference in the last.
    """
    end_x, end_y, end_z = map(float, reference)
    # The front of two losses from left to right, between two ends that no point reaches.
    xs, ys = [-np.inf, end_x], [end_y, -np.inf]
    volume, area, before = 0.0, 0.0, end_z
    for x, y, z in sorted(points.tolist(), key=lambda point: point[2]):
        left = bisect_right(xs, x) - 1
        if ys[left] <= y:
            continue
        volume, before = volume + area * (z - before), z
        right, at = left + 1, x
        while ys[right - 1] > y:
            area += (min(xs[right], end_x) - at) * (ys[right - 1] - y)
            at, right = xs[right], right + 1
        # The points dominated by the new one are removed, including one at the same x.
        first = left if xs[left] == x else left + 1
        xs[first : right - 1], ys[first : right - 1] = [x], [y]
    return volume + area * (end_z - before)


def _estimated(points: Array, reference: Array, counts: Sequence[int]) -> list[float]:
    """Estimate hypervolumes: the share of fixed quasi-random points that is dominated, times the volume of their box.

    The box lies between the best value of each loss and the reference point.
    """
    from scipy.stats import qmc  # takes half a second to import, and few studies have so many losses

    inside = (points < reference).all(axis=1)
    if not inside.any():
        return [0.0] * len(counts)
    best = points[inside].min(axis=0)
    unit = qmc.Sobol(len(reference), seed=np.random.default_rng(0)).random(SAMPLES)
    uncovered, volume = best + unit * (reference - best), float(np.prod(reference - best))
    found, done = [], 0
    for count in counts:
        for point in points[done:count]:
            uncovered = uncovered[(uncovered < point).any(axis=1)]
        done = count
        found.append(volume * (1.0 - len(uncovered) / SAMPLES))
    return found


def first_front(points: Array) -> NDArray[np.bool_]:
    """Return True for each point that no other point dominates, shape (n,). Of equal points, only the first is True."""
    order = np.lexsort((np.arange(len(points)), *points.T[::-1]))
    found = np.zeros(len(points), dtype=bool)
    if points.shape[1] == 2:
        # In this order, a point is on the front if its second loss is below those of all earlier points.
        second = points[order, 1]
        least = np.minimum.accumulate(second)
        found[order] = second < np.concatenate([[np.inf], least[:-1]])
        return found
    kept = np.empty((0, points.shape[1]))
    for place in order:
        if not (kept <= points[place]).all(axis=1).any():
            kept = np.concatenate([kept, points[place : place + 1]])
            found[place] = True
    return found


def sizes(losses: Array) -> NDArray[np.intc]:
    """Return the exponent of the power of two above each loss's greatest absolute value, shape (losses,).

    Scaling by a power of two does not round.
    """
    return np.asarray(np.frexp(np.abs(losses).max(axis=0))[1])


def _is_as_good(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
