"""Where studies and trials are kept: three tables that a person can query, in SQLite or PostgreSQL.

One scheduler writes to a study at a time. Its lock is the `holder`, `lock_expires` and `fence` of the study's row;
every write checks the fence in the same transaction, so that a scheduler which was replaced can write nothing.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from shadho_celery.errors import LockLost, StoreError, StudyExists, StudyLocked, StudyNotFound
from shadho_celery.trial import Report, Trial, TrialState

DEFAULT_STORE = "sqlite:///shadho.db"

#: seconds without a write after which a scheduler's lock may be taken over from another machine
LOCK_SECONDS = 30.0

#: File systems on which SQLite's locks and shared memory do not work between machines.
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "pvfs2", "orangefs"}
)

#: Not PostgreSQL's JSONB: it reorders keys, makes an int of 1e22 and refuses NUL characters.
_json = sa.JSON()
_schema = sa.MetaData()

studies = sa.Table(
    "studies",
    _schema,
    sa.Column("key", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(255), nullable=False, unique=True),
    sa.Column("module", sa.String(255), nullable=False, index=True),
    sa.Column("seed", sa.BigInteger, nullable=False),
    #: label -> its domain and condition, to notice a space that has changed
    sa.Column("space", _json, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("holder", sa.String(255)),
    sa.Column("lock_expires", sa.Float),
    sa.Column("fence", sa.BigInteger, nullable=False, default=0),
)

trials = sa.Table(
    "trials",
    _schema,
    sa.Column("study", sa.String(32), sa.ForeignKey("studies.key"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("subspace", sa.Text, nullable=False),
    sa.Column("params", _json, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("lost", sa.Integer, nullable=False),
    sa.Column("compute_class", sa.String(255)),
    sa.Column("loss", sa.Float),
    sa.Column("metrics", _json, nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("host", sa.String(255)),
    sa.Column("asked_at", sa.Float),
    sa.Column("started_at", sa.Float),
    sa.Column("finished_at", sa.Float),
    sa.Column("seconds", sa.Float),
)

reports = sa.Table(
    "reports",
    _schema,
    sa.Column("study", sa.String(32), sa.ForeignKey("studies.key"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    #: null for NaN, which SQLite cannot keep
    sa.Column("loss", sa.Float),
    sa.Column("at", sa.Float, nullable=False),
)


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """What does not change about a study."""

    #: globally unique: studies of several stores may share one Redis
    key: str
    name: str
    #: module with SPACE and objective; "" where there is none
    module: str
    seed: int
    #: label -> domain and condition in words
    space: Mapping[str, str]
    #: seconds since the epoch
    created_at: float


_RECORD_COLUMNS = [studies.c[field.name] for field in fields(StudyRecord)]
_TRIAL_FIELDS = [field.name for field in fields(Trial)]
#: One lookup by name a field; `dataclasses.asdict` copies every params dict deeply.
_INSERT = sa.insert(trials)
_UPDATED = [name for name in _TRIAL_FIELDS if name not in {"number", "subspace", "params", "seed", "asked_at"}]
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


class Store:
    """Studies and trials behind one SQLAlchemy URL; ``sqlite://`` keeps them in memory.

    Every method is one transaction. Raises StoreError where the database cannot be used.
    """

    def __init__(self, url: str = DEFAULT_STORE) -> None:
        self.url = url
        self._engine = _engine(url)
        with self._errors():
            _schema.create_all(self._engine)

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
            if row.holder and _is_held(row.holder, row.lock_expires or 0.0, now):
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
        with self._begin() as connection:
            renewed = connection.execute(
                sa.update(studies)
                .where(studies.c.key == key, studies.c.fence == fence)
                .values(lock_expires=now + LOCK_SECONDS)
            )
            if not renewed.rowcount:
                raise LockLost
            if new:
                connection.execute(_INSERT, [_row(key, trial) for trial in new])
            if changed:
                connection.execute(_UPDATE, [_change(key, trial) for trial in changed])
            rows = {(r.number, r.attempt, r.step): r for r in reported}
            if rows:
                self._write_reports(connection, key, list(rows.values()))

    def _write_reports(self, connection: sa.Connection, key: str, rows: list[Report]) -> None:
        """Insert reports; one delivered twice after a crash is in the table already and stays as it is."""
        insert = _insert_ignoring(self._engine.dialect.name)
        connection.execute(
            insert,
            [
                {"study": key, "number": r.number, "attempt": r.attempt, "step": r.step, "loss": r.loss, "at": r.at}
                for r in rows
            ],
        )

    def trials(self, key: str) -> Iterator[Trial]:
        """The study's trials in the order of their numbers."""
        columns = [trials.c[name] for name in _TRIAL_FIELDS]
        with self._errors(), self._engine.connect() as connection:
            for row in connection.execute(sa.select(*columns).where(trials.c.study == key).order_by(trials.c.number)):
                values = dict(zip(_TRIAL_FIELDS, row, strict=True))
                values["state"] = TrialState(values["state"])
                yield Trial(**values)

    def reports(self, key: str) -> list[Report]:
        """The study's reports by trial, attempt and step."""
        names = [field.name for field in fields(Report)]
        query = sa.select(*(reports.c[name] for name in names)).where(reports.c.study == key)
        with self._errors(), self._engine.connect() as connection:
            rows = connection.execute(query.order_by(reports.c.number, reports.c.attempt, reports.c.step))
            found = [dict(zip(names, row, strict=True)) for row in rows]
        return [
            Report(**{**values, "loss": math.nan if values["loss"] is None else values["loss"]}) for values in found
        ]

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

    def _one(self, query: sa.Select[Any], which: str) -> StudyRecord:
        with self._errors(), self._engine.connect() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise StudyNotFound(f"there is no study {which} in {self.safe_url}; leave out --resume to begin one")
        return StudyRecord(**row._mapping)

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
            cause = " ".join(str(error.orig).split())
            raise StoreError(f"the store {self.safe_url} cannot be used: {cause}; check --store") from error


def holder_name() -> str:
    """How this process names itself in a lock: host, process and the process's moment of birth."""
    return f"{socket.gethostname()} {os.getpid()} {_birth(os.getpid())}"


def _is_held(holder: str, expires: float, now: float) -> bool:
    """True where `holder` may still be at work."""
    host, pid, birth = holder.rsplit(" ", 2)
    if host == socket.gethostname() and birth != UNKNOWN:
        # Beats waiting for the expiry, and a number that another process got since does not pass for the holder.
        return _birth(int(pid)) == birth
    return now < expires


UNKNOWN = "?"


def _birth(pid: int) -> str:
    """Clock ticks between the machine's start and the process's, "" for no such process, UNKNOWN without /proc."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]  # a zombie is dead
    except OSError:
        return "" if Path("/proc/self/stat").exists() else UNKNOWN


def _row(key: str, trial: Trial) -> dict[str, Any]:
    values = {name: getattr(trial, name) for name in _TRIAL_FIELDS}
    return {"study": key, **values, "state": str(trial.state), "error": _text(trial.error), "host": _text(trial.host)}


def _change(key: str, trial: Trial) -> dict[str, Any]:
    values = {f"_{name}": getattr(trial, name) for name in _UPDATED}
    texts = {"_state": str(trial.state), "_error": _text(trial.error), "_host": _text(trial.host)}
    return {"_study": key, "_number": trial.number, **values, **texts}


def _text(text: str | None) -> str | None:
    """`text` without what databases refuse: a trial's last words may hold NUL or half a surrogate pair."""
    return text and text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _insert_ignoring(dialect: str) -> Any:
    from sqlalchemy.dialects import postgresql, sqlite

    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(reports).on_conflict_do_nothing()


#: The kinds of database that are tested, by SQLAlchemy's names.
DRIVERS = frozenset({"sqlite", "sqlite+pysqlite", "postgresql+psycopg", "postgresql+psycopg2"})


def _engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):  # ValueError: a port that is no number
        shown = re.sub(r"^([^:]*:/*[^:]*):.*@", r"\1:***@", url)
        raise StoreError(f"{shown!r} is no database URL; write sqlite:///FILE or postgresql://USER@HOST/NAME") from None
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in DRIVERS:
        raise StoreError(
            f"no store of the kind {parsed.drivername!r}; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        )
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed)
    try:
        return sa.create_engine(parsed, pool_pre_ping=True, hide_parameters=True)
    except ModuleNotFoundError:
        raise StoreError('PostgreSQL needs its driver: pip install "shadho_celery[postgres]"') from None


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    if url.database in {None, "", ":memory:"}:
        # One connection for all threads: every new one would be another, empty database.
        return sa.create_engine("sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
    path = Path(str(url.database)).absolute()
    kind = file_system(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"{path} lies on a network file system ({kind}) where SQLite loses data; give --store another URL"
        )
    try:
        # Created here, so that nobody but its owner can read it from its first moment.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise StoreError(f"the store {path} cannot be opened: {error.strerror}; check --store") from None
    engine = sa.create_engine(url, connect_args={"timeout": 30}, hide_parameters=True)
    sa.event.listen(engine, "connect", _set_up_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _: Any) -> None:
    # WAL lets others read while the scheduler writes; NORMAL syncs at checkpoints, which survives a process's death.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system `path` lies on, "" where the system does not tell."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    target = os.path.realpath(path)
    best, kind = "", ""
    for line in lines:
        _, place, this, *_ = line.split(" ")
        place = place.replace("\\040", " ")
        if len(place) >= len(best) and (target + "/").startswith(place.rstrip("/") + "/"):
            best, kind = place, this
    return kind
