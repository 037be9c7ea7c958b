"""Rows of the table `trials`: made from trials, and checked where they are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, get_type_hints

import msgspec
import sqlalchemy as sa
from msgspec.structs import asdict, astuple

from shadho_celery.core.checks import one_line
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.store.tables import trials

#: a trial's columns, which are named like its fields or those of its outcome
COLUMNS = [str.__str__(c.name) for c in trials.columns if c.name != "study"]
#: columns with text of the trial's or the machine's own
_TEXTS = ("error", "host", "warning")
#: columns with JSON
JSON = ("params", "metrics", "live")
#: columns that a search does not need of finished trials; most bytes of a row are in them
_AT_LENGTH = ("metrics", "error")
#: stored fields of a live attempt
_OF_ATTEMPT = ("attempt", "state", "compute_class", "host", "started_at")
_NO_OUTCOME = Outcome(state=TrialState.WAITING)
_HINTS = get_type_hints(Outcome, include_extras=True) | get_type_hints(Trial, include_extras=True)
_as_object = msgspec.json.Decoder(dict[str, Any]).decode

#: what a row raises that is no trial
UNREADABLE = (ValueError, TypeError, msgspec.MsgspecError)


class Reader:
    """Makes trials of rows that have been selected by its `query`."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._own = [n for n in columns if n in Trial.__struct_fields__ and n not in ("params", "slots", "live")]
        self._of_outcome = [n for n in columns if n in Outcome.__struct_fields__ and n not in ("state", "metrics")]
        #: those of a trial, those of its outcome, and others
        self.columns = list(dict.fromkeys([*self._own, *self._of_outcome, *columns]))
        # Text: the database's own decoder would end at the first row that is no JSON, and not say at which.
        self.query = sa.select(*(sa.cast(trials.c[n], sa.Text) if n in JSON else trials.c[n] for n in self.columns))
        # An earlier version wrote no slots.
        hints = {**_HINTS, "slots": _HINTS["slots"] | None, **dict.fromkeys(JSON, str | None)}
        self._row = msgspec.defstruct("Row", [(name, hints[name]) for name in self.columns], array_like=True)

    def trial(self, row: Sequence[object]) -> Trial:
        """Return the trial of a row. Raises one of UNREADABLE if a value is not of its field's type."""
        found: Any = msgspec.convert(tuple(row), self._row)
        values = astuple(found)
        outcome = self._outcome(found, values) if found.state.is_finished else None
        facts = dict(zip(self._own, values, strict=False))
        trial = Trial(params=_object(found.params), slots=found.slots or 1, outcome=outcome, **facts)
        if not found.live:
            return trial
        live = [{**each, "state": TrialState(each["state"])} for each in json.loads(found.live)]
        return trial.evolve(live=tuple(trial.attempted(**each) for each in live))

    def problem(self, error: Exception) -> str:
        """Return one line for an error that `trial` has raised; it names the column."""
        return one_line(re.sub(r"`\$\[(\d+)\]`", lambda place: self.columns[int(place[1])], str(error)))

    def _outcome(self, found: Any, values: Sequence[Any]) -> Outcome:
        if found.state is TrialState.COMPLETE and (found.loss is None or math.isnan(found.loss)):
            raise ValueError("it is COMPLETE without a loss")
        facts = dict(zip(self._of_outcome, values[len(self._own) :], strict=False))
        if "metrics" in self.columns:
            facts["metrics"] = _object(found.metrics)
        return Outcome(state=found.state, **facts)


#: reads whole trials
FULL = Reader(COLUMNS)
#: reads unfinished trials, and finished ones without metrics and error
BRIEF = Reader([name for name in COLUMNS if name not in _AT_LENGTH])


def make_row(key: str, trial: Trial) -> dict[str, object]:
    """Return the row of a trial."""
    facts = asdict(trial.outcome or _NO_OUTCOME) | asdict(trial)
    row: dict[str, Any] = {"study": key, **{name: facts[name] for name in COLUMNS}, "state": str(trial.state)}
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
