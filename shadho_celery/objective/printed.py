"""Reads the output of a command line by line, and finds its reports and its loss.

A line may be a JSON object with the keys of an objective's return value, and with `step` if it is a report. If the
study gives a name or a pattern of the loss, the lines of standard output are searched for a number after this name, or
for the pattern. The time to search a line for a name is proportional to its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shadho_celery.core.checks import short
from shadho_celery.objective.context import LocalContext
from shadho_celery.objective.result import Unreadable
from shadho_celery.objective.script import REPORTS

#: maximum number of bytes of a line that is read; and of characters of a line that is searched for a user's pattern,
#: because the time of this search may grow with the square of the length
MAX_LINE, MAX_MATCHED = 64 * 1024, 2000
#: bytes of the latest output that are kept for messages
_TAIL = 5000

_NUMBER = r"[-+]?(?:(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:[eE][-+]?\d{1,9})?|(?i:nan|inf(?:inity)?))"
_END = re.compile(rb"[\r\n]")
#: an escape sequence that colours a text
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")


class CommandFailed(Unreadable):
    """A command has failed, or has printed no loss."""


class Lines:
    """Divides output into lines. A line ends with a line feed or a carriage return."""

    def __init__(self) -> None:
        self._rest = self._tail = b""

    def feed(self, part: bytes) -> list[str]:
        """Return the lines whose end is in `part`. Lines of more than MAX_LINE bytes are left out."""
        self._tail = (self._tail + part)[-_TAIL:]
        *lines, rest = _END.split(self._rest + part)
        # An unfinished line keeps one byte more than the maximum, so that it still is too long when its end arrives.
        self._rest = rest[: MAX_LINE + 1]
        return [line.decode(errors="replace") for line in lines if 0 < len(line) <= MAX_LINE]

    @property
    def tail(self) -> str:
        """Last lines of the output.

        Of a line that was overwritten after carriage returns, only the last text is kept.
        """
        lines = self._tail.decode(errors="replace").rstrip().split("\n")
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def loss_pattern(name: str) -> re.Pattern[str]:
    """Return a pattern for a number after `name`, as in ``name=1e-05``, ``name: .3`` and ``"name": 3``.

    The name is not found as a part of a longer word: `loss` is not found in val_loss or val/loss.
    """
    between = r"[\"']?(?:\s{0,100}[:=|│]\s{0,100}|\s{1,100})"
    return re.compile(rf"(?<![\w./-]){re.escape(name)}{between}({_NUMBER})(?!\w|[.,/]\d)")


class Printed:
    """Reads the output and the file of reports of a command, passes its reports on, and keeps its result."""

    def __init__(self, loss: str | re.Pattern[str] | None, context: LocalContext) -> None:
        """`loss` is the name or the pattern of the loss in standard output. If it is None, only JSON lines are read."""
        self._context = context
        self._pattern = loss_pattern(loss) if isinstance(loss, str) else loss
        self._most = MAX_LINE if isinstance(loss, str) else MAX_MATCHED
        self.lines = {stream: Lines() for stream in ("stdout", "stderr", REPORTS)}
        what = f"a number after {loss!r}" if isinstance(loss, str) else "what the pattern of loss matches"
        line = (
            'a loss; print a JSON line such as {"loss": 0.3}, or name its loss, such as --loss val_loss for a command '
            'after --, which begins a new study, or loss = "val_loss" in a study file; a job of Hydra may return it'
        )
        #: error message for a command that has succeeded without a loss
        self.missing = f"the command has not printed {line if loss is None else what}"
        #: the last line with a loss; a line without a step is preferred
        self._last: Mapping[str, Any] | None = None

    def feed(self, stream: str, part: bytes) -> None:
        """Read a part of the standard output ("stdout" or "stderr") or of the file REPORTS. Raises CommandFailed."""
        for line in self.lines[stream].feed(part):
            if stream != "stderr":
                self._read(stream, _COLOUR.sub("", line))

    def _read(self, stream: str, line: str) -> None:
        record = _record(line)
        if stream == REPORTS and record is None and line.strip():
            raise CommandFailed(
                f"a line in the file that SHADHO_REPORTS names is not a JSON object: {short(line)}; append lines such "
                'as {"step": 1, "loss": 0.3}'
            )
        if stream == "stdout" and self._pattern is not None:
            found = self._found(line)
            record = None if found is None else {**(record or {}), "loss": found}
        if record is not None:
            self._keep(line, record)

    @property
    def result(self) -> dict[str, Any] | None:
        """The result, as an objective would return it; None if no line had a loss."""
        return None if self._last is None else {key: value for key, value in self._last.items() if key != "step"}

    def _keep(self, line: str, record: Mapping[str, Any]) -> None:
        losses = record.get("losses")
        if "loss" not in record and losses is None:
            return
        if self._last is None or "step" not in record or "step" in self._last:
            self._last = record
        if (step := record.get("step")) is None:
            return
        try:
            self._context.report(step, record.get("loss", losses))
        except (TypeError, ValueError) as error:
            what = str(error).removeprefix("context.report: ").partition(": write ")[0]
            raise CommandFailed(f"{what}, in the line {short(line)}") from None

    def _found(self, line: str) -> float | None:
        """Return the loss in a line, or None. Raises CommandFailed for two losses, or if the loss is no number."""
        assert self._pattern is not None
        found = [match[1] for match in self._pattern.finditer(line)] if len(line) <= self._most else []
        if len(found) > 1:
            raise CommandFailed(
                f"a line has {len(found)} losses, {short(found[0])} and {short(found[1])}: {short(line)}; choose one "
                'by a pattern, such as loss = {"pattern": "best loss (\\\\S+)"}'
            )
        try:
            return float(found[0]) if found else None
        except (TypeError, ValueError):
            raise CommandFailed(f"the pattern of loss has found {short(found[0])}, which is not a number") from None


def _record(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None."""
    with suppress(ValueError, RecursionError):
        return found if isinstance(found := json.loads(line), dict) else None
    return None
