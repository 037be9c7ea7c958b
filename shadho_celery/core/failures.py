"""Short description of a trial's failure: its exception, the first line of the message, and the user's line of code."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

#: end of the line that says how a process ended, if lines that it printed follow
PRINTED = "; it last printed:"

_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+)', re.MULTILINE)
#: a number or another plain value in a message, or a quoted text; and several of them in a row, as in a list
_VALUE = (
    r"(?:[-+]?(?:0x[0-9a-f]+|\d+(?:[.,_]\d+)*\.?(?:e[-+]?\d+)?)|[-+]?\b(?:nan|inf|None|True|False)\b"
    r"|(?<!\w)[bru]?(?:'[^']*'|\"[^\"]*\")(?!\w))"
)
_VALUES = re.compile(rf"[\[{{]*{_VALUE}(?:[\s,;:()\[\]{{}}]+{_VALUE})*[\]}}]*")
_FOLDER = re.compile(r".*[\\/]")
#: prefix of the lines of an exception group's traceback
_GROUP = re.compile(r"^ +[|+] ", re.MULTILINE)
#: files that are not the user's: those of installed packages, of Python's library, and of this package's modules that
#: call objectives
_FOREIGN = re.compile(
    r"[\\/](site-packages|dist-packages|lib[\\/]python[\d.]+|shadho_celery[\\/](executors|objective|program|ranks|runner|simulation|space|training))[\\/]"
    r"|^<"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Cause, first line and place of a failure, as read from the error of a trial's outcome."""

    #: the exception and the line that raised it, without the folder; for an error without a traceback, one line of it
    #: without values
    cause: str
    #: the exception and the first line of its message; for an error without a traceback, one line of it
    headline: str
    #: innermost ``file:line`` of the user's code; "" if the error has no such line
    place: str = ""

    def __str__(self) -> str:
        return f"{self.headline} ({self.place})" if self.place else self.headline

    @property
    def kind(self) -> str:
        """Text of the failure with "…" in place of numbers and values; equal for failures of the same kind."""
        return str(replace(self, headline=without_values(self.headline)))

    def shared(self, other: Failure) -> Failure:
        """Return as much of this failure as is true of another one with the same cause, too."""
        mine, theirs = (without_values(each.headline) for each in (self, other))
        headline = (
            self.headline if self.headline == other.headline else mine if mine == theirs else mine.partition(":")[0]
        )
        return replace(self, headline=headline, place=self.place if self.place == other.place else "")


def read_failure(error: str | None) -> Failure:
    """Read cause, first line and place of a failure from an outcome's error."""
    text = _GROUP.sub("", (error or "").strip())
    # The first line describes the death of a process; faulthandler's text after it varies. A long traceback lacks its
    # beginning.
    last = text.rpartition(_TRACEBACK)[2] if _TRACEBACK in text or text.startswith("...") else ""
    frames = [*_FRAME.finditer(last)]
    if not frames:
        said = (text.splitlines() or [""])[-1 if last else 0].removesuffix(PRINTED)
        return Failure(cause=without_values(said) or "no reason", headline=said or "no reason given")
    said = next((line for line in last[frames[-1].end() :].splitlines()[1:] if line[:1].strip()), text.splitlines()[-1])
    own = next((_place(frame) for frame in reversed(frames) if not _FOREIGN.search(frame["file"])), "")
    return Failure(cause=f"{said.partition(':')[0][:100]} {_place(frames[-1])}", headline=said.strip(), place=own)


def cause_of(error: str | None) -> str:
    """Return the cause of the failure that an outcome's error describes."""
    return read_failure(error).cause


def without_values(line: str) -> str:
    """Return the beginning of a line of an error, with "…" in place of numbers and values."""
    return _VALUES.sub("…", line[:1000])[:200]


def headline(error: str | None) -> str:
    """Return the most informative line of an outcome's error: the exception and the first line of its message."""
    return read_failure(error).headline


def _place(frame: re.Match[str]) -> str:
    """Return a frame's file and line. The folder is left out, because it may differ between machines."""
    return f"{_FOLDER.sub('', frame['file'])}:{frame['line']}"
