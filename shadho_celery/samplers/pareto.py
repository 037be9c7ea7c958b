"""Order of trials with several losses: by fronts, and within a front by hypervolume or crowding.

All losses are minimised. Sources: [D] Deb, Pratap, Agarwal, Meyarivan, "A Fast and Elitist Multiobjective Genetic
Algorithm: NSGA-II", 2002; [B] Beume, Naujoks, Emmerich, "SMS-EMOA: Multiobjective Selection Based on Dominated
Hypervolume", 2007.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shadho_celery.study.front import MARGIN, MOST_EXACT, Array, first_front, hypervolume, sizes

#: points of a front up to which the hypervolume of three losses orders them; more are ordered by crowding, which takes
#: less time
MOST_COVERED = 100


def order_of(losses: Array, violations: Array, most: int) -> NDArray[np.intp]:
    """Return the indexes of the best trials, `most` at most, the best first.

    Feasible trials come first, by fronts, and within a front as in `spread` ([D], section III; [B]). The other trials
    follow, sorted by violation. `losses` has shape (n, losses), `violations` (n,): 0 for a feasible trial.
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


def contributions(points: Array, reference: Array) -> Array:
    """Return the volume that each point of a front covers alone, shape (n,)."""
    found = np.empty(len(points))
    for place, point in enumerate(points):
        others = np.maximum(np.delete(points, place, axis=0), point)
        found[place] = np.prod(np.maximum(reference - point, 0.0)) - hypervolume(others, reference)
    return found


def spread(points: Array) -> NDArray[np.intp]:
    """Return the indexes of a front's points in an order in which the first points already cover the front well.

    For two losses, the point that alone covers the least volume is put last, and this is repeated with the remaining
    points ([B], section 3.1). To save time, for three losses the volume that each point covers alone is computed only
    once, and for more losses crowding is used ([D]).
    """
    points = np.ldexp(points, -sizes(points))
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
    """Return `contributions` to a front of two losses, scaled to [0, 1]. Each point has only two neighbours."""
    order, corner = np.argsort(points[:, 0], kind="stable"), _corner(points)
    right = np.append(points[order[1:], 0], corner[0])
    above = np.concatenate([corner[1:], points[order[:-1], 1]])
    found = np.empty(len(points))
    found[order] = (right - points[order, 0]) * (above - points[order, 1])
    return found


def _corner(points: Array) -> Array:
    """Return the reference point of losses that are scaled to [0, 1]."""
    return np.full(points.shape[1], 1.0 + MARGIN)
