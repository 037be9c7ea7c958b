"""Warnings to the author of a program. They name settings as arguments of a function."""

from __future__ import annotations

import inspect
import warnings

from shadho_celery.core.checks import printable
from shadho_celery.errors import Message, Surface

#: packages whose frames are skipped in search of the user's line: this one, and contextlib, because of `told`
_OURS = {__name__.partition(".")[0], "contextlib"}


def warn(message: str | Message) -> None:
    """Warn with `message`. The warning points to the line of the user's program that has called this package."""
    text = message.on(Surface.PYTHON) if isinstance(message, Message) else message
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(text), stacklevel=level)
