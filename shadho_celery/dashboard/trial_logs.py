"""Ends of the logs of trials, kept in memory: many open pages cost one reading a second for each log."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from shadho_celery.control.logs import NoLog, TrialLogs
from shadho_celery.core.checks import short
from shadho_celery.core.clock import Clock
from shadho_celery.core.units import counted
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult

#: maximum number of bytes of a log that are kept and sent: its end
MOST_BYTES = 100_000
#: maximum number of logs that are kept; those that were asked for longest ago are dropped
MOST_LOGS = 20
#: seconds between two readings of a log
FRESH_SECONDS = 1.0
#: seconds to wait for a worker's answer; a worker looks for requests every two seconds
ANSWER_SECONDS = 5.0


class _End(NamedTuple):
    """The end of a log as it was last read."""

    data: bytes = b""
    #: position of its end in the whole log, and worker that has it
    position: int = 0
    source: str | None = None
    #: why the log could not be read
    why: str = ""


class _Kept:
    """The end of one log, and when it was read."""

    def __init__(self) -> None:
        self.end = _End()
        self.read_at = -math.inf
        #: held by the thread that reads the log; the others answer with what is known
        self.reading = threading.Lock()


class LogEnds:
    """The ends of logs that pages show. Safe for several threads."""

    def __init__(self, logs: TrialLogs, clock: Clock) -> None:
        self._logs, self._clock = logs, clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int, int], _Kept] = OrderedDict()

    def read(self, study: StudyResults, number: int, asked: Mapping[str, str]) -> dict[str, Any]:
        """Return the part of a log after a position, or all that is kept if more is missing.

        `asked` may have `attempt`, by default the latest, and `after`, the position `end` of the answer before. The
        text begins at the position `start` of the log. Raises UsageError for a trial or an attempt that does not exist.
        """
        # The trial is read before the log, so that the log of an ended trial is complete.
        trial = study.trial(number)
        attempt, after = (_whole(asked, name) for name in ("attempt", "after"))
        attempt = attempt or trial.attempts
        if attempt > trial.attempts:
            raise UsageError(f"trial {number} has {counted(trial.attempts, 'attempt')}; choose one of them")
        facts = {"attempt": attempt, "attempts": trial.attempts, "is_live": not trial.state.is_finished}
        if not attempt:
            why = f"trial {number} has not been sent to a worker yet"
            return facts | {"text": "", "start": 0, "end": 0, "why": why}
        end = self._end(study, trial, attempt)
        if not end.position and trial.log and attempt == trial.attempts:
            why = f"{end.why}; these last lines of its output were sent with its result"
            return facts | {"text": trial.log, "start": 0, "end": 0, "why": why}
        start, data = max(0, end.position - len(end.data)), end.data
        if start <= after <= end.position:
            start, data = after, data[after - start :]
        return facts | {"text": data.decode(errors="replace"), "start": start, "end": end.position, "why": end.why}

    def _end(self, study: StudyResults, trial: TrialResult, attempt: int) -> _End:
        """Return the end of a log, which is read again if that was long ago and no other thread reads it."""
        key = study.key, trial.number, attempt
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
            self._kept.move_to_end(key)
            while len(self._kept) > MOST_LOGS:
                self._kept.popitem(last=False)
        if self._clock.now() - kept.read_at >= FRESH_SECONDS and kept.reading.acquire(blocking=False):
            try:
                kept.end = self._read(study, trial, attempt, kept.end)
                kept.read_at = self._clock.now()
            finally:
                kept.reading.release()
        return kept.end

    def _read(self, study: StudyResults, trial: TrialResult, attempt: int, before: _End) -> _End:
        hosts = {row["attempt"]: row["host"] for row in study.records.of_trial(trial.number)}
        where = study.key, trial.number, attempt, hosts.get(attempt) or trial.host
        try:
            found = self._logs.read(*where, after=before.position, source=before.source)
        except (ServiceError, UsageError) as error:
            found = NoLog(str(error), is_error=True)
        if isinstance(found, NoLog):
            # What was read before stays on the page.
            return before._replace(why=found.reason)
        if found.end < before.position:
            # The attempt was started again, and its log with it.
            return self._read(study, trial, attempt, _End())
        data = before.data + found.text.encode(errors="replace")
        if len(data) > MOST_BYTES:
            # A log has whole lines.
            data = data[-MOST_BYTES:].partition(b"\n")[2]
        return _End(data, found.end, found.source)


def _whole(asked: Mapping[str, str], name: str) -> int:
    text = asked.get(name, "0")
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise UsageError(f"{name}={short(text)} is not a whole number")
    return int(text)
