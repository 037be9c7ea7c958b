"""Checks of the numbers that users give. None is always allowed."""

from __future__ import annotations

import math

from shadho_celery.errors import UsageError


def check_whole(least: float = -math.inf, most: float = math.inf, *, other: str = "", **values: object) -> None:
    """Raise UsageError for a value that is not a whole number from `least` to `most`.

    `other` names what else the value may be.
    """
    for name, value in values.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_whole and least <= value <= most):  # type: ignore[operator]
            rule = f" from {least} up" if most == math.inf else f" from {least} to {most}"
            rule = "" if least == -math.inf else rule
            raise UsageError(f"{name} is {value!r}; give a whole number{rule}{other and f', {other}'}")


def check_seconds(**values: float | None) -> None:
    """Raise UsageError for a time that is not above 0, or beyond what timers take."""
    for name, seconds in values.items():
        if seconds is not None and not 0 < seconds < 1e9:
            raise UsageError(f"{name} is {seconds!r}; give a number of seconds above 0 and below 1e9")
