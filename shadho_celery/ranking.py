"""The order of the subspaces and the compute classes each one may use, as the paper has them (policy `paper`).

Source: Kinnison, Kremer-Herman, Thain, Scheirer, "SHADHO: Massively Scalable Hardware-Aware Distributed Hyperparameter
Optimization", arXiv 1707.01428.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
U = TypeVar("U", bound=Hashable)

#: how fast the weights of a class's lower-placed subspaces fall
DECAY = 0.5


def rank(names: Sequence[str], complexities: Mapping[str, float], performances: Mapping[str, float]) -> list[str]:
    """Order subspaces from the one that deserves the strongest class to the one that deserves the weakest.

    A subspace's place is the product of its positions (from 1) by complexity and by performance, both descending;
    the smallest product comes first. Ties keep the order of `names`, within each position too: while all performances
    are equal, `names` in any order but descending complexity outvotes part of the complexity. Raises KeyError where a
    name has no score.
    Source: SHADHO, arXiv 1707.01428.
    """
    by_complexity = _positions(names, complexities)
    by_performance = _positions(names, performances)
    return sorted(names, key=lambda name: by_complexity[name] * by_performance[name])


def _positions(names: Sequence[str], scores: Mapping[str, float]) -> dict[str, int]:
    # `reverse` keeps equal scores in their old order, so ties are stable here too.
    descending = sorted(names, key=lambda name: scores[name], reverse=True)
    return {name: position for position, name in enumerate(descending, start=1)}


def pair(subspaces: Sequence[T], classes: Sequence[U]) -> dict[U, list[T]]:
    """Give each compute class its subspaces, best first; every subspace gets at least two neighbouring classes.

    Both arguments are ranked: index 0 is the top subspace and the strongest class. With one class it gets everything;
    without subspaces every list is empty; without classes so is the answer. Raises ValueError where a class is named
    twice. Source: SHADHO, arXiv 1707.01428, with the second pairing.
    """
    if len(set(classes)) != len(classes):
        raise ValueError("a compute class is named twice; each may appear once in the ranking")
    if len(classes) == 1:
        return {classes[0]: list(subspaces)}
    members: list[set[int]] = [set() for _ in classes]
    if subspaces and classes:
        for subspace, compute_class in _pairs(len(subspaces), len(classes)):
            members[compute_class].add(subspace)
    return {name: [subspaces[k] for k in sorted(indices)] for name, indices in zip(classes, members, strict=True)}


def _pairs(subspaces: int, classes: int) -> list[tuple[int, int]]:
    """All (subspace, class) index pairs for at least one subspace and at least two classes, some of them twice."""
    pairs = []
    # The paper walks the longer list and steps j up where i > ceil((j + 1) |L| / |S| - 1), that is, where
    # i |S| >= (j + 1) |L|. So j is a whole-number division, and no rounding of a running sum can shift a pair.
    if subspaces >= classes:
        for i in range(subspaces):
            j = i * classes // subspaces
            pairs += [(i, j), (i, _neighbour(j, classes))]
    else:
        for i in range(classes):
            j = i * subspaces // classes
            pairs += [(j, i), (j, _neighbour(i, classes))]
    return pairs


def _neighbour(index: int, length: int) -> int:
    """The next class towards the middle; inside the list whenever that holds two or more."""
    return index + 1 if 2 * index < length else index - 1


def planck_weights(n: int) -> NDArray[np.float64]:
    """Chances, shape (n,), with which a class draws the next trial from its first, second, ... subspace.

    exp(-0.5 k) for position k, cut off after n and made to add up to 1. Raises ValueError for a negative n.
    Source: SHADHO, arXiv 1707.01428 (truncated Planck distribution).
    """
    if n < 0:
        raise ValueError(f"a class cannot hold {n} subspaces")
    weights = np.exp(-DECAY * np.arange(n))
    normalised: NDArray[np.float64] = weights / weights.sum()  # an empty array stays one: nothing is divided
    return normalised
