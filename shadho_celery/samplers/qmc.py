"""The sampler `qmc`, and the scrambled Sobol sequence, whose points cover the space more evenly than independent draws.

Source: Owen, "Scrambling Sobol' and Niederreiter-Xing Points", Journal of Complexity 14, 1998.

The sequence is the same as in ``scipy.stats.qmc``, which is not used because its import takes half a second.

Sources: Joe and Kuo, "Constructing Sobol Sequences with Better Two-Dimensional Projections", SIAM Journal on Scientific
Computing 30, 2008, with the first of their direction numbers ``new-joe-kuo-6``; Matousek, "On the L2-Discrepancy for
Anchored Boxes", Journal of Complexity 14, 1998 (linear matrix scrambling and a digital shift).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.trial import Params, Trial
from shadho_celery.samplers.random import Learner
from shadho_celery.space.split import Subspace

#: binary digits of a coordinate
BITS = 30

#: primitive polynomial of each dimension after the first, and its initial direction numbers
DIRECTIONS = (
    (3, 1),
    (7, 1, 3),
    (11, 1, 3, 1),
    (13, 1, 1, 1),
    (19, 1, 1, 3, 3),
    (25, 1, 3, 5, 13),
    (37, 1, 1, 5, 5, 17),
    (41, 1, 1, 5, 5, 5),
    (47, 1, 1, 7, 11, 19),
    (55, 1, 1, 5, 1, 1),
    (59, 1, 1, 1, 3, 11),
    (61, 1, 3, 5, 5, 31),
    (67, 1, 3, 3, 9, 7, 49),
    (91, 1, 1, 1, 15, 21, 21),
    (97, 1, 3, 1, 13, 27, 49),
    (103, 1, 1, 1, 15, 7, 5),
    (109, 1, 3, 1, 15, 13, 25),
    (115, 1, 1, 5, 5, 19, 61),
    (131, 1, 3, 7, 11, 23, 15, 103),
)

#: value of each digit, the most significant first
_PLACES = np.arange(BITS - 1, -1, -1)


class PointSequence(Protocol):
    """A sequence of points in the unit cube."""

    def random(self, n: int) -> NDArray[np.float64]:
        """Return the next `n` points, shape (n, dimensions)."""


def sobol(dimensions: int, generator: np.random.Generator) -> PointSequence:
    """Return a scrambled Sobol sequence, equal to scipy's with this generator."""
    if dimensions <= 1 + len(DIRECTIONS):
        return Sobol(dimensions, generator)
    # Few spaces have so many labels, and the import takes half a second.
    from scipy.stats import qmc

    found: PointSequence = qmc.Sobol(dimensions, seed=generator)
    return found


class Sobol:
    """Scrambled Sobol sequence in at most 1 + len(DIRECTIONS) dimensions."""

    def __init__(self, dimensions: int, generator: np.random.Generator) -> None:
        # scipy makes its random numbers in the same way.
        seeds = generator.bit_generator.seed_seq.spawn(1)  # type: ignore[attr-defined]
        generator = np.random.default_rng(seeds[0])
        shift = generator.integers(2, size=(dimensions, BITS), dtype=np.uint32)
        lower = np.tril(generator.integers(2, size=(dimensions, BITS, BITS), dtype=np.uint32)).astype(np.int64)
        lower[:, range(BITS), range(BITS)] = 1
        digits = _directions(dimensions)[:, :, None] >> _PLACES & 1
        #: scrambled direction numbers, shape (BITS, dimensions)
        self._directions = ((np.einsum("dpk,djk->jdp", lower, digits) & 1) << _PLACES).sum(axis=2)
        #: latest point, as integers; at first, the digital shift
        self._point = (shift.astype(np.int64) << np.arange(BITS)).sum(axis=1)
        self._number = 0

    def random(self, n: int) -> NDArray[np.float64]:
        """Return the next `n` points, shape (n, dimensions)."""
        steps = np.zeros((n, len(self._point)), dtype=np.int64)
        for row, number in enumerate(range(self._number, self._number + n)):
            # In the order of the Gray code, consecutive points differ by one direction number: that of the lowest bit
            # of `number`.
            steps[row] = self._directions[(number & -number).bit_length() - 1] if number else 0
        steps[0] ^= self._point
        points = np.bitwise_xor.accumulate(steps)
        self._point, self._number = points[-1], self._number + n
        return np.ldexp(points, -BITS)


def _directions(dimensions: int) -> NDArray[np.int64]:
    """Return the direction numbers, computed by the recurrences of their polynomials, shape (dimensions, BITS)."""
    found = np.ones((dimensions, BITS), dtype=np.int64)
    for row, (polynomial, *initial) in enumerate(DIRECTIONS[: dimensions - 1], start=1):
        degree, numbers = len(initial), list(initial)
        for _ in range(degree, BITS):
            number = numbers[-degree]
            for k in range(1, degree + 1):
                if polynomial >> (degree - k) & 1:
                    number ^= numbers[-k] << k
            numbers.append(number)
        found[row] = numbers
    return found << _PLACES


#: number of points computed at a time
BLOCK = 64
#: maximum number of further draws to find a point that was not tried
REDRAWN = 16


class QmcSampler(Learner):
    """Quasi-random search.

    The trials of a subspace are the first points of one sequence, however they are requested.
    """

    adaptive = False

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        self._points = np.empty((0, len(subspace.domains)))
        self._sequence: PointSequence | None = None

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        asked: list[Params] = []
        taken = {self._subspace.key(trial.params) for trial in pending}
        for place in self._places(n, pending):
            params = self.point(place)
            if self._subspace.space.where is not None and not self._is_new(params, taken):
                # Draws have replaced points that `where` refuses, and they may repeat each other.
                generator = np.random.default_rng([*self._entropy, place, REDRAWN])
                others = (self._subspace.sample(generator, 1)[0] for _ in range(REDRAWN))
                params = next((each for each in others if self._is_new(each, taken)), params)
            taken.add(self._subspace.key(params))
            asked.append(params)
        return asked

    def point(self, index: int, within: Subspace | None = None, medians: Collection[str] = ()) -> Params:
        """Return the params at a place of the sequence: the quantiles of the active labels at the point's coordinates.

        With `within`, the params are in a part of this subspace: its choices are fixed, and the coordinates are the
        same. Labels in `medians` have their medians. If the space's `where` does not allow the point, the params are
        drawn.
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
        params = part.at(np.array([masses[label] for label in part.domains]))
        return part.first_allowed([params], np.random.default_rng([*self._entropy, index]))

    def outlook(self, parts: Sequence[Subspace], index: int) -> Mapping[str, float]:
        """Return 1 for the part of the space with the point at this place of the sequence, and 0 for the
        other parts.
        """
        point = self.point(index)
        return {part.name: float(part.contains(point)) for part in parts}

    def centre(self, within: Subspace | None = None) -> Params:
        """Return the params at the median of each label's distribution, or other params if `where` refuses these."""
        part = within or self._subspace
        params = part.at(np.full(len(part.domains), 0.5))
        return params if part.space.allows(params) or not part.domains else self.point(0, part)
