"""Table of a study's trials, as a pandas table and as CSV."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TextIO

from shadho_celery.core.columns import Shown, names
from shadho_celery.errors import UsageError
from shadho_celery.results.trial import TrialResult, Values

if TYPE_CHECKING:
    import pandas as pd

#: columns of facts, which come before the labels and the metrics
FACTS = names(Shown.FRONT)
#: prefix of the column with a label's drawn values. It exists if the objective got other values, such as an option
#: instead of the option's index
DRAWN = "drawn."
#: columns after labels and metrics: times, which a store has as seconds since the epoch; and texts, as the last columns
MOMENTS = names(Shown.DATE)
TEXTS = names(Shown.END)
#: pandas type by name of a column of numbers, some of which may be missing
_KINDS = {"loss": "float", "budget": "float", "seconds": "float", "step": "Int64"}
#: first characters of texts that get an apostrophe in front: those that begin a formula in a spreadsheet, and the
#: apostrophe itself
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")
#: line end that the module csv writes
_CSV_END = "\r\n"


def table(trials: Iterable[TrialResult], values: Values) -> dict[str, list[Any]]:
    """Return the columns by name. Each has one entry per trial: a number, a bool, a text, or None.

    The order of the columns is: facts; losses by name; labels; metrics; constraints; times (in seconds since the
    epoch); error and warning. A label's column has the values that the objective got. If the drawn values differ from
    them, they are in the column ``drawn.LABEL``. A constraint's column has the prefix ``constraint.``. If a loss, label
    or metric has the name of an earlier column, its column gets the prefix ``loss.``, ``param.`` or ``metric.``. A
    column is converted to texts unless it has only numbers or only bools, so that every format can represent it.
    """
    rows = list(trials)
    labels = dict.fromkeys(label for trial in rows for label in trial.params)
    columns: dict[str, list[Any]] = {name: [getattr(trial, name) for trial in rows] for name in FACTS}
    columns["state"] = [str(trial.state) for trial in rows]
    taken = {*FACTS, *MOMENTS, *TEXTS}
    columns |= _columns([trial.losses for trial in rows], lambda name: _name(name, "loss", taken))
    as_shown = [values.shown(trial.record) for trial in rows]
    for label in labels:
        shown = [found.get(label) for found in as_shown]
        columns[_name(label, "param", taken)] = _column(shown)
        if (drawn := [trial.params.get(label) for trial in rows]) != shown:
            columns[_name(f"{DRAWN}{label}", "drawn", taken)] = _column(drawn)
    columns |= _columns([trial.metrics for trial in rows], lambda name: _name(name, "metric", taken))
    # Constraints always get the prefix, because otherwise readers of the table could not tell constraints from metrics.
    columns |= _columns([trial.constraints for trial in rows], lambda name: f"constraint.{name}")
    for name in MOMENTS:
        columns[name] = [getattr(trial, name) for trial in rows]
    for name in TEXTS:
        columns[name] = _column([getattr(trial, name) for trial in rows])
    return columns


def load_pandas() -> Any:
    """Return the module pandas, which is imported late. Raises UsageError if it is not installed."""
    try:
        import pandas as pd
    except ImportError:
        raise UsageError('tables of trials need pandas; in the checkout: pip install -e ".[export]"') from None
    return pd


def make_frame(trials: Iterable[TrialResult], values: Values) -> pd.DataFrame:
    """Return `table` as a pandas DataFrame, with a suitable type for each column."""
    pd = load_pandas()
    columns = table(trials, values)
    facts = {*FACTS, *TEXTS}
    kept = {name: column if name in facts else _typed(column) for name, column in columns.items()}
    frame = pd.DataFrame(kept, index=pd.RangeIndex(len(columns["number"])))
    for name in MOMENTS:
        frame[name] = pd.to_datetime(pd.Series(columns[name], dtype=float), unit="s", utc=True)
    for name in TEXTS:
        frame[name] = pd.Series(columns[name], dtype=object)
    for name, kind in _KINDS.items():
        frame[name] = frame[name].astype(kind)
    return frame


def write_csv(trials: Iterable[TrialResult], values: Values, file: TextIO, *, plain: bool = False) -> None:
    """Write `table` as CSV. Texts that a spreadsheet would run as formulas are `quoted`, unless `plain`."""
    shield: Callable[[str], str] = str if plain else quoted
    columns = table(trials, values)
    for name in MOMENTS:
        columns[name] = [None if at is None else str(datetime.fromtimestamp(at, timezone.utc)) for at in columns[name]]
    writer = csv.writer(_Lines(file))
    writer.writerow([shield(_printable(name)) for name in columns])
    for row in zip(*columns.values(), strict=True):
        writer.writerow([_cell(value, shield) for value in row])


class _Lines:
    """File that replaces the line ends of the module csv, carriage return and line feed, by line feeds.

    The module csv itself must use the line end with both characters: before Python 3.13, csv quotes a text with a
    carriage return only if the line end has one, too. Without quotes, a reader would end the line at that character.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> int:
        return self._file.write(f"{line.removesuffix(_CSV_END)}\n")


def quoted(text: str) -> str:
    """Return a text that no spreadsheet runs as a formula: a text that begins like one gets an apostrophe in front.

    A text that begins with an apostrophe gets another one, so that `unquoted` restores every text.
    """
    return f"'{text}" if text.startswith(_FORMULA) else text


def unquoted(text: str) -> str:
    """Return the original of a text that `quoted` has returned."""
    return text[1:] if text.startswith("'") and text[1:].startswith(_FORMULA) else text


def _cell(value: Any, shield: Callable[[str], str]) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None
    return shield(_printable(value)) if isinstance(value, str) else value


def _printable(text: str) -> str:
    """Return a text that can be written to a file. Unpaired surrogates, which UTF-8 cannot encode, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _columns(found: Sequence[Mapping[str, Any]], named: Callable[[str], str]) -> dict[str, list[Any]]:
    """Return a column for each key of the mappings in `found`, which has one mapping for each trial."""
    keys = dict.fromkeys(key for each in found for key in each)
    return {named(key): _column([each.get(key) for each in found]) for key in keys}


def _name(name: str, kind: str, taken: set[str]) -> str:
    while name in taken:
        name = f"{kind}.{name}"
    taken.add(name)
    return name


def _column(column: list[Any]) -> list[Any]:
    """Return a column with values of one type: integers, bools or floats, or for all other and mixed values texts."""
    kinds = {type(value) for value in column if value is not None}
    whole = [value for value in column if type(value) is int]
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in whole):
        return column
    if kinds == {bool}:
        return column
    if kinds <= {int, float} and all(abs(value) <= 2**53 for value in whole):
        return [None if value is None else float(value) for value in column]
    return [None if value is None else _text(value) for value in column]


def _typed(column: list[Any]) -> Any:
    """Return a column with its pandas type. Integers and bools keep their type even if some values are missing."""
    import pandas as pd

    kinds = {type(value) for value in column}
    if kinds == {int, type(None)}:
        return pd.array(column, dtype="Int64")
    return pd.array(column, dtype="boolean") if kinds == {bool, type(None)} else column


def _text(value: Any) -> str:
    try:
        text = str(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return _printable(text)
