"""Warnings to the author of a program."""

from __future__ import annotations

import inspect
import warnings

from shadho_celery.core.checks import printable

#: this package, whose frames are skipped in search of the user's line
_OURS = __name__.partition(".")[0]


def warn(message: str) -> None:
    """Warn with `message`. The warning points to the line of the user's program that has called this package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(message), stacklevel=level)
