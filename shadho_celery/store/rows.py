"""Conversion between records and rows of the tables. Rows are checked when they are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, get_type_hints

import msgspec
import sqlalchemy as sa
from msgspec.structs import asdict, replace

from shadho_celery.core.actions import Action
from shadho_celery.core.checks import is_shallow, one_line
from shadho_celery.core.columns import FACTS, HINTS, KEPT, Summary
from shadho_celery.core.records import AttemptRecord, MachineRecord, SessionRecord
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import (
    MAX_LEVELS,
    NO_OUTCOME,
    Finite,
    Outcome,
    Report,
    Trial,
    TrialState,
)
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.tables import trials

#: names of a trial's columns, and of an attempt's
COLUMNS = [*FACTS]
ATTEMPT_COLUMNS = [*AttemptRecord.__struct_fields__]
#: columns with text from outside this package
_TEXTS = [name for name, fact in FACTS.items() if fact.sql.is_foreign]
#: columns with JSON
JSON = [name for name, fact in FACTS.items() if fact.sql.kind == "json"]
#: columns with JSON that are read with every row: mappings of names to numbers
_NUMBERS = [name for name in JSON if name in KEPT]
#: columns that a study does not need of earlier trials, and that have most bytes of a row
_AT_LENGTH = {n for n in (*_TEXTS, *JSON) if n not in KEPT and n not in Trial.__struct_fields__}
#: fields of a live attempt that are stored
_OF_ATTEMPT = ("attempt", "state", "compute_class", "host", "started_at")
_as_numbers = msgspec.json.Decoder(dict[str, Finite]).decode

#: exceptions that reading a damaged row may raise
UNREADABLE = (ValueError, TypeError, RecursionError, OverflowError, msgspec.MsgspecError)

#: columns of the table `studies` with JSON
RECORD_JSON = ("space", "settings", "in_force", "choices", "tree", "classes", "money_plan")
_SETTINGS = get_type_hints(StudySettings, include_extras=True)
#: maximum length of a text that is read from a store; this package has not written longer ones
LONGEST = 20_000_000
_TOO_LONG = "(left out: too long)"


def readable(columns: Iterable[sa.Column[Any]]) -> sa.Select[Any]:
    """Return a query of columns.

    Texts and JSON are selected as text, with a short text in place of values that are too long. SQLAlchemy's own
    decoder would stop at the first value that is not JSON, without saying in which row.
    """
    found: list[sa.ColumnElement[Any]] = []
    for column in columns:
        if isinstance(column.type, (sa.JSON, sa.String)):
            text = sa.cast(column, sa.Text) if isinstance(column.type, sa.JSON) else column
            found.append(sa.case((sa.func.length(text) > LONGEST, _TOO_LONG), else_=text).label(column.name))
        elif isinstance(column.type, sa.LargeBinary):
            # Without SQLAlchemy's conversion, which would stop at the first value that is not bytes.
            short = sa.case((sa.func.length(column) > LONGEST, None), else_=column)
            found.append(sa.type_coerce(short, sa.types.NullType()).label(column.name))
        else:
            found.append(column)
    return sa.select(*found)


def unchecked(columns: Iterable[sa.Column[Any]], *, are_bytes: bool) -> sa.Select[Any]:
    """Return a query of columns whose values are the driver's own: nothing is converted, which takes most of the time.

    Texts that are too long are selected as null. With `are_bytes`, texts are selected as bytes.
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
    """Return the study of a row. Raises an exception of UNREADABLE if a value does not have its field's type."""
    found = _facts(row, RECORD_JSON)
    found |= {name: found[name] or {} for name in ("settings", "in_force", "choices")}
    found["classes"] = found["classes"] or ()
    record: StudyRecord = msgspec.convert(found, StudyRecord)
    for name, value in [*record.settings.items(), *record.in_force.items()]:
        if value is not None and name in _SETTINGS:
            msgspec.convert(value, _SETTINGS[name])
    return record


def as_lesson(row: sa.Row[Any]) -> Trial:
    """Return the trial of a row of `warm_starts`. Raises an exception of UNREADABLE if the row is damaged."""
    found = _facts(row, JSON)
    facts = {"number": found["place"], "subspace": found["subspace"], "params": found["params"], "state": "COMPLETE"}
    outcome = {"state": "COMPLETE", "loss": found["loss"], **{name: found[name] or {} for name in _NUMBERS}}
    trial: Trial = msgspec.convert({**facts, "outcome": outcome}, Trial)
    _check(trial.outcome)
    return trial


def _storable(text: str) -> str:
    """Return a text without the characters that databases refuse: NUL and unpaired surrogates, as in error messages."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def action_row(key: str, action: Action) -> dict[str, object]:
    """Return the row of an action in `actions`: values by column name."""
    facts = {name: fact for name, fact in asdict(action).items() if name != "answer"}
    return {"study": key, **facts, "is_done": action.answer.is_done, "answer": _storable(action.answer.text)}


def as_action(row: sa.Row[Any]) -> Action:
    """Return the action of a row. Raises an exception of UNREADABLE if the row is damaged."""
    found = _facts(row, ["arguments"])
    return msgspec.convert({**found, "answer": {"is_done": found["is_done"], "text": found["answer"]}}, Action)


def as_report(row: sa.Row[Any]) -> Report:
    """Return the report of a row. Raises an exception of UNREADABLE if the row is damaged."""
    return msgspec.convert(_facts(row) | {"loss": math.nan if row.loss is None else row.loss}, Report)


def as_attempt(row: sa.Row[Any]) -> AttemptRecord:
    """Return the attempt of a row. Raises an exception of UNREADABLE if the row is damaged."""
    values = row._mapping
    placed = values["placed"]
    # A driver may return a memoryview.
    facts = [*(values[name] for name in ATTEMPT_COLUMNS[:-1]), None if placed is None else bytes(placed)]
    return msgspec.convert(facts, AttemptRecord)


def as_session(row: sa.Row[Any]) -> SessionRecord:
    """Return the session of a row. Raises an exception of UNREADABLE if the row is damaged."""
    found = _facts(row, ("others",))
    return msgspec.convert({**found, "others": found["others"] or ()}, SessionRecord)


def as_machine(row: sa.Row[Any]) -> MachineRecord:
    """Return the machine of a row. Raises an exception of UNREADABLE if the row is damaged."""
    return msgspec.convert(_facts(row, ("gpus", "versions")), MachineRecord)


def _facts(row: sa.Row[Any], of_json: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a row by column name, with JSON decoded."""
    # SQLAlchemy's names are of a subclass of str.
    return {str.__str__(name): _decoded(value) if name in of_json else value for name, value in row._mapping.items()}


def _decoded(text: str | None) -> Any:
    """Return the value of a JSON text, or None for None. It may have been written by Python's json module."""
    if text is None:
        return None
    try:
        found = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        # An unpaired surrogate, or an infinite number: Python's json module can read what it has written.
        found = json.loads(text)
    # Printing a deeply nested value would raise RecursionError.
    if text.count("[") + text.count("{") > MAX_LEVELS and not is_shallow(found, MAX_LEVELS):
        raise ValueError(f"it has more than {MAX_LEVELS} levels")
    return found


class Reader:
    """Makes trials, or summaries of them, from rows that were selected with its `query`."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._own = [n for n in columns if n in Trial.__struct_fields__ and n not in ("params", "slots", "live")]
        self._of_outcome = [n for n in columns if n in Outcome.__struct_fields__ and n not in ("state", "metrics")]
        self.columns = columns
        self.query = readable([trials.c[name] for name in columns])
        # An earlier version did not write slots, so null is allowed.
        texts = dict.fromkeys((name for name in JSON if name not in _NUMBERS), str | None)
        hints = {**HINTS, "slots": HINTS["slots"] | None, "violation": float | None, **texts}
        fields = [(name, hints[name]) for name in columns if name not in Summary.__struct_fields__]
        self._row = msgspec.defstruct("Row", fields, bases=(Summary,), array_like=True, kw_only=True)
        self._numbers = [self.columns.index(name) for name in _NUMBERS]

    def trial(self, row: Sequence[object]) -> Trial:
        """Return the trial of a row. Raises an exception of UNREADABLE if a value does not have its field's type."""
        found = self._converted(row)
        outcome = self._outcome(found) if found.state.is_finished else replace(NO_OUTCOME, code=found.code)
        own = {name: getattr(found, name) for name in self._own}
        trial = Trial(params=_params(found.params), slots=found.slots or 1, outcome=outcome, **own)
        if not found.live:
            return trial
        live = [{**each, "state": TrialState(each["state"])} for each in json.loads(found.live)]
        return trial.evolve(live=tuple(trial.attempted(**each) for each in live))

    def earlier(self, row: Sequence[object]) -> Trial | Summary:
        """Return the summary of a row if its trial has finished, else the trial. Raises like `trial`."""
        found = self._converted(row)
        if not found.state.is_finished:
            return self.trial(row)
        _check(found)
        # Checks that the params, which are read only when they are needed, can be read.
        _params(found.params)
        summary: Summary = found
        return summary

    def problem(self, error: Exception) -> str:
        """Return a line about an error that `trial` has raised, with the column's name instead of its index."""
        return one_line(re.sub(r"`\$\[(\d+)\]`", lambda place: self.columns[int(place[1])], str(error)))

    def _converted(self, row: Sequence[object]) -> Any:
        """Return the values of a row, converted to the types of their columns. Raises an exception of UNREADABLE."""
        values = [*row]
        for place in self._numbers:
            text: Any = values[place]
            values[place] = _as_numbers(text) if text else {}
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


#: reads whole trials
FULL = Reader(COLUMNS)
#: reads unfinished trials, and the summaries of finished ones
BRIEF = Reader([name for name in COLUMNS if name not in _AT_LENGTH])


def make_row(key: str, trial: Trial, change: int | None = None) -> dict[str, object]:
    """Return the row of a trial in `trials`, written with this change number: values by column name."""
    facts = asdict(trial.outcome) | asdict(trial)
    facts["violation"] = trial.outcome.violation if facts["constraints"] else None
    row: dict[str, Any] = {"study": key, **{name: facts[name] for name in COLUMNS}, "state": str(trial.state)}
    row["change"] = change
    # Null instead of an empty object, which nearly all studies would have.
    row |= {name: row[name] or None for name in _NUMBERS}
    row |= {name: _storable(row[name]) for name in _TEXTS if row[name]}
    if trial.live is not None:
        row["live"] = [{name: getattr(each, name) for name in _OF_ATTEMPT} for each in trial.live]
    return row


def attempt_row(key: str, record: AttemptRecord, change: int) -> dict[str, object]:
    """Return the row of an attempt in `attempts`: values by column name."""
    row = {"study": key, **asdict(record), "change": change}
    row["end"] = None if record.end is None else str(record.end)
    return row


def record_row(key: str, record: SessionRecord | MachineRecord) -> dict[str, object]:
    """Return the row of a session or a machine in its table: values by column name."""
    return {"study": key, **msgspec.to_builtins(record)}


def _params(text: str | None) -> dict[str, Any]:
    params = _object(text)
    if any(isinstance(value, (dict, list, str)) for value in params.values()):
        raise ValueError("a label's value is not a number")
    return params


def _object(text: str | None) -> dict[str, Any]:
    if isinstance(found := _decoded(text or ""), dict):
        return found
    raise ValueError("it is not an object with names")
