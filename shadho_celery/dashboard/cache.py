"""Trials and attempts of studies as columns, kept in memory and brought up to date by the store's change numbers."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from shadho_celery.charts.columns import AttemptColumns, TrialColumns, read_attempts
from shadho_celery.charts.growing import LATE, NUMBERS, TEXTS, GrowingColumns
from shadho_celery.charts.study import StudyCharts
from shadho_celery.core.clock import Clock
from shadho_celery.errors import StudyNotFound
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.sql import SqlStore

T = TypeVar("T")

#: maximum number of studies whose trials are kept; those that were asked for longest ago are dropped
MOST_STUDIES = 20
#: seconds for which a study counts as up to date, and for which its attempts do
FRESH_SECONDS, FRESH_ATTEMPTS = 0.5, 2.0
#: a change number that no study reaches
_NEVER = 2**62
#: maximum number of answers that are kept of a study
MOST_ANSWERS = 200


class CachedStudy:
    """The trials and attempts of one study. Methods are safe for several threads."""

    def __init__(self, store: SqlStore, record: StudyRecord, clock: Clock) -> None:
        self.study = StudyResults(store, record)
        self._store, self._key, self._clock = store, record.key, clock
        self._growing = GrowingColumns(self.study)
        self._lock = threading.Lock()
        #: of the attempts, whose reading takes long and must not delay the trials
        self._attempts_lock = threading.Lock()
        #: change number up to which the columns are known; None before the first reading
        self.change: int | None = None
        #: True once the columns LATE have been read
        self._is_whole = False
        self._read_at = self._attempts_at = -math.inf
        self._trials: TrialColumns | None = None
        self._attempts: AttemptColumns | None = None
        self._attempts_change = -1
        #: answers by what was asked, with the change number for which they hold
        self._answers: OrderedDict[object, tuple[int, object]] = OrderedDict()

    def refresh(self, *, whole: bool = False) -> int:
        """Read what has changed, and return the change number. With `whole`, params and failures are read too."""
        with self._lock:
            self._refresh(whole=whole)
            return self.change or 0

    def look(self) -> int:
        """Refresh, or return the last change number at once if another thread is reading the store."""
        if self._lock.acquire(blocking=False):
            try:
                self._refresh(whole=False)
            finally:
                self._lock.release()
        return self.change or 0

    def trials(self, *, whole: bool = True) -> TrialColumns:
        """Return the trials as they are now. Unless `whole`, params and failures may be missing."""
        with self._lock:
            self._refresh(whole=whole)
            if self._trials is None:
                self._trials = self._growing.columns()
            return self._trials

    def attempts(self) -> AttemptColumns:
        """Return the attempts and sessions as they are now, or were two seconds ago."""
        change = self.refresh()
        with self._attempts_lock:
            now = self._clock.now()
            is_old = now - self._attempts_at >= FRESH_ATTEMPTS
            is_running = self._is_running
            if self._attempts is None or (is_old and (is_running or self._attempts_change != change)):
                records, wall = self.study.records, self._clock.wall()
                self._attempts = read_attempts(records, wall, is_running=is_running)
                self._attempts_at, self._attempts_change = now, change
            return self._attempts

    def answer(self, asked: object, make: Callable[[], T]) -> T:
        """Return what `make` returns, or returned for the same question since the study has last run or changed."""
        change = self.refresh()
        # While trials run, answers also depend on the time.
        if self._is_running:
            return make()
        found = self._answers.get(asked)
        if found is not None and found[0] == change:
            return found[1]  # type: ignore[return-value] # the type of an answer follows from the question
        made = make()
        with self._lock:
            self._answers[asked] = change, made
            self._answers.move_to_end(asked)
            while len(self._answers) > MOST_ANSWERS:
                self._answers.popitem(last=False)
        return made

    def numbered(self, numbers: Sequence[int]) -> list[TrialResult]:
        """Return the trials with these numbers, in this order. Trials that cannot be read are left out."""
        found = {trial.number: trial for trial in map(self.study.result_of, self._store.trials(self._key, numbers))}
        return [found[number] for number in numbers if number in found]

    @property
    def charts(self) -> StudyCharts:
        """The charts of the study."""
        return StudyCharts(self)

    @property
    def asked(self) -> int | None:
        """Limit on the number of trials in the latest run, or None."""
        limit: int | None = self.study.in_force.get("trials") or self.study.settings.get("trials")
        return limit

    @property
    def _is_running(self) -> bool:
        return self.study.running_on is not None

    def _refresh(self, *, whole: bool) -> None:
        names = ("number", *NUMBERS, *TEXTS)
        now = self._clock.now()
        if self.change is None:
            # Its trials are read after its change number, so that nothing written meanwhile is missed.
            change = self._store.changes(self._key, since=_NEVER).change
            self._growing.put(self.study.rows(names), names)
            self.change, self._read_at, self._trials = change, now, None
        elif now - self._read_at >= FRESH_SECONDS:
            # With 0, everything would be new each time: a study without change numbers is not written meanwhile.
            changes = self._store.changes(self._key, since=self.change or _NEVER)
            if changes.change and not self.change:
                changes = self._store.changes(self._key)
            if changes.trials:
                columns = (*names, *LATE) if self._is_whole else names
                self._growing.put(self.study.rows(columns, changes.trials), columns)
                self._trials = None
            if changes.change != self.change:
                record = self._store.find(self.study.name)
                if record.key != self._key:
                    raise StudyNotFound(f"study {self.study.name} was deleted")
                self.study = StudyResults(self._store, record)
                self._growing.asked = self.asked
            self.change, self._read_at = changes.change, now
        if whole and not self._is_whole:
            late = ("number", *LATE)
            self._growing.put(self.study.rows(late), late)
            self._is_whole, self._trials = True, None


class Cache:
    """The studies of one store."""

    def __init__(self, store: SqlStore, clock: Clock) -> None:
        self.store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._studies: OrderedDict[str, CachedStudy] = OrderedDict()

    def results(self, record: StudyRecord) -> StudyResults:
        """Return a study without its trials."""
        return StudyResults(self.store, record)

    def study(self, name: str) -> CachedStudy:
        """Return the study of a name, or of the beginning of one. Raises StudyNotFound."""
        record = self.store.find(name)
        with self._lock:
            found = self._studies.get(record.key)
            if found is None:
                found = self._studies[record.key] = CachedStudy(self.store, record, self._clock)
            self._studies.move_to_end(record.key)
            while len(self._studies) > MOST_STUDIES:
                self._studies.popitem(last=False)
        return found
