"""The tables of the store: eight that a person can query, one for its version, and one for rows moved by a repair.

The columns of `trials` are the facts of `core.columns`, and those of `attempts`, `sessions` and `machines` the fields
of `core.records`. A change number tells a reader of `trials` and `attempts` which rows are new: each transaction that
writes such rows gives them the next number of its study.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import sqlalchemy as sa

from shadho_celery.core.columns import FACTS, Sql

#: numbers by which SQLite marks a column that is computed when it is read or written
_GENERATED = {2, 3}

#: version of these tables; it changes when a column or table is removed, or older rows lack what readers need, but not
#: when another column or table is added
VERSION = 2

#: type of JSON columns; not PostgreSQL's JSONB, which reorders keys, converts 1e22 to an int and refuses NUL characters
json = sa.JSON()
schema = sa.MetaData()

_TYPES = {"integer": sa.Integer, "biginteger": sa.BigInteger, "float": sa.Float, "boolean": sa.Boolean}


def _column(name: str, sql: Sql) -> sa.Column[Any]:
    """Return the column for one fact of a trial."""
    kind: Any = _TYPES.get(sql.kind)
    if sql.kind == "json":
        kind = json if sql.is_needed else sa.JSON(none_as_null=True)
    elif sql.kind == "text":
        kind = sa.Text if sql.length is None else sa.String(sql.length)
    is_key = name == "number"
    return sa.Column(name, kind, primary_key=is_key, autoincrement=False, nullable=not sql.is_needed)


studies = sa.Table(
    "studies",
    schema,
    sa.Column("key", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(255), nullable=False, unique=True),
    sa.Column("module", sa.String(255), nullable=False, index=True),
    sa.Column("seed", sa.BigInteger, nullable=False),
    #: label -> its domain and condition, to detect a space that has changed
    sa.Column("space", json, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    #: options that the study's command lines have given so far
    sa.Column("settings", json),
    #: sampler, policy, shares and objectives of the latest run, given ones or defaults
    sa.Column("in_force", sa.JSON(none_as_null=True)),
    #: by subspace: which sampler `auto` chose last, and why
    sa.Column("choices", sa.JSON(none_as_null=True)),
    #: decade of the seconds of its first trials, by which `auto` divides proposals; null until they have ended
    sa.Column("decade", sa.Float),
    #: its latest plan, if it is placed by money
    sa.Column("money_plan", sa.JSON(none_as_null=True)),
    #: the labels of the space in machine-readable form, by `space.stored`
    sa.Column("tree", sa.JSON(none_as_null=True)),
    #: names of the compute classes that its attempts could go to, in the order of `attempts.placed`
    sa.Column("classes", sa.JSON(none_as_null=True)),
    #: change number of its latest transaction; null before the first
    sa.Column("change", sa.BigInteger),
    sa.Column("holder", sa.String(255)),
    sa.Column("lock_expires", sa.Float),
    sa.Column("fence", sa.BigInteger, nullable=False, default=0),
)

trials = sa.Table(
    "trials",
    schema,
    sa.Column("study", sa.String(32), sa.ForeignKey("studies.key"), primary_key=True),
    *(_column(name, fact.sql) for name, fact in FACTS.items()),
    sa.Column("change", sa.BigInteger),
    sa.Index("trials_by_change", "study", "change"),
)

#: every attempt of every trial; null stands for what is not known, or not yet
attempts = sa.Table(
    "attempts",
    schema,
    sa.Column("study", sa.String(32), sa.ForeignKey("studies.key"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("compute_class", sa.String(255)),
    sa.Column("host", sa.String(255)),
    sa.Column("worker", sa.String(255)),
    sa.Column("slot", sa.Integer),
    sa.Column("queued_at", sa.Float),
    sa.Column("started_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("end", sa.String(16)),
    sa.Column("copy", sa.Boolean),
    #: three 32-bit numbers for each class of `studies.classes`, as `core.records.pack` writes them
    sa.Column("placed", sa.LargeBinary),
    #: money an hour, for all slots of the attempt
    sa.Column("price", sa.Float),
    sa.Column("change", sa.BigInteger),
    sa.Index("attempts_by_change", "study", "change"),
    # Rows in the order of their keys need no index beside them, which would repeat the study's key.
    sqlite_with_rowid=False,
)

#: times in which workers could run a study's trials
sessions = sa.Table(
    "sessions",
    schema,
    sa.Column("study", sa.String(32), sa.ForeignKey("studies.key"), primary_key=True),
    sa.Column("worker", sa.String(255), primary_key=True),
    sa.Column("since", sa.Float, primary_key=True),
    sa.Column("compute_class", sa.String(255), nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("slots", sa.Integer, nullable=False),
    #: null while it lasts
    sa.Column("until", sa.Float),
    sa.Column("reason", sa.String(16)),
    #: money an hour, for each slot
    sa.Column("price", sa.Float),
    #: pairs of a time and a number of slots
    sa.Column("others", json),
)

#: machines of these workers
machines = sa.Table(
    "machines",
    schema,
    sa.Column("study", sa.String(32), sa.ForeignKey("studies.key"), primary_key=True),
    sa.Column("host", sa.String(255), primary_key=True),
    #: a list with name and bytes of memory of each GPU
    sa.Column("gpus", json, nullable=False),
    sa.Column("cores", sa.Integer, nullable=False),
    #: bytes of RAM
    sa.Column("memory", sa.BigInteger, nullable=False),
    #: versions of shadho_celery and Python by name
    sa.Column("versions", json, nullable=False),
)

reports = sa.Table(
    "reports",
    schema,
    sa.Column("study", sa.String(32), sa.ForeignKey("studies.key"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    #: null for NaN, which SQLite cannot store
    sa.Column("loss", sa.Float),
    sa.Column("at", sa.Float, nullable=False),
)

#: trials of earlier studies from which a study learns, in the order of their places; they are not part of the study
warm_starts = sa.Table(
    "warm_starts",
    schema,
    sa.Column("study", sa.String(32), sa.ForeignKey("studies.key"), primary_key=True),
    sa.Column("place", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("subspace", sa.Text, nullable=False),
    sa.Column("params", json, nullable=False),
    sa.Column("loss", sa.Float, nullable=False),
    #: as in `trials`
    sa.Column("losses", sa.JSON(none_as_null=True)),
    sa.Column("constraints", sa.JSON(none_as_null=True)),
)

#: requests to running studies, and the answers to them
actions = sa.Table(
    "actions",
    schema,
    sa.Column("study", sa.String(32), sa.ForeignKey("studies.key"), primary_key=True),
    sa.Column("id", sa.String(255), primary_key=True),
    #: seconds since the epoch
    sa.Column("at", sa.Float, nullable=False),
    #: user and host
    sa.Column("by", sa.String(255), nullable=False),
    sa.Column("action", sa.String(255), nullable=False),
    sa.Column("arguments", json, nullable=False),
    sa.Column("is_done", sa.Boolean, nullable=False),
    sa.Column("answer", sa.Text, nullable=False),
    #: fencing number of the scheduler that was asked
    sa.Column("fence", sa.BigInteger),
)

#: VERSION of the program that created the tables: one row
schema_version = sa.Table("schema_version", schema, sa.Column("version", sa.Integer, primary_key=True))

#: trials that could not be read, which a repair has moved here, and a row for each missing trial
unreadable = sa.Table(
    "unreadable",
    schema,
    sa.Column("study", sa.String(32), nullable=False, index=True),
    #: as text, because the number itself may be unreadable
    sa.Column("number", sa.Text, nullable=False),
    sa.Column("problem", sa.Text, nullable=False),
    #: all columns of the row; null for a missing trial
    sa.Column("row", json),
    #: seconds since the epoch
    sa.Column("at", sa.Float, nullable=False),
)


def damage(engine: sa.Engine, *, is_written: bool) -> str | None:
    """Return the reason why the store cannot be used, with its remedy, or None if it can be used.

    The store may be of another version or lack a table, or its file may contain SQL of its own, which might never end.
    """
    needed = (studies, trials, reports)
    found = set(sa.inspect(engine).get_table_names())
    with engine.connect() as connection:
        foreign = _foreign(connection, found, is_written=is_written) if engine.dialect.name == "sqlite" else None
        if foreign is not None:
            return f"it has {foreign}, which this package never creates; remove that, or restore the store from a copy"
        has_versions = schema_version.name in found
        versions = connection.scalars(sa.select(schema_version.c.version)).all() if has_versions else []
        kept = (connection.execute(sa.select(t.c[0]).limit(1)).first() for t in needed if t.name in found)
        has_content = bool(versions) or any(kept)
    if has_content and not versions:
        return "an earlier version, or another program, has written it; give --store another URL"
    if any(version != VERSION for version in versions):
        return f"its tables are of version {max(versions)}, not {VERSION}; install the shadho_celery that wrote it"
    # Listed again, because another process may have created tables meanwhile.
    missing = schema.tables.keys() - set(sa.inspect(engine).get_table_names())
    if has_content and missing:
        return f"it has lost its table {', '.join(sorted(missing))}; restore it from a copy, or use another store"
    return None


def _foreign(connection: sa.Connection, found: AbstractSet[str], *, is_written: bool) -> str | None:
    """Return a virtual table, generated column or trigger in an SQLite file, as words for a message, or None.

    SQLite would run its SQL when the store is read or written. Triggers matter only if the store is written.
    """
    kinds = {str(row[1]): row[2] for row in connection.exec_driver_sql("PRAGMA table_list")}
    for name in found & schema.tables.keys():
        # SQLite before version 3.37 does not list the kinds of tables.
        if kinds.get(name) == "virtual":
            return f"the virtual table {name}"
        columns = connection.exec_driver_sql(f"PRAGMA table_xinfo({name})").all()
        if computed := [row[1] for row in columns if row[-1] in _GENERATED]:
            return f"the generated column {name}.{computed[0]}"
    triggers = connection.exec_driver_sql("SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger'").all()
    own = [name for name, table in triggers if str(table).lower() in schema.tables]
    return f"the trigger {own[0]}" if own and is_written else None


def note_version(engine: sa.Engine) -> None:
    """Write the version of the tables, unless it is already recorded."""
    with engine.connect() as connection:
        if connection.execute(sa.select(schema_version)).first() is not None:
            return
    with engine.begin() as connection:
        connection.execute(sa.insert(schema_version).values(version=VERSION))
