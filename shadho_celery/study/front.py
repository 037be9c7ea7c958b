"""Pareto fronts of trials with several losses: the trials on a front, their order, and the hypervolume over time.

Losses are minimised, except in a `Coverage`. A point dominates another one if no loss is worse and at least one loss is
better. Sources: [D] Deb, Pratap, Agarwal, Meyarivan, "A Fast and Elitist Multiobjective Genetic Algorithm: NSGA-II",
2002; [F] Fonseca, Paquete, Lopez-Ibanez, "An Improved Dimension-Sweep Algorithm for the Hypervolume Indicator", 2006;
[B] Beume, Naujoks, Emmerich, "SMS-EMOA: Multiobjective Selection Based on Dominated Hypervolume", 2007.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shadho_celery.core.checks import plain, short
from shadho_celery.core.trial import turned
from shadho_celery.errors import UsageError

Array = NDArray[np.float64]

#: the reference point is worse than the worst value of a loss by this fraction of the loss's range
MARGIN = 0.1
#: greatest number of losses for an exact hypervolume, because its time grows exponentially with the number of losses
MOST_EXACT = 3
#: number of Sobol points that estimate the hypervolume of more than MOST_EXACT losses; a power of two
SAMPLES = 4096
#: a front of three losses with at most this number of points is ordered by hypervolume; a larger one by crowding, which
#: takes less time
MOST_COVERED = 100
#: maximum number of entries in the history of a hypervolume; if the front changed more often, changes are left out
MOST_CHANGES = 100
#: number of trials that are compared with the front at once
BLOCK = 2000
#: the greatest float
_GREATEST = float(np.finfo(np.float64).max)


class Front:
    """Pareto front: the losses of trials that no other trial dominates. Of trials with equal losses, only the first is
    kept.
    """

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
    """Return a point that is worse than the worst value of each loss by MARGIN of the loss's range, shape (losses,).

    All of its values are finite.
    """
    scale = sizes(losses)
    low, worst = np.ldexp([losses.min(axis=0), losses.max(axis=0)], -scale)
    with np.errstate(over="ignore"):
        return np.asarray(np.clip(np.ldexp(worst + MARGIN * (worst - low), scale), -_GREATEST, _GREATEST))


def hypervolume(points: Array, reference: Array) -> float:
    """Return the volume that `points`, shape (n, losses), dominate up to `reference`, shape (losses,).

    It is exact for at most MOST_EXACT losses, and estimated for more.
    """
    return hypervolumes(points, reference, [len(points)])[0]


def hypervolumes(points: Array, reference: Array, counts: Sequence[int]) -> list[float]:
    """Return the hypervolume of the first n points, for each n in the increasing `counts`.

    A hypervolume that is too large for a float is the greatest float.
    """
    # Losses are scaled, because differences and products of very large floats overflow.
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
    # The front of the first two losses, sorted by the first one, between two points that are never dominated.
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
    """Estimate hypervolumes as the dominated share of fixed quasi-random points in a box, times the volume of the box.

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
    for index in order:
        if not (kept <= points[index]).all(axis=1).any():
            kept = np.concatenate([kept, points[index : index + 1]])
            found[index] = True
    return found


def sizes(losses: Array) -> NDArray[np.intc]:
    """Return for each loss the exponent of the power of two above its greatest absolute value, shape (losses,).

    Losses are scaled by powers of two, because this causes no rounding errors.
    """
    return np.asarray(np.frexp(np.abs(losses).max(axis=0))[1])


def dominates(points: Array, others: Array) -> NDArray[np.bool_]:
    """Return whether a point dominates another one, for one point and many, or for many and one, shape (n,)."""
    return np.asarray((points <= others).all(axis=1) & (points < others).any(axis=1))


def _is_as_good(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other, strict=True))


def order_of(losses: Array, violations: Array, most: int, is_gone: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """Return the indexes of the best trials, `most` at most, the best first.

    Feasible trials come first: those of the first front in the order of `spread`, then those of the front without the
    first one, and so on ([D], section III; [B]). Infeasible trials follow, sorted by violation. `losses` has shape (n,
    losses), `violations` (n,): 0 for a feasible trial. To save time, a front of which all trials are returned is not
    ordered if they are all gone (`is_gone`, shape (n,)).
    """
    feasible = np.flatnonzero(violations <= 0)
    found: list[int] = []
    while len(feasible) and len(found) < most:
        is_first = first_front(losses[feasible])
        front, feasible = feasible[is_first], feasible[~is_first]
        is_unordered = is_gone is not None and len(found) + len(front) <= most and is_gone[front].all()
        found += (front if is_unordered else front[spread(losses[front])]).tolist()
    if len(found) < most:
        rest = np.flatnonzero(violations > 0)
        found += rest[np.lexsort((losses[rest, 0], violations[rest]))].tolist()
    return np.array(found[:most], dtype=np.intp)


def contributions(points: Array, reference: Array) -> Array:
    """Return the volume that each point of a front covers alone, shape (n,)."""
    found = np.empty(len(points))
    for index, point in enumerate(points):
        others = np.maximum(np.delete(points, index, axis=0), point)
        found[index] = np.prod(np.maximum(reference - point, 0.0)) - hypervolume(others, reference)
    return found


def spread(points: Array) -> NDArray[np.intp]:
    """Return the indexes of a front's points, ordered so that the first points already cover the front well.

    For two losses, the point that covers the least volume alone is put last, and this is repeated with the remaining
    points ([B], section 3.1). To save time, the volumes of three losses are computed only once, and more losses are
    ordered by crowding ([D]).
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
    """Return the crowding distance of each point: the sum over losses of the distance between its two neighbours.

    It is infinite at the ends ([D], III B).
    """
    found = np.zeros(len(points))
    for column in points.T:
        order = np.argsort(column, kind="stable")
        gaps = np.full(len(points), np.inf)
        gaps[1:-1] = column[order[2:]] - column[order[:-2]]
        found[order] += gaps
    return found


def _covered_alone(points: Array) -> Array:
    """Return the `contributions` of a front of two losses scaled to [0, 1]. They depend only on a point's two
    neighbours.
    """
    order, corner = np.argsort(points[:, 0], kind="stable"), _corner(points)
    right = np.append(points[order[1:], 0], corner[0])
    above = np.concatenate([corner[1:], points[order[:-1], 1]])
    found = np.empty(len(points))
    found[order] = (right - points[order, 0]) * (above - points[order, 1])
    return found


def _corner(points: Array) -> Array:
    """Return the reference point of losses that are scaled to [0, 1]."""
    return np.full(points.shape[1], 1.0 + MARGIN)


class Coverage(Struct, frozen=True, kw_only=True):
    """Hypervolume of a front over time. For more than three losses it is an estimate."""

    #: reference point: by name of the loss, a value as the objective returns it, even if the loss is maximised
    reference: Mapping[str, float]
    #: pairs of a number of ended trials, and the hypervolume of the front after this number; the last pair is current
    history: Sequence[tuple[int, float]]

    @property
    def hypervolume(self) -> float:
        """Hypervolume of the current front."""
        return self.history[-1][1]


def coverage(
    ended: NDArray[np.intp],
    losses: Array,
    objectives: Mapping[str, str],
    reference: Mapping[str, float] | None = None,
) -> Coverage | None:
    """Return the hypervolume of the front over time. Return None for a study with one loss, or without a feasible
    trial.

    `losses` are those of feasible trials, negated if maximised, shape (trials, losses). `ended` has for each of these
    trials the number of all trials that had ended with it or before. The default `reference` is `reference_point`.
    Raises UsageError unless `reference` has a finite number for each loss.
    """
    minimised = None if reference is None else turned(_checked(reference, objectives), objectives)
    if len(objectives) < 2 or not len(ended):
        return None
    point = reference_point(losses) if minimised is None else np.array([minimised[name] for name in objectives])
    changes = _changes(losses)
    looked_at = sorted({round(index) for index in np.linspace(0, len(changes) - 1, min(MOST_CHANGES, len(changes)))})
    # A point that has left the front need not be removed, because the points that replaced it cover its volume.
    volumes = hypervolumes(losses[changes], point, [index + 1 for index in looked_at])
    history = [(int(ended[changes[index]]), volume) for index, volume in zip(looked_at, volumes, strict=True)]
    own = turned(dict(zip(objectives, point.tolist(), strict=True)), objectives)
    return Coverage(reference=own, history=history)


def _changes(losses: Array) -> list[int]:
    """Return the indices of the trials that were on the front when they ended."""
    front, found = Front(), []
    for start in range(0, len(losses), BLOCK):
        block = losses[start : start + BLOCK]
        # Most trials are dominated by the front so far. They are left out together, which is faster.
        is_behind = np.zeros(len(block), bool)
        for point in front.points if len(front) else []:
            is_behind |= (point <= block).all(axis=1)
        for index in np.flatnonzero(~is_behind).tolist():
            if front.add(start + index, block[index].tolist()):
                found.append(start + index)
    return found


def _checked(reference: object, objectives: Mapping[str, str]) -> dict[str, float]:
    """Return a reference point as floats. Raises UsageError unless it has a finite number for each loss."""
    if isinstance(reference, Mapping) and {*reference} == {*objectives}:
        with suppress(msgspec.ValidationError):
            found = msgspec.convert(plain(reference), dict[str, float])
            if all(map(math.isfinite, found.values())):
                return found
    losses = ", ".join(objectives)
    raise UsageError(f"the reference point {short(reference)} should have the losses {losses}, a finite number each")
