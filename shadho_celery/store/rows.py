"""Rows of the table `trials`: made from trials, and checked where they are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any, get_type_hints

import msgspec
import sqlalchemy as sa
from msgspec.structs import asdict, astuple

from shadho_celery.core.checks import one_line
from shadho_celery.core.trial import Finite, Outcome, Summary, Trial, TrialState
from shadho_celery.store.tables import trials

#: a trial's columns, which are named like its fields or those of its outcome
COLUMNS = [str.__str__(c.name) for c in trials.columns if c.name != "study"]
#: columns with text of the trial's or the machine's own
_TEXTS = ("error", "host", "warning", "log")
#: columns with JSON
JSON = ("params", "metrics", "live", "losses", "constraints")
#: those of them that are read with every row
_NUMBERS = ("losses", "constraints")
#: columns that a study does not need of earlier trials; most bytes of a row are in them
_AT_LENGTH = ("metrics", "error", "log")
#: stored fields of a live attempt
_OF_ATTEMPT = ("attempt", "state", "compute_class", "host", "started_at")
_NO_OUTCOME = Outcome(state=TrialState.WAITING)
_HINTS = get_type_hints(Outcome, include_extras=True) | get_type_hints(Trial, include_extras=True)
_as_numbers = msgspec.json.Decoder(dict[str, Finite]).decode
_as_object = msgspec.json.Decoder(dict[str, Any]).decode

#: what a row raises that is no trial
UNREADABLE = (ValueError, TypeError, msgspec.MsgspecError)


class Reader:
    """Makes trials of rows that have been selected by its `query`."""

    def __init__(self, columns: Sequence[str], *bases: type[msgspec.Struct]) -> None:
        """`bases` are records all of whose fields are among the `columns`: `earlier` returns such ones."""
        own = [n for n in columns if n in Trial.__struct_fields__ and n not in ("params", "slots", "live")]
        of_outcome = [n for n in columns if n in Outcome.__struct_fields__ and n not in ("state", "metrics")]
        based = [name for base in bases for name in base.__struct_fields__]
        self.columns = list(dict.fromkeys([*based, *own, *of_outcome, *columns]))
        self.query = self.select()
        # An earlier version wrote no slots.
        texts = dict.fromkeys((name for name in JSON if name not in _NUMBERS), str | None)
        hints = {**_HINTS, "slots": _HINTS["slots"] | None, "violation": float | None, **texts}
        fields = [(name, hints[name]) for name in self.columns if name not in based]
        self._row = msgspec.defstruct("Row", fields, bases=bases or None, array_like=True, kw_only=True)
        self._own, self._of_outcome = self._part(own), self._part(of_outcome)
        self._numbers = [self.columns.index(name) for name in _NUMBERS]

    def select(self, lacking: Collection[str] = ()) -> sa.Select[Any]:
        """Return the query of its columns; those that a store of an earlier version is `lacking` are null."""

        def column(name: str) -> sa.ColumnElement[Any]:
            if name in lacking:
                return sa.null().label(name)
            # Text: the database's own decoder would end at the first row that is no JSON, and not say at which.
            return sa.cast(trials.c[name], sa.Text) if name in JSON else trials.c[name]

        return sa.select(*map(column, self.columns))

    def trial(self, row: Sequence[object]) -> Trial:
        """Return the trial of a row. Raises one of UNREADABLE if a value is not of its field's type."""
        found = self._converted(row)
        values = astuple(found)
        outcome = self._outcome(found, values) if found.state.is_finished else None
        trial = Trial(params=_object(found.params), slots=found.slots or 1, outcome=outcome, **self._own(values))
        if not found.live:
            return trial
        live = [{**each, "state": TrialState(each["state"])} for each in json.loads(found.live)]
        return trial.evolve(live=tuple(trial.attempted(**each) for each in live))

    def earlier(self, row: Sequence[object]) -> Trial | Summary:
        """Return the trial of a row, or the summary of one that has finished."""
        found = self._converted(row)
        if not found.state.is_finished:
            return self.trial(row)
        _check(found)
        # They must be readable later.
        _object(found.params)
        summary: Summary = found
        return summary

    def problem(self, error: Exception) -> str:
        """Return one line for an error that `trial` has raised; it names the column."""
        return one_line(re.sub(r"`\$\[(\d+)\]`", lambda place: self.columns[int(place[1])], str(error)))

    def _converted(self, row: Sequence[object]) -> Any:
        """Return the columns of a row in their types. Raises one of UNREADABLE."""
        values = [*row]
        for place in self._numbers:
            text: Any = values[place]
            values[place] = _as_numbers(text) if text else {}
        return msgspec.convert(values, self._row)

    def _outcome(self, found: Any, values: tuple[Any, ...]) -> Outcome:
        _check(found)
        facts = self._of_outcome(values)
        if "metrics" in self.columns:
            facts["metrics"] = _object(found.metrics)
        return Outcome(state=found.state, **facts)

    def _part(self, names: Sequence[str]) -> Callable[[tuple[Any, ...]], dict[str, Any]]:
        """Return a function that picks these columns from the values of a row."""
        pick = itemgetter(*map(self.columns.index, names))
        return lambda values: dict(zip(names, pick(values), strict=True))


def _check(found: Any) -> None:
    if found.state is TrialState.COMPLETE and (found.loss is None or math.isnan(found.loss)):
        raise ValueError("it is COMPLETE without a loss")


#: reads whole trials
FULL = Reader(COLUMNS)
#: reads unfinished trials, and the summaries of finished ones
BRIEF = Reader([name for name in COLUMNS if name not in _AT_LENGTH], Summary)


def make_row(key: str, trial: Trial) -> dict[str, object]:
    """Return the row of a trial."""
    facts = asdict(trial.outcome or _NO_OUTCOME) | asdict(trial)
    facts["violation"] = trial.violation if facts["constraints"] else None
    row: dict[str, Any] = {"study": key, **{name: facts[name] for name in COLUMNS}, "state": str(trial.state)}
    # None, and not an empty object, in nearly all studies.
    row |= {name: row[name] or None for name in _NUMBERS}
    row |= {name: _text(row[name]) for name in _TEXTS}
    if trial.live is not None:
        row["live"] = [{name: getattr(each, name) for name in _OF_ATTEMPT} for each in trial.live]
    return row


def _object(text: str | None) -> dict[str, Any]:
    try:
        return _as_object(text or "")
    except msgspec.MsgspecError:
        # Half a surrogate pair, or an infinite number: Python's own reader takes what Python's own has written.
        found = json.loads(text or "")
        if isinstance(found, dict):
            return found
        raise


def _text(text: str | None) -> str | None:
    """Replace characters that databases refuse: an error's message may have NUL or half a surrogate pair."""
    return text and text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
