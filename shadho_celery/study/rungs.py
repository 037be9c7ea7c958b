"""Summaries of finished trials by rung: their counts, classes and seconds, and whether ranks agree between rungs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import itemgetter
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]

#: number of latest promoted trials by which two rungs are compared
LATEST = 16


class OnClass(Struct, frozen=True, kw_only=True):
    """Counts of the finished trials of a rung, or of a subspace, on one compute class, and their median time."""

    complete: int
    pruned: int
    failed: int
    #: median seconds of the complete trials; None if there is no complete trial
    seconds: float | None


class RungSummary(Struct, frozen=True, kw_only=True):
    """Summary of the finished trials of one rung."""

    budget: float
    #: by compute class; trials that were never sent are left out
    classes: Mapping[str, OnClass]
    #: `agreement` of the losses of the latest promoted trials on this rung and the next; None if there are too few
    agreement: float | None


def agreements(
    rungs: Integers, budgets: Array, origins: Integers, losses: Array
) -> list[tuple[int, float, float | None]]:
    """Return each rung with its budget and the `agreement` of its losses with those of the next rung, by budget.

    The arrays have an entry for each finished trial, shape (trials,). `origins` are the numbers of the trials from
    which promoted ones continue; other trials have their own number. The loss is infinite for a trial that is worse
    than all others.
    """
    found: list[tuple[int, float, float | None]] = []
    known = np.isfinite(budgets)
    for rung, budget in np.unique(np.column_stack([rungs[known], budgets[known]]), axis=0).tolist():
        mine, above = (budgets == budget) & (rungs == rung), rungs == rung + 1
        here = dict(zip(origins[mine].tolist(), losses[mine].tolist(), strict=True))
        promoted = zip(origins[above].tolist(), losses[above].tolist(), strict=True)
        both = [(here[origin], loss) for origin, loss in promoted if origin in here][-LATEST:]
        found.append((int(rung), budget, agreement(both)))
    return sorted(found, key=itemgetter(1))


def agreement(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Kendall's rank correlation of pairs of losses, or 0 if it is negative.

    Pairs that are not finite are left out. Returns None for fewer than two finite pairs.
    """
    known = [pair for pair in pairs if math.isfinite(pair[0]) and math.isfinite(pair[1])]
    compared = [*combinations(known, 2)]
    if not compared:
        return None
    signs = [_sign(one[0] - other[0]) * _sign(one[1] - other[1]) for one, other in compared]
    return max(0.0, sum(signs) / len(compared))


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)
