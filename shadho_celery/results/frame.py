"""Table of a study's trials for pandas."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shadho_celery.errors import UsageError
from shadho_celery.results.trial import TrialResult
from shadho_celery.results.values import Values

if TYPE_CHECKING:
    import pandas as pd

#: columns in front of the labels and the metrics
FACTS = ("number", "state", "loss", "subspace", "budget", "step", "seconds", "compute_class", "host", "attempts")
#: columns behind them, seconds since the epoch in the store, and moments here
MOMENTS = ("asked_at", "started_at", "finished_at")


def make_frame(trials: Iterable[TrialResult], values: Values) -> pd.DataFrame:
    """Return one row a trial: facts, one column a loss with a name, a label (its value), a metric, and a constraint.

    Moments, error and warning follow. A constraint's column has the prefix ``constraint.``, and one whose name is taken
    ``loss.``, ``param.`` or ``metric.``. A column of unlike values, or of lists and dicts, is made one of texts, so
    that every format can keep it.
    """
    try:
        import pandas as pd
    except ImportError:
        raise UsageError("a table of trials needs pandas: pip install 'shadho_celery[export]'") from None
    rows = list(trials)
    labels = dict.fromkeys(label for trial in rows for label in trial.params)
    metrics = dict.fromkeys(name for trial in rows for name in trial.metrics)
    columns: dict[str, Any] = {name: [getattr(trial, name) for trial in rows] for name in FACTS}
    columns["state"] = [str(trial.state) for trial in rows]
    taken = {*FACTS, *MOMENTS, "error", "warning"}
    for name in dict.fromkeys(name for trial in rows for name in trial.losses):
        columns[_name(name, "loss", taken)] = _column([trial.losses.get(name) for trial in rows])
    for label in labels:
        shown = [values.shown(params, label) if label in (params := trial.params) else None for trial in rows]
        columns[_name(label, "param", taken)] = _column(shown)
    for name in metrics:
        columns[_name(name, "metric", taken)] = _column([trial.metrics.get(name) for trial in rows])
    for name in dict.fromkeys(name for trial in rows for name in trial.constraints):
        # Always with the prefix: a reader of the table cannot tell it from a metric otherwise.
        columns[f"constraint.{name}"] = _column([trial.constraints.get(name) for trial in rows])
    frame = pd.DataFrame(columns, index=pd.RangeIndex(len(rows)))
    for name in MOMENTS:
        frame[name] = pd.to_datetime(
            pd.Series([getattr(trial, name) for trial in rows], dtype=float), unit="s", utc=True
        )
    frame["error"] = pd.Series(_column([trial.error for trial in rows]), dtype=object)
    frame["warning"] = pd.Series(_column([trial.warning for trial in rows]), dtype=object)
    for name in ("loss", "budget", "seconds"):
        frame[name] = frame[name].astype(float)
    frame["step"] = frame["step"].astype("Int64")
    return frame


def _name(name: str, kind: str, taken: set[str]) -> str:
    while name in taken:
        name = f"{kind}.{name}"
    taken.add(name)
    return name


def _column(column: list[Any]) -> Any:
    """Return a column of numbers, of truth values or of texts as such, to the last digit; any other as texts."""
    import pandas as pd

    kinds = {type(value) for value in column if value is not None}
    whole = [value for value in column if type(value) is int]
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in whole):
        # Not a float where some trials have none.
        return pd.array(column, dtype="Int64") if None in column else column
    if kinds == {bool}:
        return pd.array(column, dtype="boolean") if None in column else column
    if kinds == {str}:
        # Half a surrogate pair is no text to a file.
        return [None if value is None else value.encode("utf-8", "backslashreplace").decode() for value in column]
    if kinds <= {int, float} and all(abs(value) <= 2**53 for value in whole):
        return column
    return [None if value is None else _text(value) for value in column]


def _text(value: Any) -> str:
    try:
        text = str(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text.encode("utf-8", "backslashreplace").decode()
