"""Ladder of budgets: its settings, and the budget of each rung."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from shadho_celery.core.checks import as_record, short, unknown
from shadho_celery.core.names import FIDELITIES, PRUNERS
from shadho_celery.errors import UsageError

#: maximum number of rungs above the lowest one
HIGHEST = 40
#: maximum number of trials in a round, because after a larger round there would hardly ever be a second one
LARGEST = 100_000

_NAMES = ", ".join(FIDELITIES)
_FORM = f"give a dict such as {{'least': 1, 'most': 81, 'eta': 3, 'how': 'asha'}}, with how one of {_NAMES}"
#: part of the message for a pruner's name where an algorithm for budgets is needed
_PRUNES = "stops trials by their reports, see STUDY['pruner']"

Budget = Annotated[
    float,
    Meta(gt=0, le=sys.float_info.max, description="a budget is a number above 0 that fits a float"),
]


class Ladder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of ``STUDY["fidelity"]``: budgets from `least` to `most`, and the algorithm that gives
    them to trials.
    """

    least: Budget = 1.0
    most: Budget
    #: reduction factor: each rung has `eta` times the budget of the rung below, and 1 / `eta` of its trials
    eta: Annotated[int, Meta(ge=2, le=LARGEST)] = 3
    #: number of trials of each rung for which halving does not wait
    backups: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    #: name of the algorithm by which trials get their budgets, one of FIDELITIES
    how: Annotated[str, Meta(description=f"one of {_NAMES}")] = "auto"

    @classmethod
    def of(cls, settings: Mapping[str, object], name: str = "fidelity") -> Ladder:
        """Return the ladder for a dict of settings. Raises UsageError if they are invalid.

        `name` is the name of these settings in messages.
        """
        if not isinstance(settings, Mapping):
            raise UsageError(f"{name}: {short(settings, 60)} is not a dict of settings; {_FORM}")
        if isinstance(how := settings.get("how"), str) and how not in FIDELITIES:
            raise UsageError(f"{name}: how: {unknown(how, FIDELITIES, PRUNERS, _PRUNES)}; {_FORM}")
        ladder = as_record(settings, cls, "fidelity", _FORM)
        if problem := ladder._problem(settings):
            raise UsageError(f"{name}: {problem}")
        return ladder

    def _problem(self, settings: Mapping[str, object]) -> str | None:
        """Return why this ladder cannot be used, with the remedy; None if it can."""
        between = f"from {self.least:g} to {self.most:g}"
        if self.has_rounds and self.most / self.least + self.backups > LARGEST:
            return f"{between} takes over {LARGEST} trials a round; raise 'least'"
        if self.most / self.least > float(self.eta) ** HIGHEST:
            return f"{between} there are over {HIGHEST} rungs; raise 'least' or 'eta'"
        if self.most <= self.least:
            return (
                f"'most' is {self.most:g} and 'least' is {self.least:g}; let 'most' be {self.eta} times 'least' or more"
            )
        if self.top < 1:
            return (
                f"{between} there is one rung only with eta {self.eta}; lower 'eta', or let 'most' be {self.eta} "
                "times 'least' or more"
            )
        for key, budget in (("least", self.least), ("most", self.most)):
            if isinstance(given := settings.get(key), int) and given != budget:
                return f"{key}: no float holds {given}; write {budget:.0f}"
        return None

    @property
    def has_rounds(self) -> bool:
        """True if trials are drawn in rounds, whose size depends on the budgets."""
        return self.how != "asha"

    @property
    def in_words(self) -> str:
        """Text with the range of budgets and the algorithm, for messages."""
        backups = f", {self.backups} backups" if self.backups else ""
        return f"{self.least:g} to {self.most:g}, eta {self.eta}, {self.how}{backups}"

    @property
    def budgets(self) -> list[float]:
        """Budgets of the rungs, the lowest first. They are whole numbers, such as epochs, if `least` and `most` are."""
        budgets = [self.most / self.eta**below for below in range(self.top, -1, -1)]
        is_whole = self.least.is_integer() and self.most.is_integer()
        return [float(round(budget)) for budget in budgets] if is_whole else budgets

    @property
    def top(self) -> int:
        """Number of rungs above the lowest one."""
        # Without the added 1e-9 some ladders would lack a rung, because log(243) / log(3) is 4.999...
        return math.floor(math.log(self.most / self.least) / math.log(self.eta) + 1e-9)


def ladder_of(settings: Mapping[str, Any]) -> Ladder | None:
    """Return the ladder in a study's settings; None for a study without budgets. Raises UsageError if it is invalid."""
    return None if settings.get("fidelity") is None else Ladder.of(settings["fidelity"])
