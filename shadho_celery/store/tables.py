"""The tables of the store: eight that a person can query, and one for its version.

The columns of `trials` are the facts of `core.columns`, and those of most other tables the fields of records. A change
number tells a reader of `trials` and `attempts` which rows are new: each transaction that writes such rows gives them
the next number of its study.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, get_type_hints

import sqlalchemy as sa
from msgspec import inspect

from shadho_celery.core.actions import Action
from shadho_celery.core.columns import FACTS, HINTS
from shadho_celery.core.records import AttemptRecord, MachineRecord, SessionRecord
from shadho_celery.core.trial import Report
from shadho_celery.store.base import StudyRecord

#: numbers by which SQLite marks a column that is computed when it is read or written
_GENERATED = {2, 3}

#: version of these tables; it changes when a column or table is removed, or older rows lack what readers need, but not
#: when another column or table is added
VERSION = 2

#: type of JSON columns; not PostgreSQL's JSONB, which reorders keys, converts 1e22 to an int and refuses NUL characters
json = sa.JSON(none_as_null=True)
schema = sa.MetaData()

#: types of the columns for fields of records; anything else is JSON
_OF_RECORDS: dict[type, Any] = {
    inspect.FloatType: sa.Float,
    inspect.BoolType: sa.Boolean,
    inspect.BytesType: sa.LargeBinary,
    inspect.EnumType: sa.String(16),
}


def _columns(hints: Mapping[str, Any], *keys: str, optional: Collection[str] = ()) -> Iterator[sa.Column[Any]]:
    """Yield a column for each fact, by the types of the facts.

    `keys` are the facts that identify a row. Facts of optional types may be null, and those that `optional` names.
    """
    for name, hint in hints.items():
        found = inspect.type_info(hint)
        of_value, is_optional = found, name in optional
        if isinstance(found, inspect.UnionType):
            of_value, is_optional = found.types[0], found.includes_none
        # A float without bounds may be NaN, which SQLite stores as null.
        is_optional |= isinstance(of_value, inspect.FloatType) and of_value.le is None
        is_key = name in keys
        yield sa.Column(name, _sql_type(of_value), primary_key=is_key, autoincrement=False, nullable=is_optional)


def _fields(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a record."""
    return get_type_hints(kind, include_extras=True)


def _sql_type(found: inspect.Type) -> Any:
    if isinstance(found, inspect.StrType):
        return sa.Text if found.max_length is None else sa.String(found.max_length)
    if isinstance(found, inspect.IntType):
        return sa.Integer if found.le is not None and found.le < 2**31 else sa.BigInteger
    return _OF_RECORDS.get(type(found), json)


def _of_study(name: str, kind: type, *keys: str, **options: Any) -> sa.Table:
    """Return the table of the records of this kind that belong to a study."""
    return sa.Table(name, schema, _study(), *_columns(_fields(kind), *keys), **options)


def _study() -> sa.Column[Any]:
    return sa.Column("study", sa.Text, sa.ForeignKey("studies.key"), primary_key=True)


studies = sa.Table(
    "studies",
    schema,
    *_columns(_fields(StudyRecord), "key"),
    #: change number of its latest transaction; null before the first
    sa.Column("change", sa.BigInteger),
    sa.Column("holder", sa.String(255)),
    sa.Column("lock_expires", sa.Float),
    sa.Column("fence", sa.BigInteger, nullable=False, default=0),
    sa.UniqueConstraint("name"),
    sa.Index("ix_studies_module", "module"),
)

trials = sa.Table(
    "trials",
    schema,
    _study(),
    # Null stands for no losses and no constraints.
    *_columns({name: HINTS[name] for name in FACTS}, "number", optional=["losses", "constraints"]),
    sa.Column("change", sa.BigInteger),
    sa.Index("trials_by_change", "study", "change"),
)

#: every attempt of every trial; null stands for what is not known, or not yet
attempts = sa.Table(
    "attempts",
    schema,
    _study(),
    *_columns(_fields(AttemptRecord), "number", "attempt"),
    sa.Column("change", sa.BigInteger),
    sa.Index("attempts_by_change", "study", "change"),
    # Rows in the order of their keys need no index beside them, which would repeat the study's key.
    sqlite_with_rowid=False,
)

#: times in which workers could run a study's trials, and the machines of these workers
sessions = _of_study("sessions", SessionRecord, "worker", "since")
machines = _of_study("machines", MachineRecord, "host")
reports = _of_study("reports", Report, "number", "attempt", "step")

#: trials of earlier studies from which a study learns, in the order of their places; they are not part of the study
warm_starts = sa.Table(
    "warm_starts",
    schema,
    _study(),
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
    _study(),
    *_columns({name: hint for name, hint in _fields(Action).items() if name != "answer"}, "id"),
    sa.Column("is_done", sa.Boolean, nullable=False),
    sa.Column("answer", sa.Text, nullable=False),
)

#: VERSION of the program that created the tables: one row
schema_version = sa.Table("schema_version", schema, sa.Column("version", sa.Integer, primary_key=True))


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
