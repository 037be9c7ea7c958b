"""Ladder of budgets: its settings, and the budget of each rung."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from shadho_celery.core.checks import as_record, refuse_foreign, short
from shadho_celery.core.names import FIDELITIES, PRUNERS
from shadho_celery.errors import UsageError

#: most rungs above the lowest one
HIGHEST = 40
#: most trials of one round: with more, a second round would hardly ever begin
LARGEST = 100_000

_NAMES = ", ".join(FIDELITIES)
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

#: what other tools call the ways to give budgets, without case and without "pruner" or "scheduler" at the end
_HOW_ELSEWHERE = {
    "sha": "halving",
    "successivehalving": "halving",
    "successive_halving": "halving",
    "asynchyperband": "asha",
    "hyperbandforbohb": "bohb",
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
        refuse_foreign(settings, cls.__struct_fields__, _ELSEWHERE, name, _FORMS[name])
        if "how" in cls.__struct_fields__ and isinstance(how := settings.get("how"), str) and how not in FIDELITIES:
            raise UsageError(f"{name}.how: {_unknown(how)}; {_FORMS[name]}")
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
        for key, budget in (("least", ladder.least), ("most", ladder.most)):
            if isinstance(given := settings.get(key), int) and given != budget:
                raise UsageError(f"{name}.{key}: no float holds {given}; write {budget:.0f}")
        return ladder

    @property
    def has_rounds(self) -> bool:
        """True if trials are drawn in rounds of a size that follows from the budgets."""
        return True

    @property
    def way(self) -> str:
        """Name of the way in which trials get their budgets, one of FIDELITIES."""
        return "halving"

    @property
    def in_words(self) -> str:
        """Its range, and how trials get their budgets, for messages."""
        backups = f", {self.backups} backups" if self.backups else ""
        return f"{self.least:g} to {self.most:g}, eta {self.eta}, {self.way}{backups}"

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
        Meta(description=f"one of {_NAMES}"),
    ] = "auto"

    @property
    def way(self) -> str:
        return self.how

    @property
    def has_rounds(self) -> bool:
        return self.how not in {"auto", "asha"}


def ladder_of(settings: Mapping[str, Any]) -> Ladder | None:
    """Return the ladder among a study's settings, of `fidelity` or `rungs`; None without. Raises UsageError."""
    if settings.get("fidelity") is not None:
        return Fidelity.of(settings["fidelity"], "fidelity")
    return None if settings.get("rungs") is None else Ladder.of(settings["rungs"])


def _unknown(how: str) -> str:
    """Return what is wrong with the name of a way to give budgets that does not exist."""
    name = how.lower().removesuffix("pruner").removesuffix("scheduler")
    name = _HOW_ELSEWHERE.get(name, name)
    if name in FIDELITIES:
        return f"write {name} for {short(how, 60)}"
    if name in PRUNERS:
        return f"{short(how, 60)} stops trials by their reports, see --pruner; budgets are given by one of {_NAMES}"
    return f"there is no {short(how, 60)}; choose one of {_NAMES}"
