"""Pareto front of trials with several losses: which are best, how much they cover, and an order of all of them.

All losses are minimised. One point dominates another if it is nowhere worse and somewhere better. Sources: [D] Deb,
Pratap, Agarwal, Meyarivan, "A Fast and Elitist Multiobjective Genetic Algorithm: NSGA-II", 2002; [B] Beume, Naujoks,
Emmerich, "SMS-EMOA: Multiobjective Selection Based on Dominated Hypervolume", 2007; [F] Fonseca, Paquete, Lopez-Ibanez,
"An Improved Dimension-Sweep Algorithm for the Hypervolume Indicator", 2006.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: part of the range of a loss by which the reference point lies beyond its worst value
MARGIN = 0.1
#: points of a front up to which the hypervolume of three losses orders them; beyond it crowding does, for its time's
#: sake
MOST_COVERED = 100
#: losses up to which a hypervolume is exact: the time of an exact one grows with the power of their number
MOST_EXACT = 3
#: points of Sobol's sequence that estimate the hypervolume of more losses; a power of two
SAMPLES = 4096
#: the greatest float
_GREATEST = float(np.finfo(np.float64).max)


class Front:
    """Losses that no other ones dominate, of equal ones the first, with the numbers of their trials."""

    def __init__(self) -> None:
        #: losses by the number of the trial
        self._losses: dict[int, tuple[float, ...]] = {}

    def add(self, number: int, losses: Sequence[float]) -> bool:
        """Add the losses of a trial; return whether it is on the front."""
        mine = tuple(losses)
        if any(_is_as_good(other, mine) for other in self._losses.values()):
            return False
        self._losses = {at: other for at, other in self._losses.items() if not _is_as_good(mine, other)}
        self._losses[number] = mine
        return True

    @property
    def numbers(self) -> list[int]:
        """Numbers of its trials, the least first loss first."""
        return sorted(self._losses, key=self._losses.__getitem__)

    @property
    def points(self) -> Array:
        """Their losses, shape (trials, losses)."""
        return np.array([self._losses[number] for number in self.numbers])


def reference_point(losses: Array) -> Array:
    """Return the point beyond the worst of each loss by MARGIN of its range, shape (losses,); a finite one."""
    sizes = _sizes(losses)
    low, worst = np.ldexp([losses.min(axis=0), losses.max(axis=0)], -sizes)
    with np.errstate(over="ignore"):
        return np.asarray(np.clip(np.ldexp(worst + MARGIN * (worst - low), sizes), -_GREATEST, _GREATEST))


def hypervolume(points: Array, reference: Array) -> float:
    """Return the volume between the points, shape (n, losses), and the reference point, shape (losses,).

    Exact up to MOST_EXACT losses; of more it is estimated.
    """
    return hypervolumes(points, reference, [len(points)])[0]


def hypervolumes(points: Array, reference: Array, counts: Sequence[int]) -> list[float]:
    """Return the hypervolume of the first so many points for each of the `counts`, which rise.

    One that is more than a float can hold is the greatest float.
    """
    # Differences of the greatest floats, and products of large ones, are more than a float can hold.
    sizes = _sizes(np.vstack([points, reference]))
    found = _scaled(np.ldexp(points, -sizes), np.ldexp(reference, -sizes), counts)
    with np.errstate(over="ignore"):
        return [float(each) for each in np.minimum(np.ldexp(found, sizes.sum()), _GREATEST)]


def _scaled(points: Array, reference: Array, counts: Sequence[int]) -> list[float]:
    """Return `hypervolumes` of losses from -1 to 1."""
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
    """Sweep over the last loss: between two points the volume is the area of a front of two losses ([F])."""
    end_x, end_y, end_z = map(float, reference)
    # That front from left to right, between two ends that no point reaches.
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
        # The points that the new one dominates go; one at the same x is among them.
        first = left if xs[left] == x else left + 1
        xs[first : right - 1], ys[first : right - 1] = [x], [y]
    return volume + area * (end_z - before)


def _estimated(points: Array, reference: Array, counts: Sequence[int]) -> list[float]:
    """Estimate by the part of a fixed quasi-random set, between the best of each loss and the reference, covered."""
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


def contributions(points: Array, reference: Array) -> Array:
    """Return the volume that each point of a front covers alone, shape (n,)."""
    found = np.empty(len(points))
    for place, point in enumerate(points):
        others = np.maximum(np.delete(points, place, axis=0), point)
        found[place] = np.prod(np.maximum(reference - point, 0.0)) - hypervolume(others, reference)
    return found


def first_front(points: Array) -> NDArray[np.bool_]:
    """Return which points no other one dominates, and of equal ones the first, shape (n,)."""
    order = np.lexsort((np.arange(len(points)), *points.T[::-1]))
    found = np.zeros(len(points), dtype=bool)
    if points.shape[1] == 2:
        # In this order a point is on the front if its second loss is below all before.
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


def order_of(losses: Array, violations: Array, most: int) -> NDArray[np.intp]:
    """Return the places of the best trials, `most` at most, the best first.

    Feasible ones come first, by fronts, and within a front by what each covers ([D], section III; [B]); then the others
    by their violations. `losses` has shape (n, losses), `violations` (n,): 0 for a feasible trial.
    """
    feasible = np.flatnonzero(violations <= 0)
    found: list[int] = []
    while len(feasible) and len(found) < most:
        is_first = first_front(losses[feasible])
        front, feasible = feasible[is_first], feasible[~is_first]
        found += front[spread(losses[front])].tolist()
    if len(found) < most:
        rest = np.flatnonzero(violations > 0)
        found += rest[np.lexsort((losses[rest, 0], violations[rest]))].tolist()
    return np.array(found[:most], dtype=np.intp)


def spread(points: Array) -> NDArray[np.intp]:
    """Return the places of a front's points in an order whose beginnings cover it well.

    Of two losses the point that covers least alone is last, and so on with the others ([B], section 3.1). Of three, for
    its time's sake, what each covers beside all others is looked at once; of more, how crowded it is ([D]).
    """
    points = np.ldexp(points, -_sizes(points))
    low, high = points.min(axis=0), points.max(axis=0)
    scaled = (points - low) / np.where(high > low, high - low, 1.0)
    if points.shape[1] != 2:
        is_covered = points.shape[1] <= MOST_EXACT and len(points) <= MOST_COVERED
        worth = contributions(scaled, _corner(scaled)) if is_covered else crowding(scaled)
        return np.argsort(-worth, kind="stable")
    left, last_first = [*range(len(points))], []
    while left:
        least = int(np.argmin(_covered_alone(scaled[left])))
        last_first.append(left.pop(least))
    return np.array(last_first[::-1], dtype=np.intp)


def crowding(points: Array) -> Array:
    """Return the sum over losses of the distance between a point's neighbours, infinite at the ends ([D], III B)."""
    found = np.zeros(len(points))
    for column in points.T:
        order = np.argsort(column, kind="stable")
        gaps = np.full(len(points), np.inf)
        gaps[1:-1] = column[order[2:]] - column[order[:-2]]
        found[order] += gaps
    return found


def _covered_alone(points: Array) -> Array:
    """Return `contributions` to a front of two losses, scaled to [0, 1]: each point's only neighbours are two."""
    order, corner = np.argsort(points[:, 0], kind="stable"), _corner(points)
    right = np.append(points[order[1:], 0], corner[0])
    above = np.concatenate([corner[1:], points[order[:-1], 1]])
    found = np.empty(len(points))
    found[order] = (right - points[order, 0]) * (above - points[order, 1])
    return found


def _corner(points: Array) -> Array:
    """Return the reference point of losses that are scaled to [0, 1]."""
    return np.full(points.shape[1], 1.0 + MARGIN)


def _sizes(losses: Array) -> NDArray[np.intc]:
    """Return the power of two above each loss's greatest size, shape (losses,): a scale that rounds nothing."""
    return np.asarray(np.frexp(np.abs(losses).max(axis=0))[1])


def _is_as_good(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
