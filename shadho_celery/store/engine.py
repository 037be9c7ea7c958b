"""SQLAlchemy engines for the database of a store, SQLite or PostgreSQL, with time limits and remedies for errors."""

from __future__ import annotations

import errno
import os
import socket
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import sqlalchemy as sa

from shadho_celery.core.checks import mask, one_line
from shadho_celery.core.system import (
    DATABASE_CONNECT_SECONDS,
    GRACE_SECONDS,
    IDLE_SECONDS,
    LOCK_WAIT_SECONDS,
    LOCKED_SECONDS,
    READ_SECONDS,
    STATEMENT_SECONDS,
    NoThread,
    start_thread,
)
from shadho_celery.errors import StoreError

#: types of file systems on which SQLite's locks and shared memory do not work between machines
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "pvfs2", "orangefs"}
)

#: SQLAlchemy's names of the database drivers that the tests cover
DRIVERS = frozenset({"sqlite", "sqlite+pysqlite", "postgresql+psycopg", "postgresql+psycopg2"})

#: options of a connection with which a lost network is detected within half a minute; options in the URL override them
POSTGRESQL = {
    "connect_timeout": DATABASE_CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "tcp_user_timeout": 30_000,
}

#: prefixes of PostgreSQL's codes for errors that may be temporary: the server is unavailable (08, 57P), lacks a
#: resource (53), is a standby (25006), or has reloaded its users (28, 42501); the transaction conflicted with another
#: one (40, 55P03), or was cancelled (57014, 25P03, 25P04)
PASSING = ("08", "57P", "53", "25006", "28", "42501", "40", "55P03", "57014", "25P03", "25P04")

#: seconds between two checks for connections that do not answer
TICK_SECONDS = 0.2

#: suffixes of the files that SQLite opens beside a database
JOURNALS = ("-journal", "-wal", "-shm")

#: number of writes that `commit_seconds` measures; bytes of each write to a disk
COMMITS, PAGE_BYTES = 9, 4096

#: name of the execution option with the time limit of a statement in seconds
SECONDS = "shadho_seconds"

#: words in SQLite's messages if other processes use the file, or if too many of them open it at once
LOCKED = ("locked", "locking protocol")

#: by words in the error message of a database: the remedy
REMEDIES = {
    "locked": "another program keeps it locked: close that program",
    "locking protocol": "many programs open it at once: close some, and keep it on a local disk",
    "lock timeout": "another session keeps a table or a row locked: end that session",
    "statement timeout": "find out what slows the server down",
    "full": "make room on its disk",
    "no space left": "make room on its disk",
    "disk i/o error": "make room on its disk, and check the disk",
    "readonly": "make the file and its folder writable",
    "read-only transaction": "check that the server is not a standby",
    "permission denied": "give the user access to the tables of the store",
    "too many clients": "close other connections, or raise max_connections",
    "connection slots": "close other connections, or raise max_connections",
    "deadlock": "wait: it will be tried again",
    "could not serialize": "wait: it will be tried again",
    "has not answered": "check that the server runs",
    "malformed": "it is damaged: restore it from a copy",
    "connect": "check that the server runs and accepts your login",
    "terminat": "check that the server runs",
    "starting up": "wait until the server is ready",
    "shutting down": "wait until the server is ready",
}


def remedy(said: str) -> str:
    """Return the remedy for an error message of a database."""
    return next((text for words, text in REMEDIES.items() if words in said.lower()), "check the URL of the store")


def is_outage(error: sa.exc.DBAPIError) -> bool:
    """Return whether an error may be temporary: the database is unavailable or locked, or two transactions conflicted.

    This is used for calls after the start. Any error at the start is reported to the user.
    """
    if isinstance(error.orig, sqlite3.Error):
        return any(words in str(error.orig) for words in LOCKED)
    state = sqlstate(error)
    # An OperationalError without a code means that the server has not answered.
    passes = isinstance(error, sa.exc.OperationalError) if state is None else state.startswith(PASSING)
    return error.connection_invalidated or passes


def sqlstate(error: sa.exc.DBAPIError) -> str | None:
    """Return PostgreSQL's SQLSTATE code of an error; None if it has none."""
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)


def make_engine(url: str, *, read_only: bool = False) -> sa.Engine:
    """Return the engine for the database at `url`. If `read_only`, the database must exist.

    Raises StoreError with cause and remedy if it cannot be opened.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() == "sqlite":
        return _reading_engine(parsed) if read_only else _sqlite_engine(parsed)
    return _postgresql_engine(parsed, {"postgresql_readonly": True, SECONDS: READ_SECONDS} if read_only else {})


def _parsed(url: str) -> sa.URL:
    """Return the parsed URL. Raises StoreError if it is not the URL of a supported database."""
    try:
        parsed = sa.make_url(url)
        if parsed.get_backend_name() == "sqlite" and (parsed.host or parsed.username):
            raise ValueError(parsed.host)  # sqlite://FILE
    except (sa.exc.ArgumentError, ValueError):  # ValueError: a port that is not a number
        raise StoreError(
            f"store: {mask(url)!r} is not a database URL; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from None
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in DRIVERS:
        raise StoreError(
            f"store: {parsed.drivername!r} stores are not supported; write sqlite:///FILE or "
            "postgresql://USER@HOST/NAME"
        )
    return parsed


def _postgresql_engine(url: sa.URL, options: dict[str, object]) -> sa.Engine:
    arguments = {name: value for name, value in POSTGRESQL.items() if name not in url.query}
    options = {SECONDS: STATEMENT_SECONDS, **options}
    try:
        engine = sa.create_engine(url, hide_parameters=True, connect_args=arguments, execution_options=options)
    except ModuleNotFoundError:
        raise StoreError('PostgreSQL needs its driver; in the checkout: pip install -e ".[postgres]"') from None
    _Watch(engine)
    return engine


def allow(connection: sa.Connection, seconds: float) -> None:
    """Set the time limit of each statement in this transaction, in seconds. For SQLite this does nothing."""
    if connection.dialect.name == "postgresql":
        connection.execution_options(**{SECONDS: seconds})
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {int(1000 * seconds)}")


class _Watch:
    """Limits the time of each request to a PostgreSQL server.

    Usually the server cancels a statement that takes too long or waits for a lock too long. A server that hangs cannot
    do this, and the drivers have no timeout, so a thread closes the connection. Pooled connections are tested before
    they are used.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        #: by connection in use: the time at which it will be closed, and the allowed seconds of its request
        self._due: dict[Any, tuple[float, float]] = {}
        self._lock, self._has_thread = threading.Lock(), False
        #: by connection that was closed: the allowed seconds of its request
        self._cut: dict[Any, float] = {}
        # This listener is inserted at the front, so that it is called before the dialect's own first statements.
        sa.event.listen(engine, "connect", self._on_connect, insert=True)
        sa.event.listen(engine, "checkout", self._on_checkout)
        sa.event.listen(engine, "checkin", lambda dbapi, _: self._disarm(dbapi))
        sa.event.listen(engine, "close", lambda dbapi, _: self._forget(dbapi))
        sa.event.listen(engine, "before_cursor_execute", self._before)
        sa.event.listen(engine, "after_cursor_execute", self._after)
        sa.event.listen(engine, "handle_error", self._on_error)

    def _on_connect(self, dbapi: Any, _: object) -> None:
        self._arm(dbapi, DATABASE_CONNECT_SECONDS)
        seconds = {
            "statement_timeout": self._engine.get_execution_options()[SECONDS],
            "lock_timeout": LOCK_WAIT_SECONDS,
            "idle_in_transaction_session_timeout": IDLE_SECONDS,
        }
        # The limits are set by statements, because connection poolers refuse `options`. Limits in the URL's `options`
        # have priority.
        told = str(self._engine.url.query.get("options", ""))
        limits = [f"SET {name} = {int(1000 * value)}" for name, value in seconds.items() if name not in told]
        with closing(dbapi.cursor()) as cursor:
            cursor.execute("; ".join(limits) or "SELECT 1")
        dbapi.commit()

    def _on_checkout(self, dbapi: Any, *_: object) -> None:
        self._arm(dbapi, DATABASE_CONNECT_SECONDS)
        try:
            self._engine.dialect.do_ping(dbapi)
        except self._engine.dialect.loaded_dbapi.Error:
            # The pool then creates another connection.
            raise sa.exc.DisconnectionError from None
        self._disarm(dbapi)

    def _before(self, connection: sa.Connection, *_: object) -> None:
        self._arm(_dbapi(connection), connection.get_execution_options()[SECONDS] + GRACE_SECONDS)

    def _after(self, connection: sa.Connection, *_: object) -> None:
        # This is the limit for the commit, if no other statement follows.
        self._arm(_dbapi(connection), STATEMENT_SECONDS + GRACE_SECONDS)

    def _on_error(self, context: sa.ExceptionContext) -> None:
        if context.connection is None or not isinstance(context.sqlalchemy_exception, sa.exc.DBAPIError):
            return
        # An invalidated connection no longer has a driver connection.
        dbapi = None if context.connection.invalidated else _dbapi(context.connection)
        if (allowed := self._cut.pop(dbapi, None)) is not None:
            context.sqlalchemy_exception.add_detail(f"the server has not answered for {allowed:.0f} s")

    def _arm(self, dbapi: Any, seconds: float) -> None:
        """Let a connection be closed after this number of seconds, unless it is disarmed or armed again before."""
        with self._lock:
            self._due[dbapi] = time.monotonic() + seconds, seconds
            # If no thread can be started, statements have no limit until the next call.
            with suppress(NoThread):
                if not self._has_thread:
                    start_thread(threading.Thread(target=self._run, name="shadho-store", daemon=True))
                    self._has_thread = True

    def _disarm(self, dbapi: Any) -> None:
        with self._lock:
            self._due.pop(dbapi, None)

    def _forget(self, dbapi: Any) -> None:
        self._disarm(dbapi)
        self._cut.pop(dbapi, None)

    def _run(self) -> None:
        """Close connections whose time is over. End when no connection is in use."""
        is_over = False
        while not is_over:
            time.sleep(TICK_SECONDS)
            with self._lock:
                for dbapi in [dbapi for dbapi, (due, _) in self._due.items() if due <= time.monotonic()]:
                    self._cut[dbapi] = self._due.pop(dbapi)[1]
                    closed = OSError, self._engine.dialect.loaded_dbapi.Error
                    with suppress(*closed), socket.socket(fileno=os.dup(dbapi.fileno())) as copy:
                        copy.shutdown(socket.SHUT_RDWR)
                is_over = not self._due
                self._has_thread = not is_over


def _dbapi(connection: sa.Connection) -> Any:
    return connection.connection.dbapi_connection


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    if (path := file_of(url)) is None:
        # Only one connection is used, by one thread at a time, because each further connection would have another,
        # empty database.
        arguments = {"check_same_thread": False}
        return sa.create_engine(
            "sqlite://", poolclass=sa.QueuePool, pool_size=1, max_overflow=0, connect_args=arguments
        )
    _refuse_network(path)
    try:
        opened = _create(path)
    except OSError as error:
        raise StoreError(f"the store {path} cannot be opened: {error.strerror}; check its name (store)") from None
    _refuse_pipes(path)

    def check_file(_: sa.Connection) -> None:
        # SQLite would not notice that the file was deleted, and would continue to write to it.
        try:
            now = path.stat()
        except FileNotFoundError:
            raise StoreError(f"the store {path} was moved or deleted; put it back, and resume the study") from None
        if not os.path.samestat(now, opened):
            raise StoreError(f"the store {path} was replaced by another file; put it back, and resume the study")

    engine = sa.create_engine(url, connect_args={"timeout": LOCKED_SECONDS}, hide_parameters=True)
    sa.event.listen(engine, "connect", _set_up_sqlite)
    sa.event.listen(engine, "begin", check_file)
    return engine


def _refuse_network(path: Path) -> None:
    if (kind := file_system(path)) in NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"{path} lies on a network file system ({kind}) where SQLite loses data; give a store on another disk"
        )


def commit_seconds(url: str) -> float:
    """Return the median seconds of a small commit to the database at `url`.

    The store is not changed: for SQLite, a temporary file beside the store is written; for PostgreSQL, a temporary
    table. Raises StoreError if this fails.
    """
    took = []
    if _parsed(url).get_backend_name() == "sqlite":
        path = _file_to_read(_parsed(url))
        _refuse_network(path)
        try:
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, "it is not writable")
            with tempfile.TemporaryFile(dir=path.parent) as file:
                for _ in range(COMMITS):
                    os.write(file.fileno(), bytes(PAGE_BYTES))
                    took.append(_timed(partial(os.fsync, file.fileno())))
        except OSError as error:
            said = error.strerror or str(error)
            raise StoreError(f"the store {path} cannot be written: {said}; {remedy(said)}") from error
        return median(took)
    engine = make_engine(url)
    try:
        for _ in range(COMMITS):
            with engine.connect() as connection:
                connection.exec_driver_sql("CREATE TEMPORARY TABLE shadho_doctor (x int) ON COMMIT DROP")
                took.append(_timed(connection.commit))
    except sa.exc.DBAPIError as error:
        said = one_line(error.orig)
        raise StoreError(f"the store {mask(url)} cannot be written: {said}; {remedy(said)}") from error
    finally:
        engine.dispose()
    return median(took)


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _reading_engine(url: sa.URL) -> sa.Engine:
    """Return the engine for an SQLite file that is only read."""
    path = _file_to_read(url)
    if not path.is_file():
        raise StoreError(f"there is no store {path}; check its name (store), and the folder you are in")
    _refuse_pipes(path)
    creator = partial(_connect_to_read, path)
    return sa.create_engine("sqlite://", creator=creator, poolclass=sa.NullPool, hide_parameters=True)


def missing_file(url: str) -> Path | None:
    """Return the path of the file of an SQLite store that does not exist; None for any other store.

    Raises StoreError for an invalid URL.
    """
    path = file_of(_parsed(url))
    return None if path is None or path.exists() else path


def _file_to_read(url: sa.URL) -> Path:
    if (path := file_of(url)) is None:
        raise StoreError("a store in memory ends with the program that created it; give the URL of a database")
    return path


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Return a read-only connection to a file, even if its folder is not writable."""
    connect = partial(sqlite3.connect, uri=True, timeout=LOCKED_SECONDS, check_same_thread=False)
    connection = connect(f"{path.as_uri()}?mode=ro")
    try:
        connection.execute("SELECT name FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        journal = path.with_name(f"{path.name}-wal")
        if journal.exists() and journal.stat().st_size:
            raise
        # In a read-only folder, SQLite cannot create the index file of the journal. Without a journal there is no
        # writer, so the file can be read as immutable.
        connection = connect(f"{path.as_uri()}?immutable=1")
    _distrust(connection)
    return connection


def _refuse_pipes(path: Path) -> None:
    """Raise StoreError if the database, or a journal beside it, is not a regular file.

    SQLite would wait forever for a named pipe.
    """
    for each in (path, *(path.with_name(f"{path.name}{ending}") for ending in JOURNALS)):
        try:
            mode = each.stat().st_mode
        except OSError:
            # The file does not exist, or SQLite will say why it cannot be opened. A journal may be deleted at any time.
            continue
        if not stat.S_ISREG(mode):
            raise StoreError(f"{each} is not a file, and SQLite would open it; remove it, or use another store")


def file_of(url: sa.URL) -> Path | None:
    """Return the absolute path of the file of an SQLite store; None for a store on a server or in memory."""
    is_file = url.get_backend_name() == "sqlite" and url.database not in {None, "", ":memory:"}
    return Path(str(url.database).removeprefix("file:")).absolute() if is_file else None


def is_in_memory(url: str) -> bool:
    """Return whether a store is in the memory of this process."""
    parsed = _parsed(url)
    return parsed.get_backend_name() == "sqlite" and file_of(parsed) is None


def folder_of(url: str) -> Path | None:
    """Return the folder with the file of a store; None for a store on a server or in memory."""
    path = file_of(_parsed(url))
    return None if path is None else path.parent


def _create(path: Path) -> os.stat_result:
    """Create a file that only its owner can read, unless it exists. Return its status, which identifies the file."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        return os.fstat(file.fileno())


def _distrust(connection: sqlite3.Connection) -> None:
    # With this setting, views and triggers in a file can only call harmless functions of SQLite.
    connection.execute("PRAGMA trusted_schema = OFF")
    # Bytes that are not UTF-8 must not raise an exception while rows are fetched, because only a later check can name
    # the row.
    connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")


def _set_up_sqlite(connection: sqlite3.Connection, _: object) -> None:
    _distrust(connection)
    # With WAL, other processes can read while the scheduler writes. With NORMAL, only checkpoints of the journal are
    # synced, not each commit. So commits are fast, but a power failure may lose the last ones.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system of `path`; "" if it is not known."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    kinds = {place.replace("\\040", " ").rstrip("/") + "/": kind for _, place, kind, *_ in map(str.split, lines)}
    target = os.path.realpath(path) + "/"
    return kinds.get(max((place for place in kinds if target.startswith(place)), key=len, default=""), "")
