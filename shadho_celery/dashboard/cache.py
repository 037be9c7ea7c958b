"""Trials and attempts of studies as columns, kept in memory and brought up to date by the store's change numbers.

`Shared` is an answer that takes long and that many requests share.
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

#: maximum number of studies whose trials are kept; those that were asked for longest ago are dropped
MOST_STUDIES = 20
#: seconds for which a study counts as up to date, and for which an answer about a running one does
FRESH_SECONDS, FRESH_ANSWERS = 0.25, 2.0
#: number of latest transactions in which trials are looked for that have ended
LATEST = 200
#: maximum number of answers that are kept of a study
MOST_ANSWERS = 200


class CachedStudy:
    """The trials and attempts of one study. Methods are safe for several threads."""

    def __init__(self, store: SqlStore, record: StudyRecord, clock: Clock) -> None:
        self.study = StudyResults(store, record)
        self._store, self._key, self._clock = store, record.key, clock
        self._growing, self._attempting = GrowingTrials(self.study), GrowingAttempts(self.study)
        self._lock = threading.Lock()
        #: held while deeper facts of the trials are read
        self._deepening = threading.Lock()
        #: of the attempts, whose reading takes long and must not delay the trials
        self._attempts_lock = threading.Lock()
        #: latest change number that is known; None before the first look
        self.change: int | None = None
        #: host and process of the scheduler that runs the study, or None
        self.running_on: str | None = None
        self._read_at = self._attempts_at = -math.inf
        #: change numbers up to which trials and attempts were read; None before the first reading
        self._trials_until: int | None = None
        self._attempts_until: int | None = None
        #: what has been read of each trial
        self._depth = Depth.LOSSES
        self._trials: TrialColumns | None = None
        self._attempts: AttemptColumns | None = None
        #: answers by what was asked, with the version for which they hold and their time
        self._answers: OrderedDict[object, tuple[str, float, object]] = OrderedDict()

    def refresh(self) -> int:
        """Look for changes, unless that was done just now, and return the change number."""
        with self._lock:
            return self._refresh()

    def look(self) -> str:
        """Refresh, unless another thread is reading the store, and return a text that differs after each change.

        A study that begins or ends to run is a change too, which has no number.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._lock.release()
        return self._version

    def trials(self, depth: Depth = Depth.PARAMS) -> TrialColumns:
        """Return the trials as they are now. Facts that are deeper than `depth` may be missing."""
        with self._lock:
            trials = self._read_trials()
        return trials if depth <= self._depth else self._deepened(depth)

    def _read_trials(self) -> TrialColumns:
        """Return the trials as they are now, with the facts that are known. The lock must be held."""
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
        """Read deeper facts of the known trials. Meanwhile other threads can read the facts that are known."""
        with self._deepening:
            if depth > self._depth:
                since = self._trials_until or 0
                names = names_of(depth, beyond=self._depth)
                for block in self.study.rows_of_trials(names):
                    with self._lock:
                        self._growing.put([block], names, are_new=False)
                with self._lock:
                    if since and since != self.study.change:
                        # A trial that was added or has changed meanwhile.
                        self._growing.put(self.study.rows_of_trials(names_of(depth), since), names_of(depth))
                    self._depth, self._trials = depth, None
        with self._lock:
            return self._read_trials()

    def attempts(self) -> AttemptColumns:
        """Return the attempts and sessions as they are now."""
        change = self.refresh()
        with self._attempts_lock:
            now, is_running = self._clock.now(), self.running_on is not None
            if self._attempts_until != change:
                self._attempting.put(self.study.rows_of_attempts(ATTEMPTS, self._attempts_until or 0))
                self._attempts_until, self._attempts = change, None
            # What runs grows with the time, and sessions have no change numbers.
            if self._attempts is None or (is_running and now - self._attempts_at >= FRESH_SECONDS):
                self._attempts = self._attempting.columns(self._clock.wall(), is_running=is_running)
                self._attempts_at = now
            return self._attempts

    def answer(self, asked: object, make: Callable[[], T]) -> T:
        """Return what `make` returns, or has returned for the same question since the study has changed."""
        self.refresh()
        version, now = self._version, self._clock.now()
        found = self._answers.get(asked)
        # While trials run, answers also depend on the time.
        if found is not None and found[0] == version and (now - found[1] < FRESH_ANSWERS or self.running_on is None):
            return found[2]  # type: ignore[return-value] # the type of an answer follows from the question
        made = make()
        with self._lock:
            self._answers[asked] = version, now, made
            self._answers.move_to_end(asked)
            while len(self._answers) > MOST_ANSWERS:
                self._answers.popitem(last=False)
        return made

    def numbered(self, numbers: Sequence[int]) -> list[TrialResult]:
        """Return the trials with these numbers, in this order. Raises StoreError if one cannot be read."""
        found = {trial.number: trial for trial in map(self.study.result_of, self._store.trials(self._key, numbers))}
        return [found[number] for number in numbers if number in found]

    def latest_ends(self) -> Array:
        """Return when the trials ended that were written last, in seconds since the epoch."""
        names = ("number", "finished_at")
        blocks = self.study.rows_of_trials(names, max(1, (self.change or 0) - LATEST))
        ends = reals([row[1] for block in blocks for row in block], most=MOST_MOMENT)
        return ends[~np.isnan(ends)]

    @property
    def _version(self) -> str:
        return f"{self.change or 0}{'' if self.running_on is None else ' running'}"

    def _refresh(self) -> int:
        """Look for changes. They are read by those who need them, after this number, so that none is missed."""
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
        #: what the list says of each study, by its key, with the version for which it holds
        self._listed: dict[str, tuple[object, Any]] = {}

    def records(self) -> list[StudyRecord]:
        """Return all studies, the latest first."""
        self.store.verify()
        return self.store.records()

    def listed(self, records: Sequence[StudyRecord], make: Callable[[StudyResults], T]) -> list[T]:
        """Return for each study what `make` returns, or has returned since the study has changed.

        A page asks for all studies each second, and most of them have ended.
        """
        versions, known, found = self.store.versions(time.time()), self._listed, {}
        for record in records:
            version = versions.get(record.key, (None,))
            if record.key in known and known[record.key][0] == version:
                found[record.key] = known[record.key]
            else:
                found[record.key] = version, make(StudyResults(self.store, record))
        self._listed = found
        return [made for _, made in found.values()]

    def study(self, name: str) -> CachedStudy:
        """Return the study of a name, or of the beginning of one. Raises StudyNotFound."""
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


#: seconds for which an answer is kept
SHARED_SECONDS = 1.0


class Shared(Generic[T]):
    """Requests that come while the answer is being made, or just after, get the same one. For one event loop."""

    def __init__(self, make: Callable[[], T], threads: Executor, clock: Clock) -> None:
        """`make` is called in one of `threads`."""
        self._make, self._threads, self._clock = make, threads, clock
        #: the latest answer, with its time; it may be in the making
        self._latest: Future[tuple[float, T]] | None = None

    async def get(self) -> T:
        """Return the answer. Raises what `make` raises."""
        latest = self._latest
        if latest is None or self._is_old(latest):
            latest = self._latest = self._threads.submit(self._made)
        # If a request is cancelled, the others still wait.
        return (await asyncio.shield(asyncio.wrap_future(latest)))[1]

    def forget(self) -> None:
        """Let the next request get a new answer."""
        self._latest = None

    def _made(self) -> tuple[float, T]:
        made = self._make()
        return self._clock.now(), made

    def _is_old(self, latest: Future[tuple[float, T]]) -> bool:
        if not latest.done():
            return False
        return latest.exception() is not None or self._clock.now() - latest.result()[0] >= SHARED_SECONDS
