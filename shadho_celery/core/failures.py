"""What an error says in one line, and what makes two failures one kind."""

from __future__ import annotations

import re

_TRACEBACK = "Traceback (most recent call last)"
_PLACE = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+)', re.MULTILINE)
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?|'[^']*'|\"[^\"]*\"")


def kind_of(error: str | None) -> str:
    """Return the kind of a failure: the exception and where it was raised, else its first line without numbers."""
    text = (error or "").strip()
    # How a process died is told in the first line; what faulthandler has to say of it differs from time to time.
    places = [*_PLACE.finditer(text)] if _TRACEBACK in text else []
    if not places:
        return _CHANGING.sub("#", text.partition("\n")[0])[:200] or "no reason"
    last = places[-1]
    kind = text.splitlines()[-1].partition(":")[0]
    # Not the folder: it may differ from machine to machine.
    return f"{kind[:100]} {last['file'].rpartition('/')[2]}:{last['line']}"


def headline(error: str | None) -> str:
    """Return the one line of an error that tells most: the last one of a traceback, else the first."""
    lines = (error or "").strip().splitlines() or ["no reason given"]
    return lines[-1 if _TRACEBACK in (error or "") else 0]
