"""Summary of an error in one line, and the kind of a failure."""

from __future__ import annotations

import re

_TRACEBACK = "Traceback (most recent call last)"
_PLACE = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+)', re.MULTILINE)
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?|'[^']*'|\"[^\"]*\"")


def kind_of(error: str | None) -> str:
    """Return the kind of a failure: the exception and the line that raised it, else its first line without numbers."""
    text = (error or "").strip()
    # A process's death is described in the first line; faulthandler's text after it differs from time to time.
    places = [*_PLACE.finditer(text)] if _TRACEBACK in text else []
    if not places:
        return _CHANGING.sub("#", text.partition("\n")[0])[:200] or "no reason"
    last = places[-1]
    kind = text.splitlines()[-1].partition(":")[0]
    # Not the folder: it may differ from machine to machine.
    return f"{kind[:100]} {last['file'].rpartition('/')[2]}:{last['line']}"


def headline(error: str | None) -> str:
    """Return the most informative line of an error: the last one of a traceback, else the first."""
    lines = (error or "").strip().splitlines() or ["no reason given"]
    return lines[-1 if _TRACEBACK in (error or "") else 0]
