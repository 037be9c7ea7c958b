"""Ladder of budgets: its settings, and the budget of each rung."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct

from shadho_celery.core.checks import as_record, short
from shadho_celery.core.settings import FIDELITIES
from shadho_celery.errors import UsageError

#: most rungs above the lowest one
HIGHEST = 40
#: most trials of one round: with more, a second round would hardly ever begin
LARGEST = 100_000

_FORMS = {
    "rungs": "give a dict such as {'least': 1, 'most': 9, 'eta': 3}",
    "fidelity": "give a dict such as {'least': 1, 'most': 81, 'eta': 3, 'how': 'asha'}",
}
#: what other tools call the settings
_ELSEWHERE = {
    "least": ("min", "min_budget", "min_resource", "min_t", "grace_period"),
    "most": ("max", "max_budget", "max_resource", "max_t"),
    "eta": ("reduction_factor", "factor"),
    "how": ("name", "type", "method", "algorithm", "scheduler"),
}

L = TypeVar("L", bound="Ladder")

Budget = Annotated[
    float,
    Meta(gt=0, le=sys.float_info.max, description="a budget is a number above 0 that a float can hold"),
]


class Ladder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets from `least` to `most`, as set in ``STUDY["rungs"]``."""

    least: Budget = 1.0
    most: Budget
    #: reduction factor: each rung has `eta` times the budget of the one below, and 1 / `eta` of its trials
    eta: Annotated[int, Meta(ge=2, le=LARGEST)] = 3
    #: trials of each rung beyond the results that it waits for
    backups: Annotated[int, Meta(ge=0, le=LARGEST)] = 0

    @classmethod
    def of(cls: type[L], settings: Mapping[str, object], name: str = "rungs") -> L:
        """Convert plain settings to a ladder; `name` is theirs in STUDY. Raises UsageError for an invalid one."""
        if not isinstance(settings, Mapping):
            raise UsageError(f"{name}: {short(settings, 60)} is no dict of settings; {_FORMS[name]}")
        keys = [key for key in _ELSEWHERE if key in cls.__struct_fields__]
        here = {there: key for key in keys for there in _ELSEWHERE[key]}
        if foreign := [f"{here[key]} for {key}" for key in settings if isinstance(key, str) and key in here]:
            raise UsageError(f"{name}: its settings have other names here, write {', '.join(foreign)}; {_FORMS[name]}")
        ladder = as_record(settings, cls, name, _FORMS[name])
        between = f"{name}: from {ladder.least:g} to {ladder.most:g}"
        if ladder.has_rounds and ladder.most / ladder.least + ladder.backups > LARGEST:
            raise UsageError(f"{between} takes over {LARGEST} trials a round; raise 'least'")
        if ladder.most / ladder.least > float(ladder.eta) ** HIGHEST:
            raise UsageError(f"{between} there are over {HIGHEST} rungs; raise 'least' or 'eta'")
        if ladder.most <= ladder.least:
            raise UsageError(
                f"{name}: 'most' is {ladder.most:g} and 'least' is {ladder.least:g}; "
                f"let 'most' be {ladder.eta} times 'least' or more"
            )
        if ladder.top < 1:
            raise UsageError(
                f"{between} there is one rung only with eta {ladder.eta}; lower 'eta', or let 'most' be {ladder.eta} "
                "times 'least' or more"
            )
        return ladder

    @property
    def has_rounds(self) -> bool:
        """True if trials are drawn in rounds of a size that follows from the budgets."""
        return True

    @property
    def budgets(self) -> list[float]:
        """Budgets of the rungs, the lowest first."""
        return [self.most / self.eta**below for below in range(self.top, -1, -1)]

    @property
    def top(self) -> int:
        """Number of rungs above the lowest one."""
        # Without the small number some ladders would lack a rung: log(243) / log(3) is 4.999...
        return math.floor(math.log(self.most / self.least) / math.log(self.eta) + 1e-9)


class Fidelity(Ladder, frozen=True, kw_only=True):
    """Budgets, and how trials get them, as set in ``STUDY["fidelity"]``."""

    how: Annotated[
        Literal["auto", "halving", "hyperband", "asha", "bohb", "dehb"],
        Meta(description=f"one of {', '.join(FIDELITIES)}"),
    ] = "auto"

    @property
    def has_rounds(self) -> bool:
        return self.how not in {"auto", "asha"}
