"""Where studies and trials are kept: three tables that a person can query, in SQLite or PostgreSQL.

One scheduler writes to a study at a time. Its lock is the `holder`, `lock_expires` and `fence` of the study's row;
every write checks the fence in the same transaction, so that a scheduler which was replaced can write nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from shadho_celery.core.checks import one_line
from shadho_celery.core.trial import Outcome, Report, Trial, TrialState
from shadho_celery.errors import LockLost, StoreError, StudyExists, StudyLocked, StudyNotFound
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.engine import make_engine, remedy
from shadho_celery.store.lock import is_held
from shadho_celery.store.tables import add_columns, reports, schema, studies, trials

DEFAULT_STORE = "sqlite:///shadho.db"

#: seconds without a write after which a scheduler's lock may be taken over from another machine
LOCK_SECONDS = 30.0


_RECORD_COLUMNS = [studies.c[each.name] for each in fields(StudyRecord)]
#: columns of a trial that come from its outcome, and those that come from itself
_OF_OUTCOME = [c.name for c in trials.columns if c.name in Outcome.__struct_fields__ and c.name != "state"]
_OF_TRIAL = [c.name for c in trials.columns if c.name not in {"study", *_OF_OUTCOME}]
_UPDATED = [n for n in _OF_TRIAL + _OF_OUTCOME if n not in {"number", "subspace", "params", "seed", "asked_at"}]
#: columns that hold a trial's own words
_TEXTS = ("error", "host", "warning")
#: what is kept of a live attempt
_OF_ATTEMPT = ("attempt", "state", "compute_class", "host", "started_at")
_NO_OUTCOME = Outcome(state=TrialState.WAITING)
#: A finished trial keeps its first result, whoever writes.
_UPDATE = (
    sa.update(trials)
    .where(
        trials.c.study == sa.bindparam("_study"),
        trials.c.number == sa.bindparam("_number"),
        trials.c.finished_at.is_(None),
    )
    .values({name: sa.bindparam(f"_{name}") for name in _UPDATED})
)


class SqlStore:
    """Studies and trials behind one SQLAlchemy URL; ``sqlite://`` keeps them in memory.

    Every method is one transaction. Raises StoreError where the database cannot be used.
    """

    def __init__(self, url: str = DEFAULT_STORE) -> None:
        self.url = url
        self._engine = make_engine(url)
        with self._errors():
            self._create_tables()

    @property
    def safe_url(self) -> str:
        """The URL without its password, to be shown."""
        return self._engine.url.render_as_string(hide_password=True)

    def create(self, record: StudyRecord) -> None:
        """Record a new study; StudyExists where its name is taken."""
        try:
            with self._begin() as connection:
                connection.execute(
                    sa.insert(studies).values({c.name: getattr(record, c.name) for c in _RECORD_COLUMNS})
                )
        except sa.exc.IntegrityError:
            raise StudyExists(
                f"a study named {record.name!r} is in {self.safe_url} already; "
                f"continue it with --resume {record.name} or choose another --study name"
            ) from None

    def find(self, name: str) -> StudyRecord:
        """The study called `name`; StudyNotFound where there is none."""
        return self._one(sa.select(*_RECORD_COLUMNS).where(studies.c.name == name), f"named {name!r}")

    def latest(self, module: str) -> StudyRecord:
        """The youngest study of `module`; StudyNotFound where there is none."""
        query = sa.select(*_RECORD_COLUMNS).where(studies.c.module == module)
        return self._one(query.order_by(studies.c.created_at.desc()).limit(1), f"of {module}")

    def lock(self, key: str, holder: str, now: float) -> int:
        """Take the study for `holder` (`holder_name`) and return the fencing number that its writes must show.

        Taken over: the lock of a process of this machine that is gone, and one of another machine that has run out.
        Else StudyLocked.
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
            taken = connection.execute(
                sa.update(studies)
                .where(studies.c.key == key, studies.c.fence == row.fence)
                .values(holder=holder, lock_expires=now + LOCK_SECONDS, fence=row.fence + 1)
            )
            if not taken.rowcount:
                raise StudyLocked
            return int(row.fence) + 1

    def keep_settings(self, key: str, fence: int, settings: Mapping[str, Any]) -> None:
        """Replace what is kept of the study's command lines; nothing happens where another holds it by now."""
        with self._begin() as connection:
            connection.execute(
                sa.update(studies).where(studies.c.key == key, studies.c.fence == fence).values(settings=dict(settings))
            )

    def unlock(self, key: str, fence: int) -> None:
        """Give the study back; nothing happens where another holds it by now."""
        with self._begin() as connection:
            connection.execute(
                sa.update(studies)
                .where(studies.c.key == key, studies.c.fence == fence)
                .values(holder=None, lock_expires=None)
            )

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
        """Record one turn of the loop and renew the lock; LockLost, and nothing written, where `fence` is old."""
        # Of several reports of one step the last one counts.
        last = {(r.number, r.attempt, r.step): r for r in reported}
        rows = [{"study": key, **{name: getattr(r, name) for name in Report.__struct_fields__}} for r in last.values()]

        def tell(insert: Any) -> None:
            with self._begin() as connection:
                self._renew(connection, key, fence, now)
                if new:
                    connection.execute(insert, [_row(key, trial) for trial in new])
                if changed:
                    connection.execute(_UPDATE, [_change(key, trial) for trial in changed])
                if rows:
                    # One delivered twice after a crash is in the table already and stays as it is.
                    connection.execute(self._insert_ignoring(reports), rows)

        try:
            tell(sa.insert(trials))
        except StoreError as error:
            if not _was_cut_off(error):
                raise
            # The connection was cut before or after all was done: by fence, numbers and states it can be told again.
            tell(self._insert_ignoring(trials))

    def _renew(self, connection: sa.Connection, key: str, fence: int, now: float) -> None:
        renewed = connection.execute(
            sa.update(studies)
            .where(studies.c.key == key, studies.c.fence == fence)
            .values(lock_expires=now + LOCK_SECONDS)
        )
        if not renewed.rowcount:
            raise LockLost

    def trials(self, key: str) -> Iterator[Trial]:
        """Yield the study's trials in the order of their numbers."""
        query = sa.select(*(trials.c[name] for name in _OF_TRIAL + _OF_OUTCOME)).where(trials.c.study == key)
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
        """Let go of the database."""
        self._engine.dispose()

    def _one(self, query: sa.Select[Any], which: str) -> StudyRecord:
        with self._errors(), self._engine.connect() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise StudyNotFound(f"there is no study {which} in {self.safe_url}; leave out --resume to begin one")
        # A study of an earlier version has no settings.
        return StudyRecord(**{**row._mapping, "settings": row.settings or {}})

    def _insert_ignoring(self, table: sa.Table) -> Any:
        """Insert rows, but for those that are there already."""
        insert = postgresql.insert if self._engine.dialect.name == "postgresql" else sqlite.insert
        return insert(table).on_conflict_do_nothing()

    def _create_tables(self, attempts: int = 10) -> None:
        """Create what is missing; of two that begin at once, one finds the tables or columns that the other made."""
        for left in reversed(range(attempts)):
            try:
                schema.create_all(self._engine)
                add_columns(self._engine)
                return
            except sa.exc.DBAPIError as error:
                said = str(error.orig)
                if not left or not any(words in said for words in ("already exists", "duplicate column", "locked")):
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
            cause = one_line(error.orig, 1000)
            raise StoreError(f"the store {self.safe_url} cannot be used: {cause}; {remedy(cause)}") from error


def _was_cut_off(error: StoreError) -> bool:
    """True where the connection ended in the middle of something."""
    return isinstance(error.__cause__, sa.exc.DBAPIError) and error.__cause__.connection_invalidated


def _row(key: str, trial: Trial) -> dict[str, Any]:
    """The columns of a trial."""
    outcome = trial.outcome or _NO_OUTCOME
    row = {"study": key, **{name: getattr(trial, name) for name in _OF_TRIAL}}
    row |= {name: getattr(outcome, name) for name in _OF_OUTCOME}
    row |= {name: _text(row[name]) for name in _TEXTS}
    row["state"] = str(trial.state)
    if trial.live is not None:
        row["live"] = [{name: getattr(each, name) for name in _OF_ATTEMPT} for each in trial.live]
    return row


def _change(key: str, trial: Trial) -> dict[str, Any]:
    row = _row(key, trial)
    return {"_study": key, "_number": trial.number, **{f"_{name}": row[name] for name in _UPDATED}}


def _trial(row: sa.RowMapping) -> Trial:
    """The trial whose columns these are."""
    values = {name: row[name] for name in _OF_TRIAL}
    state = values["state"] = TrialState(row["state"])
    values["slots"] = row["slots"] or 1  # an earlier version did not write it
    if state.is_finished:
        values["outcome"] = Outcome(state=state, **{name: row[name] for name in _OF_OUTCOME})
    live = values.pop("live")
    trial = Trial(**values)
    if not live:
        return trial
    return trial.evolve(live=tuple(trial.attempted(**{**each, "state": TrialState(each["state"])}) for each in live))


def _text(text: str | None) -> str | None:
    """`text` without what databases refuse: a trial's last words may hold NUL or half a surrogate pair."""
    return text and text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
