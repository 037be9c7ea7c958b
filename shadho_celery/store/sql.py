"""`SqlStore` keeps studies and trials in the tables of `rows`, in SQLite or PostgreSQL.

One scheduler writes to a study at a time. Its lock consists of the columns `holder`, `lock_expires` and `fence` in the
row of the study. Every write checks the fence in its own transaction, so a scheduler that was replaced cannot write.
"""

from __future__ import annotations

import json
import math
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

import sqlalchemy as sa
from msgspec import to_builtins
from sqlalchemy.dialects import sqlite
from sqlalchemy.sql.visitors import replacement_traverse

from shadho_celery.core.checks import listed, mask, mask_in, one_line, short
from shadho_celery.core.columns import Summary
from shadho_celery.core.records import Action, AttemptRecord, Leaving, MachineRecord, SessionRecord
from shadho_celery.core.system import LOCKED_SECONDS, MAINTENANCE_SECONDS
from shadho_celery.core.trial import Report, Trial, TrialState
from shadho_celery.errors import LockLost, StoreError, StoreOutage, StudyExists, StudyLocked, StudyNotFound
from shadho_celery.store.base import DEFAULT_STORE, PAGE, StudyRecord, Turn, described, is_held
from shadho_celery.store.engine import LOCKED, allow, is_in_memory, is_outage, make_engine, remedy, sqlstate
from shadho_celery.store.rows import (
    ACTIONS,
    ATTEMPTS,
    BRIEF,
    COLUMNS,
    FULL,
    JSON,
    LESSONS,
    MACHINES,
    REPORTS,
    SESSIONS,
    STUDIES,
    UNREADABLE,
    VERSION,
    Reader,
    action_row,
    actions,
    attempts,
    damage,
    lacking,
    machines,
    note_version,
    readable,
    record_row,
    reports,
    schema,
    schema_version,
    sessions,
    studies,
    trial_row,
    trials,
    unchecked,
    warm_starts,
)

R = TypeVar("R")

#: seconds without a write after which a scheduler on another machine may take over the lock
LOCK_SECONDS = 30.0

#: number of rows that are read at a time, unchecked, by a reader of many rows
LONG_PAGE = 20_000

#: maximum number of studies that an error lists
MAX_LISTED = 10

_FIXED = {"number", "subspace", "params", "given", "seed", "asked_at", "sampler"}
_UPDATED = [name for name in COLUMNS if name not in _FIXED] + ["change"]
_STATES = {state.value for state in TrialState}
_INSERT = sa.insert(trials)
#: Sets columns of a trial, unless it has finished: a finished trial keeps its first result.
_UPDATE = sa.update(trials).where(
    trials.c.study == sa.bindparam("_study"),
    trials.c.number == sa.bindparam("_number"),
    trials.c.finished_at.is_(None),
)
#: Sets the given columns of any trial.
_MOVE = sa.update(trials).where(trials.c.study == sa.bindparam("_study"), trials.c.number == sa.bindparam("_number"))
#: Sets columns of a study, unless another scheduler has taken over the study.
_FENCED = sa.update(studies).where(studies.c.key == sa.bindparam("_key"), studies.c.fence == sa.bindparam("_fence"))


class SqlStore:
    """Keeps studies and trials in the database at a SQLAlchemy URL. ``sqlite://`` keeps them in memory.

    Every write is one transaction. All methods raise StoreError if the database cannot be used.
    """

    def __init__(self, url: str = DEFAULT_STORE, *, read_only: bool = False) -> None:
        """If `read_only`, nothing is created or changed."""
        self.url = url
        #: the URL without the password, for messages
        self.safe_url = mask(url)
        self._engine = make_engine(url, read_only=read_only)
        self._is_read_only = read_only
        #: remedy in the error message for a study that does not exist
        self._instead = "shadho-celery studies lists its studies" if read_only else "leave out resume to begin one"
        weakref.finalize(self, self._engine.dispose)
        #: True after an outage, because it is not known whether the last turn was recorded
        self._is_unsure = False
        #: by key of a study: its latest change number that this object has read or written
        self._change: dict[str, int] = {}
        #: True if this store is only read and has no tables yet
        self._is_empty = read_only
        #: columns that this store lacks, because an earlier version has written it and it is only read; None if unknown
        self._lacking: Collection[sa.ColumnElement[Any]] | None = None if read_only else ()
        if read_only:
            self.verify()
        else:
            with self._errors():
                self._create_tables()

    @property
    def is_in_memory(self) -> bool:
        return is_in_memory(self.url)

    def verify(self) -> None:
        """Check the tables of a store that is only read.

        Another version may have written them since the store was opened. Raises StoreError if they cannot be used.
        """
        with self._errors():
            found = [] if self._is_empty else self._fetched(sa.select(schema_version.c.version))
            if [row.version for row in found] != [VERSION]:
                self._refuse_damage()
                self._is_empty = not sa.inspect(self._engine).has_table(studies.name)
            if not self._is_empty and self._lacking != []:
                self._lacking = lacking(self._engine)

    def create(self, record: StudyRecord, warm_start: Sequence[Trial] = ()) -> None:
        """Record a new study, and the trials of earlier studies from which it learns.

        Raises StudyExists if the store already has a study with this name.
        """
        rows = [_lesson(record.key, index, each) for index, each in enumerate(warm_start)]
        try:
            with self._begin() as connection:
                connection.execute(sa.insert(studies), {**vars(record), "money_plan": to_builtins(record.money_plan)})
                if rows:
                    connection.execute(sa.insert(warm_starts), rows)
        except sa.exc.IntegrityError:
            raise StudyExists(
                f"a study named {record.name!r} is in {self.safe_url} already; resume it (in a program "
                'resume="if-exists", or load_if_exists=True in shadho_celery.optuna), or choose another name (study)'
            ) from None

    def find(self, name: str, instead: str | None = None, *, told: Callable[[str], None] | None = None) -> StudyRecord:
        """Return the study called `name`, or the only study whose name begins with `name`.

        With `told`, `name` may also be a module, or the beginning of the last part of a module's name. This means the
        latest study of the module. `told` is called with a line that names the study, unless `name` is its full name.
        Raises StudyNotFound, with `instead` as the remedy.
        """
        if self._is_empty:
            raise StudyNotFound(f"there are no studies in {self.safe_url}")
        query = sa.select(studies.c.name, studies.c.module).order_by(studies.c.created_at.desc())
        # Values are converted to str, because a damaged row may have values of any type.
        modules = {str(row.name): str(row.module) for row in self._fetched(query)}
        whole, others = (name, 0) if name in modules else self._meant(name, modules, may_be_module=told is not None)
        if whole not in modules:
            # The name is not looked up in the database, because it may have characters that databases refuse.
            raise self._absent(f"named {name!r}", instead)
        found = self._one(studies.c.name == whole, f"named {name!r}", instead)
        if told is not None and others:
            told(
                f"study {whole}, the latest of {others + 1} of module {found.module}; give a full name for another one"
            )
        elif told is not None and not whole.startswith(name):
            told(f"study {whole}, of module {found.module}")
        return found

    def records(self) -> list[StudyRecord]:
        """Return all studies, the latest first."""
        if self._is_empty:
            return []
        return [*self._made(STUDIES, self._fetched(STUDIES.query.order_by(studies.c.created_at.desc())))]

    def latest(self, module: str) -> StudyRecord:
        """Return the latest study of `module`. Raises StudyNotFound."""
        return self._one(studies.c.module == module, f"of {module}")

    def holder(self, key: str, now: float) -> str | None:
        """Return the host and the process id of the scheduler that runs the study; None if it does not run."""
        query = sa.select(studies.c.holder, studies.c.lock_expires).where(studies.c.key == key)
        return next((described(row.holder) for row in self._fetched(query) if _is_held(row, now)), None)

    def is_interrupted(self, key: str, now: float) -> bool:
        """Return whether the study's last scheduler ended without unlocking the study, for instance by a crash."""
        query = sa.select(studies.c.holder, studies.c.lock_expires).where(studies.c.key == key)
        return any(row.holder and not _is_held(row, now) for row in self._fetched(query))

    def numbers(self, key: str) -> Iterator[int]:
        """Yield the numbers of the study's trials, sorted."""
        for page in self._pages(sa.select(trials.c.number).where(trials.c.study == key), [trials.c.number], PAGE):
            for row in page:
                yield self._number(key, row.number)

    def last_attempted(self, key: str) -> int:
        """Return the greatest number of a trial with a recorded attempt; -1 if there is none."""
        [(number,)] = self._fetched(sa.select(sa.func.max(attempts.c.number)).where(attempts.c.study == key))
        return -1 if number is None else self._number(key, number)

    def counts(self, key: str) -> dict[TrialState, int]:
        """Return the number of the study's trials by state.

        Raises StoreError for an unknown state.
        """
        found = self.tally(key, "state")
        for state in found.keys() - _STATES:
            raise self._damaged(trials, {"study": key, "state": state}, "unknown state")
        return {TrialState(state): count for state, count in found.items()}

    def tally(self, key: str, name: str) -> dict[str, int]:
        """Return the number of the study's trials by their values in the text column `name`.

        The values are sorted by the first trial with each of them. Trials without a value are left out.
        """
        fact, first = trials.c[name], sa.func.min(trials.c.number)
        query = sa.select(fact.label("fact"), sa.func.count().label("trials"))
        query = query.where(trials.c.study == key, fact.is_not(None)).group_by(fact).order_by(first)
        rows = self._fetched(query)
        # Damaged rows are ignored here; an error is raised when the trials are read.
        return {row.fact: row.trials for row in rows if isinstance(row.fact, str)}

    def spent(self, key: str, until: float = math.inf) -> dict[str, float]:
        """Return by compute class the money that the study's attempts have cost.

        Only attempts with a price that ended by the time `until` are included.
        """
        priced = sa.select(sessions.c.worker).where(sessions.c.study == key, sessions.c.price.is_not(None)).limit(1)
        if not self._fetched(priced):
            # No worker has a price, so the attempts, of which there may be millions, need not be read.
            return {}
        at, took = attempts.c, attempts.c.ended_at - attempts.c.started_at
        query = sa.select(at.compute_class, (sa.func.sum(took * at.price) / 3600).label("money"))
        query = query.where(at.study == key, at.price.is_not(None), took > 0).group_by(at.compute_class)
        rows = self._fetched(query if until == math.inf else query.where(at.ended_at <= until))
        # A damaged row may have values of any type.
        return {str(row.compute_class): float(row.money) for row in rows if _is_amount(row.money)}

    def used(self, since: float, until: float = math.inf) -> list[dict[str, Any]]:
        """Return how much the ended attempts of all studies have used between two times, sorted.

        Each item has the `owner` of the attempts, "" if it is not known, the name of the `study`, the `compute_class`,
        the `slot_seconds`, and the `money` that these have cost. An attempt without an owner is the study's owner's.
        """
        if self._is_empty:
            return []
        at, end = attempts.c, min(until, sys.float_info.max)
        began = sa.case((at.started_at < since, since), else_=at.started_at)
        took = sa.case((at.ended_at > end, end), else_=at.ended_at) - began
        slots, money = sa.func.sum(took * trials.c.slots), sa.func.sum(took * sa.func.coalesce(at.price, 0.0)) / 3600
        # PostgreSQL refuses to sort by a mere null, which `_known` puts in place of a missing column.
        owner = sa.func.coalesce(at.owner, studies.c.owner, sa.literal_column("''")).label("by")
        of = owner, studies.c.name, at.compute_class
        query = sa.select(*of, slots, money).group_by(*of).order_by(*of)
        query = query.where(at.study.in_(_recent(since)), at.ended_at > since, took > 0, studies.c.key == at.study)
        rows = self._fetched(query.where(trials.c.study == at.study, trials.c.number == at.number))
        # A damaged row may have values of any type.
        names = ("owner", "study", "compute_class", "slot_seconds", "money")
        whole = [row for row in rows if all(map(_is_amount, row[3:]))]
        return [dict(zip(names, (*map(str, row[:3]), *row[3:]), strict=True)) for row in whole]

    def occupied(self, since: float, now: float, width: float) -> list[Occupied]:
        """Return which slots the attempts of all studies took between two times, in intervals of `width` seconds."""
        if self._is_empty:
            return []
        at = attempts.c
        began = (sa.case((at.started_at < since, since), else_=at.started_at) - since) / width
        ended = (_end(at.ended_at, now) - since) / width
        query = sa.select(at.compute_class, trials.c.slots, began.label("began"), ended.label("ended"))
        query = query.where(at.study.in_(_recent(since)), at.compute_class.is_not(None), studies.c.key == at.study)
        each = query.where(trials.c.study == at.study, trials.c.number == at.number).subquery().c
        # Not every SQLite has `floor`. At the edge of two intervals, it does not matter which one is taken.
        first, last = (sa.func.round(moment - sa.literal_column("0.5")) for moment in (each.began, each.ended))
        of, weighted = (each.compute_class, first, last), (each.began * each.slots, each.ended * each.slots)
        totals = map(sa.func.sum, (each.slots, *weighted))
        rows = self._fetched(sa.select(*of, *totals).where(each.ended > each.began, each.ended > 0).group_by(*of))
        # A damaged row may have values of any type.
        return [Occupied._make((str(row[0]), *row[1:])) for row in rows if all(map(_is_amount, row[3:]))]

    def live(self, since: float, now: float) -> list[tuple[Any, ...]]:
        """Return worker, class, start, end and slots of the sessions of all studies that ended after a time, sorted."""
        if self._is_empty:
            return []
        at, end = sessions.c, _end(sessions.c.until, now)
        query = sa.select(at.worker, at.compute_class, at.since, end, at.slots).order_by(at.worker, at.since)
        rows = self._fetched(query.where(studies.c.key == at.study, end > since))
        return [tuple(row) for row in rows if all(map(_is_amount, row[2:]))]

    def best(self, key: str) -> int | None:
        """Return the number of the best COMPLETE trial; None if no trial is COMPLETE.

        The order is that of `core.columns.merit`: least violation, highest budget, least loss; then the least number. A
        budget of null counts as the highest.
        """
        order = [sa.func.coalesce(trials.c.violation, 0.0), trials.c.budget.is_not(None), trials.c.budget.desc()]
        query = sa.select(trials.c.number).where(
            trials.c.study == key, trials.c.state == TrialState.COMPLETE, trials.c.loss.is_not(None)
        )
        found = self._fetched(query.order_by(*order, trials.c.loss, trials.c.number).limit(1))
        return self._number(key, found[0].number) if found else None

    def delete(self, key: str, fence: int) -> None:
        """Delete a study, with its trials and all other records. Raises LockLost if `fence` is not that of its lock."""
        with self._begin() as connection:
            allow(connection, MAINTENANCE_SECONDS)
            if not _set(connection, key, fence, holder=None):
                raise LockLost
            for table in (actions, attempts, machines, reports, sessions, trials, warm_starts):
                connection.execute(sa.delete(table).where(table.c.study == key))
            connection.execute(sa.delete(studies).where(studies.c.key == key))

    def lock(self, key: str, holder: str, now: float) -> int:
        """Lock the study for `holder` (see `holder_name`). Return the fencing number, which all writes must give.

        An existing lock is taken over if its process ran in this container or on this machine and has ended, or if it
        is of another machine or container and has expired. Raises StudyLocked for any other lock.
        """
        with self._begin() as connection:
            row = connection.execute(
                sa.select(studies.c.holder, studies.c.lock_expires, studies.c.fence)
                .where(studies.c.key == key)
                .with_for_update()
            ).one()
            if _is_held(row, now):
                raise StudyLocked(
                    f"this study is run by the scheduler on {described(row.holder)}; stop it first, or begin "
                    f"another study (the lock of one that died ends after {LOCK_SECONDS:.0f} s)"
                )
            if not _is_number(row.fence):
                raise StoreError(f"the study's fence in {self.safe_url} is {short(row.fence)}; restore it from a copy")
            # Forget the change number, because another scheduler may have written.
            self._change.pop(key, None)
            fence = row.fence + 1
            if not _set(connection, key, row.fence, holder=holder, lock_expires=now + LOCK_SECONDS, fence=fence):
                raise StudyLocked
            # If the last scheduler ended without unlocking the study, its sessions have no end yet.
            written_at = row.lock_expires - LOCK_SECONDS if isinstance(row.lock_expires, float) else now
            left = (sessions.c.study == key) & sessions.c.until.is_(None)
            ended = {"until": min(written_at, now), "reason": str(Leaving.ENDED)}
            connection.execute(sa.update(sessions).where(left).values(ended))
            return fence

    def note(self, key: str, now: float, action: Action) -> None:
        """Record an action on a study that does not run. Raises StudyLocked if a scheduler runs it."""
        with self._begin() as connection:
            query = sa.select(studies.c.holder, studies.c.lock_expires, studies.c.fence, studies.c.change)
            row = connection.execute(query.where(studies.c.key == key).with_for_update()).one()
            if _is_held(row, now) or not _set(connection, key, row.fence, change=(row.change or 0) + 1):
                raise StudyLocked
            connection.execute(sa.insert(actions), [action_row(key, action)])

    def record_settings(self, key: str, fence: int, settings: Mapping[str, Any], in_force: Mapping[str, Any]) -> None:
        """Replace the settings of the study's record, unless another scheduler has taken over the study."""
        with self._begin() as connection:
            _set(connection, key, fence, settings=settings, in_force=in_force)

    def reshape(self, key: str, fence: int, now: float, moved: Mapping[int, str], **facts: Mapping[str, Any]) -> None:
        """Set `space` and `tree` in the study's record, and the subspaces of the `moved` trials, in one transaction.

        Raises LockLost if `fence` is old.
        """
        with self._begin() as connection:
            change = self._change[key] = self._last_change(connection, key) + 1
            if not _set(connection, key, fence, lock_expires=now + LOCK_SECONDS, change=change, **facts):
                raise LockLost
            same = {"_study": key, "change": change}
            if rows := [{**same, "_number": number, "subspace": name} for number, name in moved.items()]:
                _execute_many(connection, _MOVE, rows, of_json=())

    def unlock(self, key: str, fence: int) -> None:
        """Unlock the study, unless another scheduler has taken over the study."""
        with self._begin() as connection:
            _set(connection, key, fence, holder=None, lock_expires=None)

    def write(self, key: str, fence: int, now: float, turn: Turn) -> Collection[int]:
        """Record one turn of the scheduler and renew the lock. If `fence` is too old, write nothing and raise LockLost.

        After a StoreOutage the same turn may be written again, whether it was recorded or not. `changed` trials whose
        rows were deleted are inserted again in full, and their numbers are returned.
        """
        # If an attempt has several reports with the same step, only the first one is kept, because pruners use that
        # one, too. It may already be in the table.
        first: dict[tuple[int, int, int], Report] = {}
        for report in turn.reported:
            first.setdefault((report.number, report.attempt, report.step), report)
        rows = [record_row(key, report) for report in first.values()]
        noted = {name: to_builtins(getattr(turn, name)) for name in ("choices", "decade", "money_plan", "classes")}
        facts = {"lock_expires": now + LOCK_SECONDS, **{name: fact for name, fact in noted.items() if fact is not None}}
        has_changed = bool(turn.new or turn.changed or turn.attempted or turn.asked)

        def write() -> list[int]:
            insert = self._insert_ignoring(trials) if self._is_unsure else _INSERT
            deleted: list[Trial] = []
            with self._begin() as connection:
                # The change number is recorded here before the commit, so that it is not used again if it is unknown
                # whether the commit succeeded.
                change = self._change[key] = self._last_change(connection, key) + has_changed
                if not _set(connection, key, fence, **facts, change=change):
                    raise LockLost
                if turn.new:
                    _execute_many(connection, insert, [trial_row(key, trial, change) for trial in turn.new])
                # After an outage, new trials are also updated, because they may have been recorded before and have
                # changed since.
                if updated := [*turn.new, *turn.changed] if self._is_unsure else turn.changed:
                    found = _update(connection, key, updated, change)
                    # If fewer rows were updated, trials had already finished in the store, or their rows were deleted.
                    if found < len(updated) and (deleted := _deleted(connection, key, updated)):
                        _execute_many(connection, insert, [trial_row(key, trial, change) for trial in deleted])
                if rows:
                    connection.execute(self._insert_ignoring(reports), rows)
                self._write_records(connection, key, turn, change)
                if turn.asked:
                    connection.execute(self._insert_ignoring(actions), [action_row(key, each) for each in turn.asked])
            return [trial.number for trial in deleted]

        try:
            rewritten = write()
        except StoreOutage as error:
            # It is unknown whether the transaction was committed. It is safe to repeat it, because the fence is checked
            # again, existing rows are not inserted again, and finished trials are not updated.
            self._is_unsure = True
            cause = error.__cause__
            # Repeat it at once only after a lost connection. An error with a detail means that the server hangs, so a
            # repetition would only wait again.
            if not (isinstance(cause, sa.exc.DBAPIError) and cause.connection_invalidated and not cause.detail):
                self._renew(key, fence, now, cause)
                raise
            rewritten = write()
        self._is_unsure = False
        return rewritten

    def _write_records(self, connection: sa.Connection, key: str, turn: Turn, change: int) -> None:
        """Write the rows of attempts, sessions and machines."""
        if attempted := [record_row(key, each, change=change) for each in turn.attempted]:
            _execute_many(connection, _upsert(attempts, connection.dialect.name), attempted, of_json=())
        for table, kind in ((sessions, SessionRecord), (machines, MachineRecord)) if turn.seen else ():
            if rows := [record_row(key, each) for each in turn.seen if isinstance(each, kind)]:
                connection.execute(_upsert(table, connection.dialect.name), rows)

    def _last_change(self, connection: sa.Connection, key: str) -> int:
        """Return the study's latest change number; 0 if it has none."""
        if key in self._change:
            return self._change[key]
        found = connection.scalar(sa.select(studies.c.change).where(studies.c.key == key))
        return found if _is_number(found) else 0

    def _renew(self, key: str, fence: int, now: float, error: object) -> None:
        """Renew only the lock, after an error that the server has reported.

        The tables may stay locked for so long that the lock would expire. Raises LockLost if `fence` is old.
        """
        if not isinstance(error, sa.exc.DBAPIError) or error.connection_invalidated or not sqlstate(error):
            return
        with suppress(StoreOutage), self._begin() as connection:
            if not _set(connection, key, fence, lock_expires=now + LOCK_SECONDS):
                raise LockLost

    def trials(self, key: str, numbers: Collection[int] | None = None) -> Iterator[Trial]:
        """Yield all trials of the study, or the trials with these numbers, sorted by number.

        Raises StoreError, with the number, for a trial that cannot be read.
        """
        return self._read(FULL, key, numbers)

    def rows_of_trials(self, key: str, names: Sequence[str], since: int = 0) -> Iterator[Sequence[Sequence[Any]]]:
        """Yield blocks of rows with columns of the study's trials, or of those written after the change number `since`.

        The first column must be ``number``. Without `since`, rows are sorted by number. The values are unchecked, as
        the driver returns them; texts may be bytes. A million rows take seconds.
        """
        return self._blocks(trials, key, names, since)

    def rows_of_attempts(self, key: str, names: Sequence[str], since: int = 0) -> Iterator[Sequence[Sequence[Any]]]:
        """Yield blocks of rows with columns of the study's attempts, as `rows_of_trials` does.

        The first columns must be ``number`` and ``attempt``.
        """
        return self._blocks(attempts, key, names, since)

    def _blocks(self, table: sa.Table, key: str, names: Sequence[str], since: int) -> Iterator[Sequence[Sequence[Any]]]:
        is_file = self._engine.dialect.name == "sqlite"
        query = unchecked([table.c[name] for name in names], are_bytes=is_file).where(table.c.study == key)
        if since > 0:
            # The rows are not sorted, because SQLite would then read all rows instead of using the index.
            return iter([self._raw(query.where(table.c.change > since))])
        order = [column for column in table.primary_key if column.name != "study"]
        return self._pages(query, order, LONG_PAGE, self._raw)

    def _raw(self, query: sa.Select[Any]) -> Sequence[Sequence[Any]]:
        """Return the rows of a query as tuples of the driver, which is faster than rows of SQLAlchemy."""
        with self._errors(), self._engine.connect() as connection:
            try:
                found: Sequence[Sequence[Any]] = connection.execute(self._known(query)).cursor.fetchall()
            except self._engine.dialect.loaded_dbapi.Error as error:
                raise sa.exc.DatabaseError("fetch", None, error) from error
            return found

    def on_rung(self, key: str, origin: int, rung: int) -> int | None:
        """Return the number of the trial on this rung that continues trial `origin`; None if there is none.

        Cancelled trials are ignored.
        """
        of_origin = (trials.c.study == key) & (trials.c.origin == origin) & (trials.c.rung == rung)
        # A cancelled trial is replaced by another one.
        ended = of_origin & (trials.c.state != TrialState.CANCELLED.value)
        rows = self._fetched(sa.select(trials.c.number).where(ended).order_by(trials.c.number.desc()).limit(1))
        return self._number(key, rows[0].number) if rows else None

    def earlier(self, key: str) -> Iterator[Trial | Summary]:
        """Yield the study's unfinished trials, and summaries of its finished trials, sorted by number.

        Summaries are faster to read than trials. Raises StoreError for a trial that cannot be read, or that continues a
        missing trial.
        """
        found = trials.alias()
        known = sa.select(found.c.number).where(found.c.study == key, found.c.number == trials.c.origin)
        alone = (trials.c.study == key) & trials.c.origin.is_not(None) & ~known.exists()
        for row in self._fetched(sa.select(trials.c.number, trials.c.origin).where(alone).limit(1)):
            which = {"study": key, "number": row.number}
            raise self._damaged(trials, which, f"it continues trial {short(row.origin)}, which is missing")
        return self._read(BRIEF, key)

    def warm_start(self, key: str) -> list[Trial]:
        """Return the trials of earlier studies from which the study learns, numbered from 0."""
        return [*self._read(LESSONS, key)]

    def reports(self, key: str, numbers: Collection[int] | None = None) -> list[Report]:
        """Return the reports of all trials, or of the trials with these numbers, sorted by trial, attempt and step."""
        return [*self._read(REPORTS, key, numbers)]

    def change(self, key: str) -> int:
        """Return the study's latest change number. Each transaction that writes trials or attempts increases it."""
        found = self._fetched(sa.select(studies.c.change).where(studies.c.key == key))
        return found[0].change if found and _is_number(found[0].change) else 0

    def versions(self, now: float) -> dict[str, tuple[object, ...]]:
        """Return by key of each study: its change number, its last scheduler, and whether this scheduler may still run.

        As long as these are equal, the numbers of trials and the state of the study are equal, too.
        """
        if self._is_empty:
            return {}
        rows = self._fetched(readable((studies.c.key, studies.c.change, studies.c.holder, studies.c.lock_expires)))
        return {str(row.key): (row.change, row.holder, _is_held(row, now)) for row in rows}

    def attempts(self, key: str, numbers: Collection[int] | None = None) -> Iterator[AttemptRecord]:
        """Yield the attempts of all trials, or of the trials with these numbers, sorted by trial and attempt."""
        return self._read(ATTEMPTS, key, numbers)

    def class_order(self, key: str) -> Sequence[str]:
        """Return the names of the study's compute classes in the order of `AttemptRecord.placed`."""
        return self._one(studies.c.key == key, f"with the key {short(key)}").classes

    def sessions(self, key: str) -> list[SessionRecord]:
        """Return the sessions of the study's workers, sorted by start."""
        return [*self._read(SESSIONS, key)]

    def machines(self, key: str) -> list[MachineRecord]:
        """Return the machines of the study's workers, sorted by name."""
        return [*self._read(MACHINES, key)]

    def actions(self, key: str) -> list[Action]:
        """Return the requests that the study got while it ran, sorted by time."""
        return [*self._read(ACTIONS, key)]

    def fence(self, key: str) -> int | None:
        """Return the fencing number of the study's latest scheduler; None if the study was deleted."""
        return next((row.fence for row in self._fetched(sa.select(studies.c.fence).where(studies.c.key == key))), None)

    def steered(self, key: str) -> Collection[str]:
        """Return the names of the actions that the study's latest scheduler has carried out, the latest first."""
        fence = sa.select(studies.c.fence).where(studies.c.key == key).scalar_subquery()
        done = (actions.c.study == key) & (actions.c.fence == fence) & actions.c.is_done
        found = self._fetched(sa.select(actions.c.action).where(done).order_by(actions.c.at.desc()))
        return [str(row.action) for row in found]

    def close(self) -> None:
        """Close the connections to the database. A later call of a method opens a new one.

        A database in memory is not closed, because the study may be read after its end.
        """
        if not self.is_in_memory:
            self._engine.dispose()

    def _one(self, where: sa.ColumnElement[bool], which: str, instead: str | None = None) -> StudyRecord:
        """Return the latest study that meets a condition. Raises StudyNotFound if there is none."""
        query = STUDIES.query.where(where).order_by(studies.c.created_at.desc()).limit(1)
        for record in self._made(STUDIES, self._fetched(query)):
            return record
        raise self._absent(which, instead)

    def _absent(self, which: str, instead: str | None) -> StudyNotFound:
        return StudyNotFound(f"there is no study {which} in {self.safe_url}; {instead or self._instead}")

    def _meant(self, name: str, modules: Mapping[str, str], *, may_be_module: bool) -> tuple[str, int]:
        """Return the full name of the study that `name` means, and the number of other studies that it matches.

        `modules` has the module by the name of each study, the latest study first. An unknown name is returned
        unchanged. Raises StudyNotFound if `name` is ambiguous, or unknown and similar to a known name.
        """
        fitting = [each for each in modules if each.startswith(name)]
        if may_be_module and name:
            by_module = [each for each, module in modules.items() if name in {module, _last_part(module)}]
            one = {modules[each] for each in by_module or fitting}
            if len(one) == 1 and (by_module or all(_last_part(module).startswith(name) for module in one)):
                return (by_module or fitting)[0], len(by_module or fitting) - 1
        if len(fitting) > 1:
            raise StudyNotFound(
                f"{name!r} matches {len(fitting)} studies in {self.safe_url}: {listed(sorted(fitting), MAX_LISTED)}; "
                "write more of the name"
            )
        known = {*modules, *(map(_last_part, modules.values()) if may_be_module else ())}
        near = get_close_matches(name, known, n=3) if not fitting and len(modules) < 10_000 else []
        if near:
            raise StudyNotFound(f"there is no study {name!r} in {self.safe_url}; did you mean {' or '.join(near)}?")
        return (fitting[0] if fitting else name), 0

    def _read(self, reader: Reader[R], key: str, numbers: Collection[int] | None = None) -> Iterator[R]:
        """Yield the records of a study, or those of its trials with these numbers.

        Raises StoreError for a damaged row.
        """
        query = reader.query.where(reader.table.c.study == key)
        if numbers is None:
            pages = self._pages(query, reader.order, PAGE)
        else:
            by_number, query = reader.table.c.number, query.order_by(*reader.order)
            pages = (self._fetched(query.where(by_number.in_(part))) for part in _parts(numbers))
        for page in pages:
            yield from self._made(reader, page, study=key)

    def _made(self, reader: Reader[R], rows: Iterable[sa.Row[Any]], **of: str) -> Iterator[R]:
        for row in rows:
            try:
                made = reader.make(row)
            except UNREADABLE as error:
                which = of | {column.name: row._mapping[column.name] for column in reader.order}
                raise self._damaged(reader.table, which, reader.problem(error)) from None
            yield made

    def _pages(
        self,
        query: sa.Select[Any],
        order: Sequence[sa.Column[Any]],
        size: int,
        fetch: Callable[[sa.Select[Any]], Sequence[Any]] | None = None,
    ) -> Iterator[Sequence[Any]]:
        """Yield the rows of a query in pages of `size` rows, sorted by the columns `order`, which must be their first
        columns.

        Each page is read in a transaction of its own, because SQLite's journal grows during a long transaction.
        """
        fetch = fetch or self._fetched
        query = query.order_by(*order).limit(size)
        page = fetch(query)
        yield page
        while len(page) == size:
            page = fetch(query.where(sa.tuple_(*order) > tuple(page[-1][: len(order)])))
            yield page

    def _fetched(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        with self._errors(), self._engine.connect() as connection:
            return connection.execute(self._known(query)).all()

    def _known(self, query: sa.Select[Any]) -> sa.Select[Any]:
        """Return a query with nulls in place of the columns that the store lacks."""
        if not self._lacking:
            return query
        absent = {*self._lacking}

        def replace(element: Any, **kw: Any) -> Any:
            return sa.null().label(element.name) if element in absent else None

        found: Any = replacement_traverse(query, {}, replace)
        return cast(sa.Select[Any], found)

    def _number(self, key: str, number: object) -> int:
        """Return a value as the number of a trial. Raises StoreError if it is not a valid number."""
        if _is_number(number):
            return number
        raise self._damaged(trials, {"study": key, "number": number}, "it has no number")

    def _damaged(self, table: sa.Table, which: Mapping[str, object], problem: str) -> StoreError:
        """Return the error for a row that cannot be read. The values in `which` identify the row."""
        row = ", ".join(f"{name} {short(value)}" for name, value in which.items())
        tool = "sqlite3" if self._engine.dialect.name == "sqlite" else "psql"
        return StoreError(
            f"the store {self.safe_url} has a row in its table {table.name} that cannot be read ({row}): {problem}; "
            f"restore the store from a copy, or delete the row with {tool}"
        )

    def _insert_ignoring(self, table: sa.Table) -> sa.Insert:
        """Return a statement that inserts rows into a table, except rows that already exist."""
        found: sa.Insert = _insert(table, self._engine.dialect.name).on_conflict_do_nothing()
        return found

    def _create_tables(self) -> None:
        """Create missing tables. If another process does the same at this time, try again."""
        deadline = time.monotonic() + LOCKED_SECONDS
        while True:
            try:
                self._refuse_damage()
                schema.create_all(self._engine)
                for column in lacking(self._engine):
                    added = sa.schema.CreateColumn(column).compile(self._engine)
                    with self._engine.begin() as connection:
                        connection.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {added}")
                note_version(self._engine)
                return
            except sa.exc.DBAPIError as error:
                harmless = ("already exists", "duplicate column", "UNIQUE constraint", *LOCKED)
                if time.monotonic() > deadline or not any(words in str(error.orig) for words in harmless):
                    raise
                time.sleep(0.05)

    def _refuse_damage(self) -> None:
        if (lost := damage(self._engine, is_written=not self._is_read_only)) is not None:
            raise StoreError(f"the store {self.safe_url} cannot be used: {one_line(lost)}")

    @contextmanager
    def _begin(self) -> Iterator[sa.Connection]:
        with self._errors(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.IntegrityError:
            raise
        except sa.exc.DBAPIError as error:
            # If the error has a detail, it is used instead of the driver's message, because it says more.
            cause = one_line(mask_in("; ".join(error.detail) or str(error.orig), self.url), 1000)
            kind = StoreOutage if is_outage(error) else StoreError
            raise kind(f"the store {self.safe_url} cannot be used: {cause}; {remedy(cause)}") from error


def _update(connection: sa.Connection, key: str, updated: Sequence[Trial], change: int) -> int:
    """Set the columns of trials that may have changed. Return the number of changed rows."""
    # If the objective asks for labels, the result sets params and `given`.
    is_asked = any(trial.outcome.asked is not None for trial in updated)
    names = [*_UPDATED, "params", "given"] if is_asked else _UPDATED
    changes = []
    for row in [trial_row(key, trial, change) for trial in updated]:
        now_is = {name: row[name] for name in names}
        changes.append({"_study": key, "_number": row["number"], **now_is})
    return _execute_many(connection, _UPDATE, changes)


def _last_part(module: str) -> str:
    """Return the last part of a module's name. Generated names of its studies begin with it."""
    return module.rpartition(".")[2]


def _lesson(key: str, index: int, trial: Trial) -> dict[str, Any]:
    """Return the row in `warm_starts` for a trial from which a study learns."""
    named = {"losses": trial.outcome.losses or None, "constraints": trial.outcome.constraints or None}
    facts = {"subspace": trial.subspace, "params": trial.params, "loss": trial.outcome.loss}
    return {"study": key, "place": index, **facts, **named}


def _parts(numbers: Collection[int]) -> Iterator[Sequence[int]]:
    """Yield sorted numbers in parts that fit into one statement."""
    wanted = sorted(numbers)
    for start in range(0, len(wanted), PAGE):
        yield wanted[start : start + PAGE]


def _is_number(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer from 0 to 2**63 - 2, so that adding 1 gives a valid integer.

    This is checked, because SQLite may have values of any type in a numeric column.
    """
    return isinstance(value, int) and 0 <= value < 2**63 - 1


class Occupied(NamedTuple):
    """Sums over attempts of one class that began in the same interval and ended in the same one."""

    compute_class: str
    #: index of the interval in which they began, and of the one in which they ended
    first: float
    last: float
    #: sums of their slots, and of the starts and ends of these slots, in intervals since the first one
    slots: float
    began: float
    ended: float


def _recent(since: float) -> sa.Select[Any]:
    """Return a query for the studies that may have attempts after a time.

    Few rows tell that. There may be millions of attempts of other studies.
    """
    return sa.select(sessions.c.study).where(sa.or_(sessions.c.until.is_(None), sessions.c.until > since))


def _end(recorded: sa.Column[Any], now: float) -> sa.ColumnElement[Any]:
    """Return the end of an attempt or session: `recorded`, or else `now`, or when its scheduler's lock expired."""
    lock = studies.c.lock_expires
    end = sa.func.coalesce(recorded, sa.case((lock < now, lock), else_=now))
    return sa.case((end > now, now), else_=end)


def _is_amount(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def _is_held(row: Any, now: float) -> bool:
    """Return whether the row of a study names a scheduler that may still run the study."""
    is_lock = isinstance(row.holder, str) and isinstance(row.lock_expires, (int, float, type(None)))
    return is_lock and bool(row.holder) and is_held(row.holder, row.lock_expires or 0.0, now)


def _set(connection: sa.Connection, key: str, fence: int, /, **values: object) -> bool:
    """Set columns of a study if its fencing number is `fence`. Return whether this was the case."""
    return connection.execute(_FENCED, {"_key": key, "_fence": fence, **values}).rowcount > 0


def _deleted(connection: sa.Connection, key: str, written: Sequence[Trial]) -> list[Trial]:
    """Return the trials of `written` that have no row in the table."""
    found: set[int] = set()
    for start in range(0, len(written), PAGE):
        numbers = [trial.number for trial in written[start : start + PAGE]]
        query = sa.select(trials.c.number).where(trials.c.study == key, trials.c.number.in_(numbers))
        found.update(connection.scalars(query))
    return [trial for trial in written if trial.number not in found]


def _insert(table: sa.Table, dialect: str) -> Any:
    """Return a statement of this dialect that inserts rows, with methods for the case that rows already exist."""
    if dialect == "sqlite":
        return sqlite.insert(table)
    # Imported only here, because it takes a quarter of SQLAlchemy's import time, and most stores are SQLite files.
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)


@lru_cache(maxsize=16)
def _upsert(table: sa.Table, dialect: str) -> sa.Insert:
    """Return a statement that inserts rows. If a row already exists, the columns that are not null in the new row are
    set.
    """
    keys, insert = [*table.primary_key], _insert(table, dialect)
    new = {c.name: sa.func.coalesce(insert.excluded[c.name], c) for c in table.columns if not c.primary_key}
    statement: sa.Insert = insert.on_conflict_do_update(index_elements=keys, set_=new)
    return statement


def _execute_many(
    connection: sa.Connection,
    statement: sa.Insert | sa.Update,
    rows: list[dict[str, object]],
    of_json: Sequence[str] = JSON,
) -> int:
    """Execute a statement with each of `rows`. Return the number of changed rows.

    Values of the columns `of_json` are encoded. The driver is called directly, which takes half of the time that
    SQLAlchemy takes.
    """
    text, names = _compiled(connection.dialect, statement, tuple(rows[0]))
    for row in rows if of_json else ():
        row.update({name: json.dumps(row[name]) for name in of_json if row.get(name) is not None})
    values = [itemgetter(*names)(row) for row in rows] if names else rows
    found = 0
    # Rows are sent in several calls, because each call has its own time limit.
    for start in range(0, len(values), PAGE):
        found += connection.exec_driver_sql(text, values[start : start + PAGE]).rowcount
    return found


@lru_cache(maxsize=16)
def _compiled(dialect: sa.Dialect, statement: sa.Insert | sa.Update, columns: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the SQL of a statement, and the names of its parameters in order.

    The list is empty if the driver takes parameters by name.
    """
    compiled = statement.compile(dialect=dialect, column_keys=columns)
    return str(compiled), compiled.positiontup or []
