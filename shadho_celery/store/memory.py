"""Stores in memory, for searches that end with their process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from threading import RLock
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from shadho_celery.core.columns import merit
from shadho_celery.core.records import AttemptRecord, MachineRecord, SessionRecord
from shadho_celery.core.trial import Report, Trial, TrialState
from shadho_celery.errors import LockLost
from shadho_celery.store.base import StudyRecord, Turn

if TYPE_CHECKING:
    from shadho_celery.store.sql import SqlStore

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AttemptRecord).decode


class MemoryStore:
    """Store that keeps one study in memory. It is several hundred times as fast as a database."""

    safe_url = "memory"

    def __init__(self, fence: int = 1) -> None:
        """A write with a fencing number other than `fence` raises LockLost."""
        self._fence = fence
        self._trials: dict[int, Trial] = {}
        #: by trial, then by attempt and step: the first report
        self._reports: dict[int, dict[tuple[int, int], Report]] = {}
        #: live attempts; ended attempts as bytes, which take a quarter of the memory of records
        self._live: dict[tuple[int, int], AttemptRecord] = {}
        self._ended: list[bytes] = []
        self._sessions: dict[tuple[str, float], SessionRecord] = {}
        self._machines: dict[str, MachineRecord] = {}
        self._classes: Sequence[str] = ()

    def write(self, key: str, fence: int, now: float, turn: Turn) -> Collection[int]:
        if fence != self._fence:
            raise LockLost
        self._trials |= {trial.number: trial for trial in (*turn.new, *turn.changed)}
        for report in turn.reported:
            self._reports.setdefault(report.number, {}).setdefault((report.attempt, report.step), report)
        self._classes = self._classes if turn.classes is None else turn.classes
        for each in turn.seen:
            if isinstance(each, MachineRecord):
                self._machines[each.host] = each
            else:
                self._sessions[each.worker, each.since] = each
        for record in turn.attempted:
            attempt_key = record.number, record.attempt
            known = self._live.pop(attempt_key, None)
            whole = record if known is None else known.merged(record)
            if whole.end is None:
                self._live[attempt_key] = whole
            else:
                self._ended.append(_encode(whole))
        return ()

    def unlock(self, key: str, fence: int) -> None:
        pass

    def numbers(self, key: str = "") -> Collection[int]:
        return self._trials.keys()

    def trials(self, key: str = "", numbers: Collection[int] | None = None) -> list[Trial]:
        """Return all trials, or the trials with these numbers, sorted by number."""
        wanted = self._trials.keys() if numbers is None else self._trials.keys() & set(numbers)
        return [self._trials[number] for number in sorted(wanted)]

    def reports(self, key: str, numbers: Collection[int] | None = None) -> list[Report]:
        """Return the reports of all trials, or of the trials with these numbers, sorted by trial, attempt and step."""
        wanted = self._reports.keys() if numbers is None else self._reports.keys() & {*numbers}
        return [report for number in sorted(wanted) for _, report in sorted(self._reports[number].items())]

    def attempts(self, key: str = "", numbers: Collection[int] | None = None) -> Iterator[AttemptRecord]:
        """Yield the attempts of all trials, or of the trials with these numbers, sorted by trial and attempt."""
        found: dict[tuple[int, int], AttemptRecord] = {}
        for record in (*map(_decode, self._ended), *self._live.values()):
            if numbers is None or record.number in numbers:
                attempt_key = record.number, record.attempt
                # An attempt may have two records if its result arrived after it was given up as lost.
                found[attempt_key] = found[attempt_key].merged(record) if attempt_key in found else record
        return (found[attempt_key] for attempt_key in sorted(found))

    def class_order(self, key: str = "") -> Sequence[str]:
        """Return the names of the compute classes in the order of `AttemptRecord.placed`."""
        return self._classes

    def sessions(self, key: str = "") -> list[SessionRecord]:
        """Return the sessions of the workers, sorted by start."""
        return sorted(self._sessions.values(), key=lambda each: (each.since, each.worker))

    def machines(self, key: str = "") -> list[MachineRecord]:
        """Return the machines of the workers, sorted by name."""
        return sorted(self._machines.values(), key=lambda each: each.host)


class LateStore(MemoryStore):
    """Store of a program's study that has no database. SQLAlchemy is loaded only if something needs `sql`.

    Then the study is written once, to a database in memory, and later turns are written to both.
    """

    url = safe_url = "sqlite://"
    is_in_memory = True

    def __init__(self) -> None:
        super().__init__()
        #: calls of methods that change the database, and the last arguments of `write`, until there is a database
        self._calls: list[Callable[[SqlStore], object]] = []
        self._written: tuple[str, int, float] | None = None
        #: changes that the study's record or its actions got from turns
        self._facts: dict[str, Any] = {"asked": []}
        self._sql: SqlStore | None = None
        #: held while something is written, because another thread may read the study for the first time
        self._writing = RLock()

    @property
    def sql(self) -> SqlStore:
        """The same study in a database in memory."""
        with self._writing:
            if self._sql is None:
                from shadho_celery.store.sql import SqlStore

                store = SqlStore(self.url)
                # The first two calls have created and locked the study.
                for call in (*self._calls[:2], self._write_all, *self._calls[2:]):
                    call(store)
                self._sql = store
            return self._sql

    def _write_all(self, store: SqlStore) -> None:
        if self._written is not None:
            turn = Turn(new=self.earlier(), attempted=[*self.attempts()], reported=self.reports(""), **self._facts)
            turn.seen = [*self.sessions(), *self.machines()]
            store.write(*self._written, turn)

    def _call(self, call: Callable[[SqlStore], object]) -> None:
        with self._writing:
            if self._sql is None:
                self._calls.append(call)
            else:
                call(self._sql)

    def create(self, record: StudyRecord, warm_start: Sequence[Trial] = ()) -> None:
        """Record the study, and the trials of earlier studies from which it learns."""
        self._call(lambda sql: sql.create(record, warm_start))

    def lock(self, key: str, holder: str, now: float) -> int:
        """Lock the study, which has no other scheduler. Return its fencing number."""
        self._call(lambda sql: sql.lock(key, holder, now))
        return self._fence

    def write(self, key: str, fence: int, now: float, turn: Turn) -> Collection[int]:
        with self._writing:
            super().write(key, fence, now, turn)
            if self._sql is not None:
                return self._sql.write(key, fence, now, turn)
            self._written = key, fence, now
            facts = ((name, getattr(turn, name)) for name in ("choices", "decade", "money_plan", "classes"))
            self._facts |= {name: fact for name, fact in facts if fact is not None}
            self._facts["asked"] += turn.asked
            return ()

    def unlock(self, key: str, fence: int) -> None:
        self._call(lambda sql: sql.unlock(key, fence))

    def record_settings(self, key: str, fence: int, settings: Mapping[str, Any], in_force: Mapping[str, Any]) -> None:
        """Replace the settings of the study's record."""
        self._call(lambda sql: sql.record_settings(key, fence, settings, in_force))

    def reshape(self, key: str, fence: int, now: float, moved: Mapping[int, str], **facts: Mapping[str, Any]) -> None:
        """Set `space` and `tree` in the study's record, and the subspaces of the `moved` trials."""
        self._trials |= {number: replace(self._trials[number], subspace=name) for number, name in moved.items()}
        self._call(lambda sql: sql.reshape(key, fence, now, moved, **facts))

    def trials(self, key: str = "", numbers: Collection[int] | None = None) -> list[Trial]:
        """Return all trials, or the trials with these numbers, sorted by number. The caller may change their dicts."""
        return [_copied(trial) for trial in super().trials(key, numbers)]

    #: method that returns the study's trials, sorted by number
    earlier = MemoryStore.trials

    def counts(self, key: str) -> dict[TrialState, int]:
        """Return the number of the study's trials by state."""
        return dict(Counter(trial.state for trial in self.earlier(key)))

    def best(self, key: str) -> int | None:
        """Return the number of the best COMPLETE trial, as `SqlStore.best`; None if no trial is COMPLETE."""
        complete = (trial for trial in self.earlier(key) if trial.state is TrialState.COMPLETE)
        ranked = [trial for trial in complete if trial.outcome.loss is not None and not math.isnan(trial.outcome.loss)]
        return min(ranked, key=merit).number if ranked else None

    def close(self) -> None:
        """Do nothing, because the study may be read after its end."""


def database(store: SqlStore | LateStore) -> SqlStore:
    """Return the database with a study, for readings that only a database has."""
    return store.sql if isinstance(store, LateStore) else store


def _copied(trial: Trial) -> Trial:
    outcome = trial.outcome
    if outcome.metrics:
        outcome = replace(outcome, metrics=deepcopy(outcome.metrics))
    return replace(trial, params={**trial.params}, outcome=outcome)
