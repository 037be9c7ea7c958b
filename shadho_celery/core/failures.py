"""Short descriptions of failures, numbers of failed trials by kind of failure, and whether the first trials all fail.

A description has the exception, the first line of its message, and the user's line of code.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce

from shadho_celery.core.checks import one_line, short
from shadho_celery.core.trial import Trial
from shadho_celery.errors import UsageError

#: suffix of the first line of an error that says how a process ended, if the last lines of its output follow
PRINTED = "; it last printed:"

#: matches the first line of such an error if the last line of the output usually names the cause
_EXITED = re.compile(rf".* ended with exit code \d+{PRINTED}")

TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+)', re.MULTILINE)
#: matches a number, another plain value or a quoted text in a message; and several of these in a row, as in a list
_VALUE = (
    r"(?:[-+]?(?:0x[0-9a-f]+|\d+(?:[.,_]\d+)*\.?(?:e[-+]?\d+)?)|[-+]?\b(?:nan|inf|None|True|False)\b"
    r"|(?<!\w)[bru]?(?:'[^']*'|\"[^\"]*\")(?!\w))"
)
_VALUES = re.compile(rf"[\[{{]*{_VALUE}(?:[\s,;:()\[\]{{}}]+{_VALUE})*[\]}}]*")
_FOLDER = re.compile(r".*[\\/]")
#: prefix of the lines in the traceback of an exception group
_GROUP = re.compile(r"^ +[|+] ", re.MULTILINE)
#: matches files that are not the user's: of installed packages, of Python's library, and of the modules of this package
#: that call the user's code
_FOREIGN = re.compile(
    r"[\\/](site-packages|dist-packages|lib[\\/]python[\d.]+|shadho_celery[\\/](core|integrations|objective|placement|program|ranks|results|runner|scheduler|simulation|space|store|training))[\\/]"
    r"|^<"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Cause, first line and location of a failure, as read from the error of a trial's outcome."""

    #: the exception and the line of code that raised it, without the folder; for an error without a traceback, a line
    #: of it without values
    cause: str
    #: the exception and the first line of its message; for an error without a traceback, a line of it
    headline: str
    #: innermost ``file:line`` of the user's code; "" if the error has none
    location: str = ""

    def __str__(self) -> str:
        return f"{self.headline} ({self.location})" if self.location else self.headline

    @property
    def kind(self) -> str:
        """Text of the failure with "…" in place of numbers and values; equal for failures of the same kind."""
        return str(replace(self, headline=without_values(self.headline)))

    def shared(self, other: Failure) -> Failure:
        """Return this failure with only the parts that another failure with the same cause has, too."""
        mine, theirs = (without_values(each.headline) for each in (self, other))
        headline = (
            self.headline if self.headline == other.headline else mine if mine == theirs else mine.partition(":")[0]
        )
        return replace(self, headline=headline, location=self.location if self.location == other.location else "")


def read_failure(error: str | None) -> Failure:
    """Return the failure that the error of an outcome describes."""
    text = _GROUP.sub("", (error or "").strip())
    # If there is no traceback, the first line describes the end of a process; the text after it varies. A long
    # traceback may lack its beginning.
    last = text.rpartition(TRACEBACK)[2] if TRACEBACK in text or text.startswith("...") else ""
    frames = [*_FRAME.finditer(last)]
    if not frames:
        lines = text.splitlines() or [""]
        said = lines[-1 if last else 0].removesuffix(PRINTED)
        shown = f"{said}: {one_line(lines[-1])}" if not last and _EXITED.fullmatch(lines[0]) else said
        return Failure(cause=without_values(said) or "no reason", headline=shown or "no reason given")
    said = next((line for line in last[frames[-1].end() :].splitlines()[1:] if line[:1].strip()), text.splitlines()[-1])
    own = next((_location(frame) for frame in reversed(frames) if not _FOREIGN.search(frame["file"])), "")
    return Failure(cause=f"{said.partition(':')[0][:100]} {_location(frames[-1])}", headline=said.strip(), location=own)


@contextmanager
def user_code(what: str, given: object = None, remedy: str = "fix it") -> Iterator[None]:
    """Convert exceptions of the user's code to a UsageError: `what` has failed, and why, and the remedy.

    `given` is the code's argument, if the message should show it. A UsageError is raised as it is.
    """
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        what += "" if given is None else f" for {short(given, 200)}"
        raise UsageError(f"{what}: {read_failure(traceback.format_exc())}; {remedy}") from error


def without_values(line: str) -> str:
    """Return the beginning of a line of an error, with "…" in place of numbers and values."""
    return _VALUES.sub("…", line[:1000])[:200]


def headline(error: str | None) -> str:
    """Return the most informative line of an error: the exception and the first line of its message."""
    return read_failure(error).headline


def _location(frame: re.Match[str]) -> str:
    """Return the file and the line of a frame. The folder is left out, because it may differ between machines."""
    return f"{_FOLDER.sub('', frame['file'])}:{frame['line']}"


@dataclass(frozen=True, kw_only=True)
class FailureCount:
    """Number of trials that have failed in the same way, and the first of these trials."""

    #: the parts of the failure that all of these trials have in common
    failure: Failure
    #: least number of a trial among them
    first: int
    trials: int = 1

    def __str__(self) -> str:
        return f"{self.trials} x {self.failure}; the first is trial {self.first}"


class Failures:
    """Numbers of failed trials by kind of failure."""

    def __init__(self, trials: Iterable[Trial] = ()) -> None:
        self._counts: dict[str, FailureCount] = {}
        for trial in trials:
            self.add(trial)

    def add(self, trial: Trial) -> Failure:
        """Count a FAILED trial. Return its failure, as read from its error."""
        failure = read_failure(trial.outcome.error)
        if (known := self._counts.get(failure.kind)) is None:
            self._counts[failure.kind] = FailureCount(failure=failure, first=trial.number)
        else:
            shared, first = known.failure.shared(failure), min(known.first, trial.number)
            self._counts[failure.kind] = FailureCount(failure=shared, first=first, trials=known.trials + 1)
        return failure

    def common(self) -> list[FailureCount]:
        """Return the kinds of failure with their numbers of trials, the most frequent first.

        Of equal numbers, the kind with the earlier first trial comes first.
        """
        return sorted(self._counts.values(), key=lambda each: (-each.trials, each.first))


class Hopelessness:
    """Decides whether the first trials of a run all fail in the same way, for example because of a wrong name in the
    code.

    The first trials are those with the least numbers, because the order in which trials end depends on the machines.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        """`numbers` are the numbers of the first trials. If there are none, `reason` is always None."""
        self._numbers = numbers
        self._failed: dict[int, Failure] = {}

    def add(self, trial: Trial, failure: Failure) -> None:
        """Record the failure of a trial. It is ignored if it is not one of the first trials."""
        if trial.number in self._numbers:
            self._failed[trial.number] = failure

    @property
    def reason(self) -> str | None:
        """Text with the failure that all of the first trials had, or None. The messages of the failures may differ."""
        causes = {failure.cause for failure in self._failed.values()}
        if len(causes) != 1 or len(self._failed) < len(self._numbers):
            return None
        shared = reduce(Failure.shared, self._failed.values())
        return f"the first {len(self._numbers)} trials have all failed with {shared}"
