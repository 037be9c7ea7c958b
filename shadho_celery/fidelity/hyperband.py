"""Hyperband: brackets that start at different budgets, in case the low ones mislead."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shadho_celery.fidelity.brackets import Brackets
from shadho_celery.fidelity.ladder import Ladder


class Hyperband(Brackets):
    """Brackets s_max, ..., 0 in turn: bracket s starts s rungs below the top. No slot waits for the end of a rung.

    While all started brackets wait for results, the next one starts. Source: Li, Jamieson, DeSalvo, Rostamizadeh,
    Talwalkar, "Hyperband", JMLR 18, 2018, algorithm 1.
    """

    def __init__(self, ladder: Ladder) -> None:
        super().__init__(ladder.budgets, sizes_of(ladder), overlap=True)


def sizes_of(ladder: Ladder) -> list[Sequence[int]]:
    """Return the number of trials on each rung, the lowest first, of the brackets s_max, ..., 0."""
    return [
        # n = ceil((s_max + 1) / (s + 1) * eta**s), in whole numbers; rung i keeps floor(n / eta**i) of them.
        [math.floor(-(-(ladder.top + 1) * ladder.eta**s // (s + 1)) / ladder.eta**rung) for rung in range(s + 1)]
        for s in range(ladder.top, -1, -1)
    ]
