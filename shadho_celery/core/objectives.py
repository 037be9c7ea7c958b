"""Objectives of a study: the names of its losses, and the direction of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from shadho_celery.core.trial import Losses
from shadho_celery.errors import UsageError

Direction = Literal["minimize", "maximize"]
_Name = Annotated[str, Meta(min_length=1, max_length=60, pattern=r"^[^\x00-\x1f\ud800-\udfff]*\Z")]
#: direction of each loss by name; the first loss is used where a single number is needed
Objectives = Annotated[Mapping[_Name, Direction], Meta(min_length=1, max_length=10)]


def turned(losses: Losses, objectives: Mapping[str, str] | None) -> dict[str, float]:
    """Return losses in minimised form: those to maximise are negated. The same call restores the user's own losses."""
    # The value is subtracted from 0, because -value would turn 0.0 into -0.0.
    return {
        name: 0.0 - value if (objectives or {}).get(name) == "maximize" else value for name, value in losses.items()
    }


def turned_first(loss: float, objectives: Mapping[str, str] | None) -> float:
    """Do the same as `turned` for a single loss, which is that of the first objective."""
    if not objectives:
        return loss
    first = next(iter(objectives))
    return turned({first: loss}, objectives)[first]


def in_words(objectives: Mapping[str, str] | None) -> str:
    """Return objectives as text for a message."""
    return ", ".join(f"{way} {name}" for name, way in objectives.items()) if objectives else "one loss without a name"


def refuse_others(objectives: Mapping[str, str] | None, in_force: Mapping[str, Any]) -> None:
    """Raise UsageError if the objectives of a resumed study, or their order, are not those `in_force` before."""
    before = in_force.get("objectives")
    if in_force and [*(before or {}).items()] != [*(objectives or {}).items()]:
        raise UsageError(
            f"this study was started with other objectives: {in_words(before)}, not {in_words(objectives)}; start "
            "another study (without resume), or restore them"
        )
