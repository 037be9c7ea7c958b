"""Cache: trials and attempts of studies as columns in memory, and answers that several requests share.

Each transaction that changes a study increases the study's change number. So only rows that have changed since the last
reading are read again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

import numpy as np

from shadho_celery.charts.chart import Array
from shadho_celery.charts.columns import (
    ATTEMPTS,
    MOST_MOMENT,
    AttemptColumns,
    Depth,
    GrowingAttempts,
    GrowingTrials,
    TrialColumns,
    names_of,
    reals,
)
from shadho_celery.core.system import Clock
from shadho_celery.errors import StudyNotFound
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.sql import SqlStore

T = TypeVar("T")

#: maximum number of studies whose trials are kept; the least recently requested ones are dropped
MOST_STUDIES = 20
#: seconds before a study is checked for changes again; and before an answer about a running study is computed again
FRESH_SECONDS, FRESH_ANSWERS = 0.25, 2.0
#: `latest_ends` reads the trials that were written in this number of the study's latest transactions
LATEST = 200
#: maximum number of answers that are kept for a study
MOST_ANSWERS = 200


class CachedStudy:
    """The trials and attempts of one study. Any thread may call the methods."""

    def __init__(self, store: SqlStore, record: StudyRecord, clock: Clock) -> None:
        self.study = StudyResults(store, record)
        self._store, self._key, self._clock = store, record.key, clock
        self._growing, self._attempting = GrowingTrials(self.study), GrowingAttempts(self.study)
        self._lock = threading.Lock()
        #: held while further columns of the trials are read
        self._deepening = threading.Lock()
        #: lock of the attempts. It is a separate lock, because reading them takes long and must not delay the trials
        self._attempts_lock = threading.Lock()
        #: latest known change number; None before the first check
        self.change: int | None = None
        #: host and process of the scheduler that runs the study, or None
        self.running_on: str | None = None
        self._read_at = self._attempts_at = -math.inf
        #: change numbers up to which trials and attempts were read; None before the first reading
        self._trials_until: int | None = None
        self._attempts_until: int | None = None
        #: which columns of the trials have been read
        self._depth = Depth.LOSSES
        self._trials: TrialColumns | None = None
        self._attempts: AttemptColumns | None = None
        #: answers by question: version of the study (`_version`), time of the end of the work, and answer
        self._answers: OrderedDict[object, tuple[str, float, object]] = OrderedDict()

    def refresh(self) -> int:
        """Check for changes, unless that was done in the last FRESH_SECONDS. Return the change number."""
        with self._lock:
            return self._refresh()

    def look(self) -> str:
        """Check for changes, unless another thread is reading the store. Return a text that differs after each change.

        The text also differs after the start or end of a run, which has no change number.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._lock.release()
        return self._version

    def trials(self, depth: Depth = Depth.PARAMS) -> TrialColumns:
        """Return the current trials. Columns that are not read at `depth` may be missing."""
        with self._lock:
            trials = self._read_trials()
        return trials if depth <= self._depth else self._deepened(depth)

    def _read_trials(self) -> TrialColumns:
        """Return the current trials, with the columns that were read so far. The caller must hold the lock."""
        change = self._refresh()
        if self._trials_until != change:
            names = names_of(self._depth)
            self._growing.put(self.study.rows_of_trials(names, self._trials_until or 0), names)
            self._trials_until, self._trials = change, None
        if self._trials is None:
            self._growing.asked = self.study.asked
            self._trials = self._growing.columns()
        return self._trials

    def _deepened(self, depth: Depth) -> TrialColumns:
        """Read further columns of the known trials. Meanwhile other threads can use the columns read before."""
        with self._deepening:
            if depth > self._depth:
                since = self._trials_until or 0
                names = names_of(depth, beyond=self._depth)
                for block in self.study.rows_of_trials(names):
                    with self._lock:
                        self._growing.put([block], names, are_new=False)
                with self._lock:
                    if since and since != self.study.change:
                        # Trials that were added or changed meanwhile are read again.
                        self._growing.put(self.study.rows_of_trials(names_of(depth), since), names_of(depth))
                    self._depth, self._trials = depth, None
        with self._lock:
            return self._read_trials()

    def attempts(self) -> AttemptColumns:
        """Return the current attempts and sessions."""
        change = self.refresh()
        with self._attempts_lock:
            now, is_running = self._clock.now(), self.running_on is not None
            if self._attempts_until != change:
                self._attempting.put(self.study.rows_of_attempts(ATTEMPTS, self._attempts_until or 0))
                self._attempts_until, self._attempts = change, None
            # While the study runs, the columns are made again at intervals, because the durations of running attempts
            # grow, and changes of sessions have no change numbers.
            if self._attempts is None or (is_running and now - self._attempts_at >= FRESH_SECONDS):
                self._attempts = self._attempting.columns(self._clock.wall(), is_running=is_running)
                self._attempts_at = now
            return self._attempts

    def answer(self, asked: object, make: Callable[[], T]) -> T:
        """Return the result of `make`, or its earlier result for the same question if the study has not changed."""
        self.refresh()
        version, now = self._version, self._clock.now()
        found = self._answers.get(asked)
        # While a study runs, answers also depend on the time, so they are kept only for FRESH_ANSWERS seconds.
        if found is not None and found[0] == version and (now - found[1] < FRESH_ANSWERS or self.running_on is None):
            return found[2]  # type: ignore[return-value] # the type of an answer follows from the question
        made = make()
        with self._lock:
            self._answers[asked] = version, self._clock.now(), made
            self._answers.move_to_end(asked)
            while len(self._answers) > MOST_ANSWERS:
                self._answers.popitem(last=False)
        return made

    def numbered(self, numbers: Sequence[int]) -> list[TrialResult]:
        """Return the trials with these numbers, in this order. Numbers without a trial are left out."""
        found = {trial.number: trial for trial in map(self.study.result_of, self._store.trials(self._key, numbers))}
        return [found[number] for number in numbers if number in found]

    def latest_ends(self) -> Array:
        """Return the times at which the latest changed trials have ended, in seconds since the epoch."""
        names = ("number", "finished_at")
        blocks = self.study.rows_of_trials(names, max(1, (self.change or 0) - LATEST))
        ends = reals([row[1] for block in blocks for row in block], most=MOST_MOMENT)
        return ends[~np.isnan(ends)]

    @property
    def _version(self) -> str:
        return f"{self.change or 0}{'' if self.running_on is None else ' running'}"

    def _refresh(self) -> int:
        """Check for changes, and return the study's change number. Rows are read later, so none may be older."""
        now = self._clock.now()
        if self.change is None or now - self._read_at >= FRESH_SECONDS:
            self._store.verify()
            change = self._store.change(self._key)
            if change != self.change and self.change is not None:
                record = self._store.find(self.study.name)
                if record.key != self._key:
                    raise StudyNotFound(f"study {self.study.name} was deleted")
                self.study = StudyResults(self._store, record)
            self.running_on = self._store.holder(self._key, time.time())
            self.change, self._read_at = change, now
        return self.change


class Cache:
    """The studies of one store."""

    def __init__(self, store: SqlStore, clock: Clock) -> None:
        self.store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._studies: OrderedDict[str, CachedStudy] = OrderedDict()
        #: by key of a study: its version, and its entry in the list of studies
        self._listed: dict[str, tuple[object, Any]] = {}

    def records(self) -> list[StudyRecord]:
        """Return all studies, the latest first."""
        self.store.verify()
        return self.store.records()

    def listed(self, records: Sequence[StudyRecord], make: Callable[[StudyResults], T]) -> list[T]:
        """Return for each study the result of `make`, or its earlier result if the study has not changed.

        The page requests all studies each second, but most of them have ended.
        """
        versions, known, found = self.store.versions(time.time()), self._listed, {}
        for record in records:
            version = versions.get(record.key, (None,))
            if (kept := known.get(record.key)) is None or kept[0] != version:
                kept = version, make(StudyResults(self.store, record))
            found[record.key] = kept
        self._listed = found
        return [made for _, made in found.values()]

    def study(self, name: str) -> CachedStudy:
        """Return the study whose name is, or begins with, `name`. Raises StudyNotFound."""
        self.store.verify()
        record = self.store.find(name)
        with self._lock:
            found = self._studies.get(record.key)
            if found is None:
                found = self._studies[record.key] = CachedStudy(self.store, record, self._clock)
            self._studies.move_to_end(record.key)
            while len(self._studies) > MOST_STUDIES:
                self._studies.popitem(last=False)
        return found


#: seconds for which a `Shared` answer is kept
SHARED_SECONDS = 1.0


class Shared(Generic[T]):
    """An answer that is shared by all requests during its computation, and for some seconds after it.

    Use it in one event loop only.
    """

    def __init__(self, make: Callable[[], T], threads: Executor, clock: Clock, seconds: float = SHARED_SECONDS) -> None:
        """`make` is called in one of `threads`."""
        self._make, self._threads, self._clock, self._seconds = make, threads, clock, seconds
        #: the latest computation; and when it ended
        self._latest: Future[T] | None = None
        self._ended = -math.inf

    async def get(self) -> T:
        """Return the answer. Raises what `make` raises."""
        latest = self._latest
        if latest is None or (latest.done() and self._clock.now() - self._ended >= self._seconds):
            latest = self._latest = self._threads.submit(self._compute)
        # `shield` lets other requests wait even if this one is cancelled.
        return await asyncio.shield(asyncio.wrap_future(latest))

    def _compute(self) -> T:
        try:
            return self._make()
        finally:
            self._ended = self._clock.now()

    def forget(self) -> None:
        """Compute a new answer for the next request."""
        self._latest = None
