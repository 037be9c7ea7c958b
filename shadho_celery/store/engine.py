"""Engine of the store's database: SQLite or PostgreSQL, by URL."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from shadho_celery.core.checks import mask
from shadho_celery.errors import StoreError

#: file systems on which SQLite's locks and shared memory do not work between machines
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "pvfs2", "orangefs"}
)

#: kinds of database that the tests cover, by SQLAlchemy's names
DRIVERS = frozenset({"sqlite", "sqlite+pysqlite", "postgresql+psycopg", "postgresql+psycopg2"})

#: seconds that another program may keep an SQLite file locked
LOCKED_SECONDS = 30.0

#: options that notice a lost server within half a minute; those in the URL come first
POSTGRESQL = {"connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "tcp_user_timeout": 30_000}

#: remedies by words in a database's error message
REMEDIES = {
    "locked": "another program keeps it locked: close that one",
    "full": "make room on its disk",
    "disk i/o error": "make room on its disk, and see that it is in order",
    "readonly": "make the file and its folder writable",
    "malformed": "it is damaged: restore it from a copy",
    "connect": "see that the server runs and lets you in",
    "terminat": "see that the server runs",
    "starting up": "wait until the server is ready",
    "shutting down": "wait until the server is ready",
}


def remedy(said: str) -> str:
    """Return the remedy for an error message of a database."""
    return next((text for words, text in REMEDIES.items() if words in said.lower()), "check --store")


def is_outage(error: sa.exc.DBAPIError) -> bool:
    """Return True if a server is away, restarts or has cut the connection; an error of SQLite's never is one."""
    if isinstance(error.orig, sqlite3.Error):
        return False
    state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
    # Without a state the server has not answered. 08: connection exception, 57P: shutdown, crash, starting up.
    is_away = state is None or state.startswith(("08", "57P"))
    return error.connection_invalidated or (is_away and isinstance(error, sa.exc.OperationalError))


def make_engine(url: str, *, read_only: bool = False) -> sa.Engine:
    """Return the engine of the database at `url`, which must exist to be read only.

    Raises StoreError, naming cause and remedy.
    """
    try:
        parsed = sa.make_url(url)
        if parsed.get_backend_name() == "sqlite" and (parsed.host or parsed.username):
            raise ValueError(parsed.host)  # sqlite://FILE
    except (sa.exc.ArgumentError, ValueError):  # ValueError: a port that is no number
        raise StoreError(
            f"{mask(url)!r} is no database URL; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from None
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in DRIVERS:
        raise StoreError(
            f"no store of the kind {parsed.drivername!r}; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        )
    if parsed.get_backend_name() == "sqlite":
        return _reading_engine(parsed) if read_only else _sqlite_engine(parsed)
    arguments = {name: value for name, value in POSTGRESQL.items() if name not in parsed.query}
    try:
        options = {"postgresql_readonly": True} if read_only else {}
        return sa.create_engine(
            parsed, pool_pre_ping=True, hide_parameters=True, connect_args=arguments, execution_options=options
        )
    except ModuleNotFoundError:
        raise StoreError('PostgreSQL needs its driver: pip install "shadho_celery[postgres]"') from None


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    if url.database in {None, "", ":memory:"}:
        # One connection for all threads: every further one would have an empty database of its own.
        return sa.create_engine("sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
    path = file_of(url)
    kind = file_system(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"{path} lies on a network file system ({kind}) where SQLite loses data; give --store another URL"
        )
    try:
        opened = _create(path)
    except OSError as error:
        raise StoreError(f"the store {path} cannot be opened: {error.strerror}; check --store") from None

    def check_file(connection: sa.Connection) -> None:
        # SQLite would go on writing into a file that has no name any more.
        try:
            now = path.stat()
        except FileNotFoundError:
            raise StoreError(
                f"the store {path} was moved or deleted; {_rescue(connection, path)}, and carry on with --resume"
            ) from None
        if not os.path.samestat(now, opened):
            raise StoreError(f"the store {path} was replaced by another file; put it back, and carry on with --resume")

    engine = sa.create_engine(url, connect_args={"timeout": LOCKED_SECONDS}, hide_parameters=True)
    sa.event.listen(engine, "connect", _set_up_sqlite)
    sa.event.listen(engine, "begin", check_file)
    return engine


def _reading_engine(url: sa.URL) -> sa.Engine:
    """Return the engine of an SQLite file that is never changed."""
    if url.database in {None, "", ":memory:"}:
        raise StoreError("a store in memory ends with the program that made it; give the URL of a database")
    path = file_of(url)
    if not path.is_file():
        raise StoreError(f"there is no store {path}; check --store, and the folder you are in")
    creator = partial(_connect_to_read, path)
    return sa.create_engine("sqlite://", creator=creator, poolclass=sa.NullPool, hide_parameters=True)


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Connect to a file that this process may not even be able to write to."""
    connect = partial(sqlite3.connect, uri=True, timeout=LOCKED_SECONDS, check_same_thread=False)
    connection = connect(f"{path.as_uri()}?mode=ro")
    try:
        connection.execute("SELECT name FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        journal = path.with_name(f"{path.name}-wal")
        if journal.exists() and journal.stat().st_size:
            raise
        # Without a journal nobody writes, and a folder that cannot be written has no place for an index of it.
        connection = connect(f"{path.as_uri()}?immutable=1")
    _read_any_text(connection)
    return connection


def file_of(url: sa.URL) -> Path:
    """Return the file of an SQLite URL."""
    return Path(str(url.database).removeprefix("file:")).absolute()


def copy_file(connection: sa.Connection, path: Path) -> None:
    """Copy an SQLite database to a new file. Raises OSError or sqlite3.Error."""
    _create(path)
    with closing(sqlite3.connect(path)) as copy:
        connection.connection.driver_connection.backup(copy)  # type: ignore[union-attr]


def _create(path: Path) -> os.stat_result:
    """Open a file, which from its creation on only its owner can read; return its identity."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        return os.fstat(file.fileno())


def _rescue(connection: sa.Connection, path: Path) -> str:
    """Copy the content of a deleted file to a new one beside it; return the remedy."""
    rescued = path.with_name(f"{path.name}.rescued")
    try:
        copy_file(connection, rescued)
    except (OSError, sqlite3.Error):
        return "put it back"
    return f"put it back, or put {rescued.name}, which has all its contents, in its place"


def _read_any_text(connection: sqlite3.Connection) -> None:
    # Bytes that are no text must not end the reading of a table before the row that has them is known.
    connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")


def _set_up_sqlite(connection: sqlite3.Connection, _: object) -> None:
    _read_any_text(connection)
    # WAL lets others read while the scheduler writes. NORMAL syncs at checkpoints: enough if a process dies.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the kind of file system of `path`; "" if the system does not tell it."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    kinds = {place.replace("\\040", " ").rstrip("/") + "/": kind for _, place, kind, *_ in map(str.split, lines)}
    target = os.path.realpath(path) + "/"
    return kinds.get(max((place for place in kinds if target.startswith(place)), key=len, default=""), "")
