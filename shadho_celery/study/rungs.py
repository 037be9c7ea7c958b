"""Finished trials by rung: how many, where, and how well the ranks of a rung agree with those of the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

from msgspec import Struct

#: number of latest trials on two rungs by which these are compared
LATEST = 16


class OnClass(Struct, frozen=True, kw_only=True):
    """Finished trials of a rung, or of a subspace, on one compute class."""

    complete: int
    pruned: int
    failed: int
    #: median seconds of the complete ones; None if there are none
    seconds: float | None


class RungSummary(Struct, frozen=True, kw_only=True):
    """Finished trials of one rung."""

    budget: float
    #: by compute class; trials that were never sent are left out
    classes: Mapping[str, OnClass]
    #: of the latest promoted trials, the agreement of their ranks here and on the next rung; None if there are too few
    agreement: float | None


def agreement(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Kendall's rank correlation of two losses, 0 if it is negative; None for fewer than two finite pairs."""
    known = [pair for pair in pairs if math.isfinite(pair[0]) and math.isfinite(pair[1])]
    compared = [*combinations(known, 2)]
    if not compared:
        return None
    signs = [_sign(one[0] - other[0]) * _sign(one[1] - other[1]) for one, other in compared]
    return max(0.0, sum(signs) / len(compared))


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)
