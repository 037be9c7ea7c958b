"""Ladder of budgets: its settings, and the budget of each rung."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from shadho_celery.core.checks import as_record, short
from shadho_celery.errors import UsageError

#: most trials of one round: with more, a second round would hardly ever begin
LARGEST = 100_000

_FORM = "give a dict such as {'least': 1, 'most': 9, 'eta': 3}"

Budget = Annotated[
    float,
    Meta(gt=0, le=sys.float_info.max, description="a budget is a number above 0 that a float can hold"),
]


class Ladder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets from `least` to `most`, as set in ``STUDY["rungs"]``."""

    least: Budget
    most: Budget
    #: reduction factor: each rung has `eta` times the budget of the one below, and 1 / `eta` of its trials
    eta: Annotated[int, Meta(ge=2, le=LARGEST)] = 3
    #: trials of each rung beyond the results that it waits for
    backups: Annotated[int, Meta(ge=0, le=LARGEST)] = 0

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Ladder:
        """Convert plain settings to a ladder. Raises UsageError for an invalid one."""
        if not isinstance(settings, Mapping):
            raise UsageError(f"rungs: {short(settings, 60)} is no ladder; {_FORM}")
        ladder = as_record(settings, cls, "rungs", _FORM)
        between = f"rungs: from {ladder.least:g} to {ladder.most:g}"
        if ladder.most / ladder.least + ladder.backups > LARGEST:
            raise UsageError(f"{between} takes over {LARGEST} trials a round; raise 'least'")
        if ladder.most <= ladder.least or ladder.top < 1:
            raise UsageError(f"{between} there is one rung only; let 'most' be {ladder.eta} times 'least'")
        return ladder

    @property
    def budgets(self) -> list[float]:
        """Budgets of the rungs, the lowest first."""
        return [self.most / self.eta**below for below in range(self.top, -1, -1)]

    @property
    def top(self) -> int:
        """Number of rungs above the lowest one."""
        # Without the small number some ladders would lack a rung: log(243) / log(3) is 4.999...
        return math.floor(math.log(self.most / self.least) / math.log(self.eta) + 1e-9)
