"""The tables of the store, and the conversion between records and rows. Rows are checked when they are read.

There are eight tables that a person can query, and one for the version. The columns of `trials` are the facts of
`core.columns`; most other tables have the fields of a record as columns. A reader of `trials` and `attempts` finds the
rows that are new or have changed by their change number: each transaction that writes such rows gives them the next
change number of its study.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from functools import partial
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
import sqlalchemy as sa
from msgspec import inspect
from msgspec.structs import asdict, replace

from shadho_celery.core.checks import is_shallow, one_line
from shadho_celery.core.columns import FACTS, HINTS, KEPT, Summary
from shadho_celery.core.records import Action, AttemptRecord, MachineRecord, SessionRecord
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import MAX_LEVELS, NO_OUTCOME, POINT, Finite, Outcome, Report, Trial, TrialState
from shadho_celery.store.base import StudyRecord

#: numbers by which SQLite marks generated columns, which are computed when they are read or written
_GENERATED = {2, 3}

#: version of these tables. It changes if a column or table is removed, or if older rows lack facts that readers need,
#: but not if a column or table is added
VERSION = 2

#: type of JSON columns. PostgreSQL's JSONB is not used, because it reorders keys, converts 1e22 to an int and refuses
#: NUL characters
json_value = sa.JSON(none_as_null=True)
schema = sa.MetaData()

#: by type of a record's field: type of its column. Fields of other types are stored as JSON
_OF_RECORDS: dict[type, Any] = {
    inspect.FloatType: sa.Float,
    inspect.BoolType: sa.Boolean,
    inspect.BytesType: sa.LargeBinary,
    inspect.EnumType: sa.String(16),
}


def _columns(hints: Mapping[str, Any], *keys: str, optional: Collection[str] = ()) -> Iterator[sa.Column[Any]]:
    """Yield a column for each fact. `hints` has the types of the facts by name.

    `keys` are the facts that identify a row. A column may be null if the type of the fact is optional, or if `optional`
    names the fact.
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
    return _OF_RECORDS.get(type(found), json_value)


def _of_study(name: str, kind: type, *keys: str, **options: Any) -> sa.Table:
    """Return a table for records of this kind, each of which belongs to a study."""
    return sa.Table(name, schema, _study(), *_columns(_fields(kind), *keys), **options)


def _study() -> sa.Column[Any]:
    return sa.Column("study", sa.Text, sa.ForeignKey("studies.key"), primary_key=True)


studies = sa.Table(
    "studies",
    schema,
    *_columns(_fields(StudyRecord), "key"),
    #: change number of its latest transaction; null before the first one
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
    # Null means that a trial has no losses by name, or no constraints.
    *_columns({name: HINTS[name] for name in FACTS}, "number", optional=["losses", "constraints"]),
    sa.Column("change", sa.BigInteger),
    sa.Index("trials_by_change", "study", "change"),
)

#: all attempts of all trials; null means that a fact is not known, or not known yet
attempts = sa.Table(
    "attempts",
    schema,
    _study(),
    *_columns(_fields(AttemptRecord), "number", "attempt"),
    sa.Column("change", sa.BigInteger),
    sa.Index("attempts_by_change", "study", "change"),
    # Rows are stored in the order of their primary keys, because a separate index would repeat the key of the study.
    sqlite_with_rowid=False,
)

#: periods in which workers could run a study's trials; and the machines of these workers
sessions = _of_study("sessions", SessionRecord, "worker", "since")
machines = _of_study("machines", MachineRecord, "host")
reports = _of_study("reports", Report, "number", "attempt", "step")

#: trials of earlier studies from which a study learns, by their place in a list. They are not trials of the study
warm_starts = sa.Table(
    "warm_starts",
    schema,
    _study(),
    sa.Column("place", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("subspace", sa.Text, nullable=False),
    sa.Column("params", json_value, nullable=False),
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

#: one row with the VERSION of the program that created the tables
schema_version = sa.Table("schema_version", schema, sa.Column("version", sa.Integer, primary_key=True))


def damage(engine: sa.Engine, *, is_written: bool) -> str | None:
    """Return the reason why the store cannot be used, with its remedy; None if it can be used.

    The store may have been written by another version, or lack a table. Or its file may contain SQL code, such as a
    trigger, which might never end.
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
    # The tables are listed again, because another process may have created some since.
    missing = schema.tables.keys() - set(sa.inspect(engine).get_table_names())
    if has_content and missing:
        return f"it has lost its table {', '.join(sorted(missing))}; restore it from a copy, or use another store"
    return None


def _foreign(connection: sa.Connection, found: AbstractSet[str], *, is_written: bool) -> str | None:
    """Return the description of a virtual table, generated column or trigger in an SQLite file; None if it has none.

    SQLite would run the SQL code of these when the store is read or written. Triggers matter only if the store is
    written.
    """
    kinds = {str(row[1]): row[2] for row in connection.exec_driver_sql("PRAGMA table_list")}
    for name in found & schema.tables.keys():
        # SQLite before version 3.37 does not list the types of tables.
        if kinds.get(name) == "virtual":
            return f"the virtual table {name}"
        columns = connection.exec_driver_sql(f"PRAGMA table_xinfo({name})").all()
        if computed := [row[1] for row in columns if row[-1] in _GENERATED]:
            return f"the generated column {name}.{computed[0]}"
    triggers = connection.exec_driver_sql("SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger'").all()
    own = [name for name, table in triggers if str(table).lower() in schema.tables]
    return f"the trigger {own[0]}" if own and is_written else None


def note_version(engine: sa.Engine) -> None:
    """Write the version of the tables, unless a version is already recorded."""
    with engine.connect() as connection:
        if connection.execute(sa.select(schema_version)).first() is not None:
            return
    with engine.begin() as connection:
        connection.execute(sa.insert(schema_version).values(version=VERSION))


#: columns that earlier versions of the package have not created
ADDED = (reports.c.losses, studies.c.owner, attempts.c.owner)


def lacking(engine: sa.Engine) -> list[sa.Column[Any]]:
    """Return the columns of `ADDED` that a store of an earlier version lacks."""
    found = {table: sa.inspect(engine).get_columns(table.name) for table in {column.table for column in ADDED}}
    return [column for column in ADDED if column.name not in {each["name"] for each in found[column.table]}]


R = TypeVar("R")
K = TypeVar("K", bound=msgspec.Struct)

#: names of a trial's columns
COLUMNS = [*FACTS]
#: columns with text from outside this package
_TEXTS = ("host", "error", "warning", "log")
#: columns with JSON
JSON = [name for name in FACTS if isinstance(trials.c[name].type, sa.JSON)]
#: columns with JSON that are read with every row: objects with numbers by name
_NUMBERS = [name for name in JSON if name in KEPT]
#: columns with most of the bytes of a row. A study that is resumed does not read them of its finished trials
_AT_LENGTH = {n for n in (*_TEXTS, *JSON) if n not in KEPT and n not in Trial.__struct_fields__}
#: fields of live attempts that are stored in a trial's row
_OF_ATTEMPT = ("attempt", "state", "compute_class", "host", "started_at")
_as_numbers = msgspec.json.Decoder(dict[str, Finite]).decode

#: exceptions that reading a damaged row may raise
UNREADABLE = (ValueError, TypeError, RecursionError, OverflowError, msgspec.MsgspecError)

_SETTINGS = get_type_hints(StudySettings, include_extras=True)
#: maximum length of a text that is read from a store; this package never writes longer ones
LONGEST = 20_000_000
_TOO_LONG = "(left out: too long)"


def readable(columns: Iterable[sa.Column[Any]], order: Collection[sa.Column[Any]] = ()) -> sa.Select[Any]:
    """Return a query of columns, for rows that may be damaged.

    JSON is selected as text, because SQLAlchemy's decoder would stop at the first value that is not JSON, without
    naming the row. Values that are too long are replaced by a short text. In the columns of `order`, they are replaced
    by null, because these columns are compared to find the next page of rows.
    """
    found: list[sa.ColumnElement[Any]] = []
    ordered = {column.name for column in order}
    for column in columns:
        if isinstance(column.type, (sa.JSON, sa.String)):
            text = sa.cast(column, sa.Text) if isinstance(column.type, sa.JSON) else column
            instead = None if column.name in ordered else _TOO_LONG
            found.append(sa.case((sa.func.length(text) > LONGEST, instead), else_=text).label(column.name))
        elif isinstance(column.type, sa.LargeBinary):
            # SQLAlchemy's conversion is not used, because it would stop at the first value that is not bytes.
            short = sa.case((sa.func.length(column) > LONGEST, None), else_=column)
            found.append(sa.type_coerce(short, sa.types.NullType()).label(column.name))
        else:
            found.append(column)
    return sa.select(*found)


def unchecked(columns: Iterable[sa.Column[Any]], *, are_bytes: bool) -> sa.Select[Any]:
    """Return a query of columns whose values are returned as the driver gives them, which is much faster.

    Texts that are too long are selected as null. If `are_bytes`, texts are selected as bytes.
    """
    found: list[sa.ColumnElement[Any]] = []
    for column in columns:
        value: sa.ColumnElement[Any] = column
        if isinstance(column.type, (sa.JSON, sa.String, sa.LargeBinary)):
            if not isinstance(column.type, sa.LargeBinary):
                value = sa.cast(column, sa.LargeBinary if are_bytes else sa.Text)
            value = sa.case((sa.func.length(value) > LONGEST, None), else_=value)
        found.append(sa.type_coerce(value, sa.types.NullType()).label(column.name))
    return sa.select(*found)


def as_study(row: sa.Row[Any]) -> StudyRecord:
    """Return the study of a row. Raises an exception of UNREADABLE if a value does not have the type of its field."""
    record: StudyRecord = msgspec.convert(_facts(row, studies), StudyRecord)
    for name, value in [*record.settings.items(), *record.in_force.items()]:
        if value is not None and name in _SETTINGS:
            msgspec.convert(value, _SETTINGS[name])
    return record


def as_lesson(row: sa.Row[Any]) -> Trial:
    """Return the trial of a row of `warm_starts`. Raises an exception of UNREADABLE if the row is damaged."""
    found = _facts(row, warm_starts)
    facts = {"number": found["place"], "subspace": found["subspace"], "params": found["params"], "state": "COMPLETE"}
    outcome = {"state": "COMPLETE", "loss": found["loss"], **{name: found.get(name, {}) for name in _NUMBERS}}
    trial: Trial = msgspec.convert({**facts, "outcome": outcome}, Trial)
    _check(trial.outcome)
    return trial


def _storable(text: str) -> str:
    """Return a text in which characters that databases refuse, NUL and unpaired surrogates, are replaced."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def record_row(key: str, record: msgspec.Struct, **more: object) -> dict[str, object]:
    """Return the row of a study's record, as values by column name. `more` has further values."""
    return {"study": key, **msgspec.to_builtins(asdict(record), builtin_types=(bytes,)), **more}


def action_row(key: str, action: Action) -> dict[str, object]:
    """Return the row of an action in `actions`, as values by column name."""
    return record_row(key, action, is_done=action.answer.is_done, answer=_storable(action.answer.text))


def as_action(row: sa.Row[Any]) -> Action:
    """Return the action of a row. Raises an exception of UNREADABLE if the row is damaged."""
    found = _facts(row, actions)
    return msgspec.convert({**found, "answer": {"is_done": found["is_done"], "text": found["answer"]}}, Action)


def _facts(row: sa.Row[Any], table: sa.Table) -> dict[str, Any]:
    """Return the values of a row by column name, with decoded JSON. Columns with null are left out."""
    # Names are converted to str, because SQLAlchemy's names are instances of a subclass.
    named = ((str.__str__(name), value) for name, value in row._mapping.items() if value is not None)
    return {name: _decoded(value) if isinstance(table.c[name].type, sa.JSON) else value for name, value in named}


def _decoded(text: str) -> Any:
    """Return the value of a JSON text. It may have been written by Python's json module."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        # The text has an unpaired surrogate or an infinite number. Python's json module, which has written it, can read
        # it.
        found = json.loads(text)
    # A deeply nested value is refused, because printing it would raise RecursionError.
    if text.count("[") + text.count("{") > MAX_LEVELS and not is_shallow(found, MAX_LEVELS):
        raise ValueError(f"it has more than {MAX_LEVELS} levels")
    return found


class Reader(Generic[R]):
    """Makes records from the rows of a table that its `query` selects."""

    def __init__(
        self,
        table: sa.Table,
        columns: Iterable[str],
        make: Callable[[sa.Row[Any]], R],
        order: Sequence[str] | None = None,
    ) -> None:
        """`make` raises an exception of UNREADABLE for a damaged row.

        `order` has the columns by which rows are sorted, and which identify a row within a study; by default the
        columns of the primary key.
        """
        keys = [column.name for column in table.primary_key if column.name != "study"]
        self.table, self.make = table, make
        #: these columns are the first ones of each row
        self.order = [table.c[name] for name in order or keys]
        self.columns = [*dict.fromkeys([*(column.name for column in self.order), *columns])]
        self.query = readable([table.c[name] for name in self.columns], self.order)

    def problem(self, error: Exception) -> str:
        """Return the message of an exception of `make`, with the column's name instead of its index."""
        return one_line(re.sub(r"`\$\[(\d+)\]`", lambda found: self.columns[int(found[1])], str(error)))


class TrialReader(Reader[R]):
    """Makes trials, or summaries of them."""

    def __init__(self, columns: Sequence[str], make: Callable[[TrialReader[R], sa.Row[Any]], R]) -> None:
        super().__init__(trials, columns, partial(make, self))
        self._own = [n for n in columns if n in Trial.__struct_fields__ and n not in ("params", "live")]
        self._of_outcome = [n for n in columns if n in Outcome.__struct_fields__ and n not in ("state", "metrics")]
        texts = dict.fromkeys((name for name in JSON if name not in _NUMBERS), str | None)
        hints = {**HINTS, **texts}
        fields = [(name, hints[name]) for name in self.columns if name not in Summary.__struct_fields__]
        self._row = msgspec.defstruct("Row", fields, bases=(Summary,), array_like=True, kw_only=True)
        self._numbers = [self.columns.index(name) for name in _NUMBERS]

    def trial(self, row: Sequence[object]) -> Trial:
        """Return the trial of a row. Raises an exception of UNREADABLE if a value lacks the type of its field."""
        found = self._converted(row)
        outcome = self._outcome(found) if found.state.is_finished else replace(NO_OUTCOME, code=found.code)
        own = {name: getattr(found, name) for name in self._own}
        trial = Trial(params=_params(found.params), outcome=outcome, **own)
        if not found.live:
            return trial
        live = [{**each, "state": TrialState(each["state"])} for each in json.loads(found.live)]
        return trial.evolve(live=tuple(trial.attempted(**each) for each in live))

    def earlier(self, row: Sequence[object]) -> Trial | Summary:
        """Return the summary of a row if its trial has finished, else the trial.

        Raises the same exceptions as `trial`.
        """
        found = self._converted(row)
        if not found.state.is_finished:
            return self.trial(row)
        _check(found)
        # This checks that the params can be read. They are read again when they are needed.
        _params(found.params)
        summary: Summary = found
        return summary

    def _converted(self, row: Sequence[object]) -> Any:
        """Return the values of a row, converted to the types of their columns. Raises an exception of UNREADABLE."""
        values = [*row]
        for index in self._numbers:
            text: Any = values[index]
            values[index] = _as_numbers(text) if text else {}
        return msgspec.convert(values, self._row)

    def _outcome(self, found: Any) -> Outcome:
        _check(found)
        facts = {name: getattr(found, name) for name in self._of_outcome}
        if "metrics" in self.columns:
            facts["metrics"] = _object(found.metrics)
        return Outcome(state=found.state, **facts)


def _check(found: Any) -> None:
    if found.state is TrialState.COMPLETE and (found.loss is None or math.isnan(found.loss)):
        raise ValueError("it is COMPLETE without a loss")


#: FULL reads trials; BRIEF reads unfinished trials, and summaries of finished trials
FULL: Reader[Trial] = TrialReader(COLUMNS, TrialReader.trial)
BRIEF: Reader[Trial | Summary] = TrialReader([n for n in COLUMNS if n not in _AT_LENGTH], TrialReader.earlier)


def _of(kind: type[K], table: sa.Table, order: Sequence[str] | None = None, **defaults: object) -> Reader[K]:
    """Return a reader for a table whose columns are the fields of the record type `kind`.

    `defaults` has values in place of null, for columns where null does not stand for the default of the field.
    """
    return Reader(
        table, kind.__struct_fields__, lambda row: msgspec.convert(defaults | _facts(row, table), kind), order
    )


ATTEMPTS = Reader(attempts, AttemptRecord.__struct_fields__, lambda row: msgspec.convert([*row], AttemptRecord))
SESSIONS = _of(SessionRecord, sessions, ["since", "worker"])
MACHINES = _of(MachineRecord, machines)
REPORTS = _of(Report, reports, loss=math.nan)
ACTIONS = Reader(actions, actions.c.keys(), as_action, ["at", "id"])
LESSONS = Reader(warm_starts, warm_starts.c.keys(), as_lesson)
STUDIES = Reader(studies, [each.name for each in fields(StudyRecord)], as_study, ["name"])


def trial_row(key: str, trial: Trial, change: int | None = None) -> dict[str, object]:
    """Return the row of a trial in `trials` with this change number, as values by column name."""
    facts = asdict(trial.outcome) | asdict(trial)
    facts["violation"] = trial.outcome.violation if facts["constraints"] else None
    row: dict[str, Any] = {"study": key, **{name: facts[name] for name in COLUMNS}, "state": str(trial.state)}
    row["change"] = change
    # Empty objects are stored as null, because nearly all trials have them.
    row |= {name: row[name] or None for name in _NUMBERS}
    row |= {name: _storable(row[name]) for name in _TEXTS if row[name]}
    if trial.live is not None:
        row["live"] = [{name: getattr(each, name) for name in _OF_ATTEMPT} for each in trial.live]
    return row


def _params(text: str | None) -> dict[str, Any]:
    params = _object(text)
    others = [value for label, value in params.items() if label != POINT or not isinstance(value, str)]
    if any(isinstance(value, (dict, list, str)) for value in others):
        raise ValueError("a label's value is not a number")
    return params


def _object(text: str | None) -> dict[str, Any]:
    if isinstance(found := _decoded(text or ""), dict):
        return found
    raise ValueError("it is not an object with names")
