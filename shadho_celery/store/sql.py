"""Store of studies and trials: three tables that a person can query, in SQLite or PostgreSQL.

One scheduler writes to a study at a time. Its lock is the `holder`, `lock_expires` and `fence` of the study's row;
every write checks the fence in the same transaction, so that a scheduler which was replaced cannot write.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy.dialects import postgresql, sqlite

from shadho_celery.core.checks import mask, mask_in, one_line
from shadho_celery.core.trial import Outcome, Report, Trial, TrialState
from shadho_celery.errors import LockLost, StoreError, StudyExists, StudyLocked, StudyNotFound
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.engine import make_engine, remedy
from shadho_celery.store.lock import is_held
from shadho_celery.store.tables import add_columns, reports, schema, studies, trials

DEFAULT_STORE = "sqlite:///shadho.db"

#: seconds without a write after which another machine may take over a scheduler's lock
LOCK_SECONDS = 30.0

_RECORD_COLUMNS = [studies.c[each.name] for each in fields(StudyRecord)]
_COLUMNS = [c.name for c in trials.columns if c.name != "study"]
#: columns of a trial that are fields of its outcome
_OF_OUTCOME = [name for name in _COLUMNS if name in Outcome.__struct_fields__ and name != "state"]
_UPDATED = [name for name in _COLUMNS if name not in {"number", "subspace", "params", "seed", "asked_at"}]
#: columns with text of the trial's or the machine's own
_TEXTS = ("error", "host", "warning")
#: stored fields of a live attempt
_OF_ATTEMPT = ("attempt", "state", "compute_class", "host", "started_at")
_NO_OUTCOME = Outcome(state=TrialState.WAITING)
#: Sets the columns that it is given. A finished trial keeps its first result, whichever scheduler writes.
_UPDATE = sa.update(trials).where(
    trials.c.study == sa.bindparam("_study"),
    trials.c.number == sa.bindparam("_number"),
    trials.c.finished_at.is_(None),
)


class SqlStore:
    """Studies and trials behind one SQLAlchemy URL; ``sqlite://`` keeps them in memory.

    Every method is one transaction. Raises StoreError if the database cannot be used.
    """

    def __init__(self, url: str = DEFAULT_STORE) -> None:
        self.url = url
        self._engine = make_engine(url)
        with self._errors():
            self._create_tables()

    @property
    def safe_url(self) -> str:
        """The URL without its password, for messages."""
        return mask(self.url)

    def create(self, record: StudyRecord) -> None:
        """Record a new study. Raises StudyExists if the store has another one of its name."""
        try:
            with self._begin() as connection:
                connection.execute(sa.insert(studies), vars(record))
        except sa.exc.IntegrityError:
            raise StudyExists(
                f"a study named {record.name!r} is in {self.safe_url} already; "
                f"continue it with --resume {record.name} or choose another --study name"
            ) from None

    def find(self, name: str) -> StudyRecord:
        """Return the study called `name`. Raises StudyNotFound."""
        return self._one(sa.select(*_RECORD_COLUMNS).where(studies.c.name == name), f"named {name!r}")

    def latest(self, module: str) -> StudyRecord:
        """Return the latest study of `module`. Raises StudyNotFound."""
        query = sa.select(*_RECORD_COLUMNS).where(studies.c.module == module)
        return self._one(query.order_by(studies.c.created_at.desc()).limit(1), f"of {module}")

    def lock(self, key: str, holder: str, now: float) -> int:
        """Lock the study for `holder` (`holder_name`); return the fencing number that its writes must show.

        Takes over the lock of a process of this machine that has ended, and one of another machine that has expired.
        Raises StudyLocked for any other lock.
        """
        with self._begin() as connection:
            row = connection.execute(
                sa.select(studies.c.holder, studies.c.lock_expires, studies.c.fence)
                .where(studies.c.key == key)
                .with_for_update()
            ).one()
            if row.holder and is_held(row.holder, row.lock_expires or 0.0, now):
                host, pid, _ = row.holder.rsplit(" ", 2)
                raise StudyLocked(
                    f"this study is run by the scheduler on {host} (process {pid}); stop it first, or begin "
                    f"another with --study NAME (the lock of one that died ends after {LOCK_SECONDS:.0f} s)"
                )
            fence = int(row.fence) + 1
            if not _set(connection, key, row.fence, holder=holder, lock_expires=now + LOCK_SECONDS, fence=fence):
                raise StudyLocked
            return fence

    def keep_settings(self, key: str, fence: int, settings: Mapping[str, Any]) -> None:
        """Replace the settings of the study's record, unless another scheduler has taken the study over."""
        with self._begin() as connection:
            _set(connection, key, fence, settings=dict(settings))

    def unlock(self, key: str, fence: int) -> None:
        """Unlock the study, unless another scheduler has taken it over."""
        with self._begin() as connection:
            _set(connection, key, fence, holder=None, lock_expires=None)

    def write(
        self,
        key: str,
        fence: int,
        now: float,
        *,
        new: Sequence[Trial] = (),
        changed: Sequence[Trial] = (),
        reported: Iterable[Report] = (),
    ) -> None:
        """Record one turn of the loop and renew the lock. Raises LockLost, and writes nothing, if `fence` is old."""
        # Of several reports of one step the last one counts.
        last = {(r.number, r.attempt, r.step): r for r in reported}
        rows = [{"study": key, **asdict(report)} for report in last.values()]

        def write(insert: sa.Insert) -> None:
            with self._begin() as connection:
                if not _set(connection, key, fence, lock_expires=now + LOCK_SECONDS):
                    raise LockLost
                if new:
                    connection.execute(insert, [_row(key, trial) for trial in new])
                if changed:
                    connection.execute(_UPDATE, [_change(key, trial) for trial in changed])
                if rows:
                    # A report that comes again after a crash is in the table already and stays as it is.
                    connection.execute(self._insert_ignoring(reports), rows)

        try:
            write(sa.insert(trials))
        except StoreError as error:
            cause = error.__cause__
            if not (isinstance(cause, sa.exc.DBAPIError) and cause.connection_invalidated):
                raise
            # The connection was cut, before the commit or after it: fence, numbers and states make a repetition safe.
            write(self._insert_ignoring(trials))

    def trials(self, key: str) -> Iterator[Trial]:
        """Yield the study's trials in the order of their numbers."""
        query = sa.select(*(trials.c[name] for name in _COLUMNS)).where(trials.c.study == key)
        with self._errors(), self._engine.connect() as connection:
            for row in connection.execute(query.order_by(trials.c.number)):
                yield _trial(row._mapping)

    def reports(self, key: str) -> list[Report]:
        """Return the study's reports by trial, attempt and step."""
        query = sa.select(*(reports.c[name] for name in Report.__struct_fields__)).where(reports.c.study == key)
        with self._errors(), self._engine.connect() as connection:
            rows = connection.execute(query.order_by(reports.c.number, reports.c.attempt, reports.c.step))
            return [Report(**{**row._mapping, "loss": math.nan if row.loss is None else row.loss}) for row in rows]

    def close(self) -> None:
        """Close the connections to the database."""
        self._engine.dispose()

    def _one(self, query: sa.Select[Any], which: str) -> StudyRecord:
        with self._errors(), self._engine.connect() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise StudyNotFound(f"there is no study {which} in {self.safe_url}; leave out --resume to begin one")
        # A study of an earlier version has no settings.
        return StudyRecord(**{**row._mapping, "settings": row.settings or {}})

    def _insert_ignoring(self, table: sa.Table) -> sa.Insert:
        """Return a statement that inserts rows and ignores those that are there already."""
        insert = postgresql.insert if self._engine.dialect.name == "postgresql" else sqlite.insert
        return insert(table).on_conflict_do_nothing()

    def _create_tables(self, attempts: int = 10) -> None:
        """Create missing tables and columns; of two processes that begin at once, one finds those of the other."""
        for left in reversed(range(attempts)):
            try:
                schema.create_all(self._engine)
                add_columns(self._engine)
                return
            except sa.exc.DBAPIError as error:
                harmless = ("already exists", "duplicate column", "locked")
                if not left or not any(words in str(error.orig) for words in harmless):
                    raise
                time.sleep(0.05)

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
            cause = one_line(mask_in(str(error.orig), self.url), 1000)
            raise StoreError(f"the store {self.safe_url} cannot be used: {cause}; {remedy(cause)}") from error


def _set(connection: sa.Connection, key: str, fence: int, /, **values: object) -> bool:
    """Set columns of a study if its fencing number is still `fence`; return whether it is."""
    update = sa.update(studies).where(studies.c.key == key, studies.c.fence == fence)
    return connection.execute(update.values(values)).rowcount > 0


def _row(key: str, trial: Trial) -> dict[str, object]:
    """Return the row of a trial."""
    facts = asdict(trial.outcome or _NO_OUTCOME) | asdict(trial)
    row = {"study": key, **{name: facts[name] for name in _COLUMNS}, "state": str(trial.state)}
    row |= {name: _text(row[name]) for name in _TEXTS}
    if trial.live is not None:
        row["live"] = [{name: getattr(each, name) for name in _OF_ATTEMPT} for each in trial.live]
    return row


def _change(key: str, trial: Trial) -> dict[str, object]:
    row = _row(key, trial)
    return {"_study": key, "_number": trial.number, **{name: row[name] for name in _UPDATED}}


def _trial(row: sa.RowMapping) -> Trial:
    """Return the trial of a row."""
    values = dict(row)
    outcome = {name: values.pop(name) for name in _OF_OUTCOME}
    live = values.pop("live")
    state = values["state"] = TrialState(row["state"])
    values["slots"] = row["slots"] or 1  # an earlier version did not write it
    if state.is_finished:
        values["outcome"] = Outcome(state=state, **outcome)
    trial = Trial(**values)
    if not live:
        return trial
    return trial.evolve(live=tuple(trial.attempted(**{**each, "state": TrialState(each["state"])}) for each in live))


def _text(text: str | None) -> str | None:
    """Replace characters that databases refuse: an error's message may have NUL or half a surrogate pair."""
    return text and text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
