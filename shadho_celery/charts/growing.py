"""Columns of trials that grow while a study runs, as a store has them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shadho_celery.charts.chart import Array, Indices, shortened
from shadho_celery.charts.columns import Codes, Label, TrialColumns
from shadho_celery.core.checks import one_line
from shadho_celery.core.failures import headline
from shadho_celery.core.objectives import turned_first
from shadho_celery.core.trial import TrialState
from shadho_celery.results.study import StudyResults

#: columns of numbers and of texts that are read of each trial, beside its number
NUMBERS = ("loss", "seconds", "started_at", "finished_at", "budget", "rung", "origin", "violation")
TEXTS = ("state", "subspace", "compute_class", "host", "sampler")
#: columns whose rows take longest to read: they are read after the others
LATE = ("error", "losses", "params")
#: number of rows that are converted at once
BLOCK = 5000
#: maximum number of labels that are kept
MOST_LABELS = 2000
#: beginnings of the descriptions of choices, and of domains whose values differ by factors
_CHOICES, _LOG = ("choice(", "pchoice("), ("log", "qlog")

_as_numbers = msgspec.json.Decoder(dict[str, float]).decode

#: row of a table: values in the order of the columns that were selected
Row = Sequence[Any]


class _Grown:
    """Array that grows at its end."""

    def __init__(self, fill: float, kind: type[np.generic]) -> None:
        self._fill = fill
        self.values: NDArray[Any] = np.full(1024, fill, kind)

    def reach(self, count: int) -> None:
        """Grow to at least `count` values."""
        if count > len(self.values):
            more = np.full(max(count, 2 * len(self.values)) - len(self.values), self._fill, self.values.dtype)
            self.values = np.concatenate([self.values, more])


class GrowingColumns:
    """The trials of one study. Rows are put in as they are read from the store, and read again when they change."""

    def __init__(self, study: StudyResults) -> None:
        self._space, self._objectives = study.space, study.objectives
        self._choices = {label for label, text in self._space.items() if text.startswith(_CHOICES)}
        self._shown = study.shown
        #: limit on the number of trials in the latest run, or None
        self.asked: int | None = study.in_force.get("trials") or study.settings.get("trials")
        #: by number: place of the trial in the columns
        self._place: dict[int, int] = {}
        self._numbers = _Grown(0, np.int64)
        self._reals = {name: _Grown(math.nan, np.float64) for name in NUMBERS}
        self._codes = {name: _Grown(-1, np.int32) for name in (*TEXTS, "failure")}
        self._names: dict[str, dict[str, int]] = {name: {} for name in (*TEXTS, "failure")}
        self._labels: dict[str, _Grown] = {}
        self._losses = {name: _Grown(math.nan, np.float64) for name in self._objectives}
        #: by label and index: text of an option
        self._options: dict[tuple[str, float], str] = {}

    def __len__(self) -> int:
        """Return the number of trials."""
        return len(self._place)

    def put(self, rows: Iterable[Row], names: Sequence[str]) -> None:
        """Put in rows with these columns, the first of which is the number. Values of a wrong type count as missing."""
        found = iter(rows)
        while block := [*islice(found, BLOCK)]:
            self._put(block, names)

    def _put(self, block: Sequence[Row], names: Sequence[str]) -> None:
        block = [row for row in block if isinstance(row[0], int) and not isinstance(row[0], bool) and row[0] >= 0]
        if not block:
            return
        columns = dict(zip(names, zip(*block, strict=True), strict=True))
        places = np.array([self._place.setdefault(row[0], len(self._place)) for row in block], np.intp)
        for each in (self._numbers, *self._reals.values(), *self._codes.values(), *self._losses.values()):
            each.reach(len(self._place))
        self._numbers.values[places] = columns[names[0]]
        for name in NUMBERS:
            if name in columns:
                self._reals[name].values[places] = _reals(columns[name], is_finite=name != "loss")
        for name in TEXTS:
            if name in columns:
                self._codes[name].values[places] = self._coded(name, columns[name])
        if "error" in columns:
            headlines = [_headline(text) for text in columns["error"]]
            self._codes["failure"].values[places] = self._coded("failure", headlines)
        if "losses" in columns and self._losses:
            self._put_losses(places, columns["losses"])
        if "params" in columns:
            self._put_params(places, columns["params"])

    def _coded(self, name: str, texts: Iterable[object]) -> NDArray[np.int32]:
        known = self._names[name]
        codes = [
            # Nearly all texts are known, and a look costs less than a check of the type.
            code if (code := known.get(text)) is not None else self._new_code(known, text)  # type: ignore[call-overload]
            for text in texts
        ]
        return np.array(codes, np.int32)

    @staticmethod
    def _new_code(known: dict[str, int], text: object) -> int:
        return known.setdefault(text, len(known)) if isinstance(text, str) else -1

    def _put_losses(self, places: Indices, texts: Sequence[object]) -> None:
        for place, text in zip(places.tolist(), texts, strict=True):
            for name, loss in _mapping(text).items():
                if name in self._losses:
                    self._losses[name].values[place] = -loss if self._objectives[name] == "maximize" else loss

    def _put_params(self, places: Indices, texts: Sequence[object]) -> None:
        for place, text in zip(places.tolist(), texts, strict=True):
            params = _mapping(text)
            for label, value in params.items():
                column = self._labels.get(label)
                if column is None:
                    if len(self._labels) >= MOST_LABELS:
                        continue
                    column = self._labels[label] = _Grown(math.nan, np.float64)
                if place >= len(column.values):
                    column.reach(place + 1)
                column.values[place] = value
                if label in self._choices and (label, value) not in self._options:
                    # An option is found by its index, which is a whole number.
                    chosen = {**params, label: int(value) if value.is_integer() else value}
                    self._options[label, value] = shortened(one_line(self._shown(chosen, label)))

    def columns(self) -> TrialColumns:
        """Return the columns by number."""
        count = len(self._place)
        numbers = self._numbers.values[:count]
        # Trials nearly always arrive in order, and views of the arrays are free.
        is_sorted = bool((np.diff(numbers) > 0).all())
        order: Any = slice(0, count) if is_sorted else np.argsort(numbers, kind="stable")
        real = {name: column.values[order] for name, column in self._reals.items()}
        codes = {name: self._sorted(name, column.values[order]) for name, column in self._codes.items()}
        for column in (*self._labels.values(), *self._losses.values()):
            column.reach(count)
        sign = turned_first(1.0, self._objectives)
        return TrialColumns(
            number=np.asarray(numbers[order], np.intp),
            state=codes["state"],
            loss=sign * real["loss"],
            is_maximized=sign < 0,
            seconds=real["seconds"],
            started_at=real["started_at"],
            finished_at=real["finished_at"],
            subspace=codes["subspace"],
            compute_class=codes["compute_class"],
            host=codes["host"],
            sampler=codes["sampler"],
            failure=_of_failed(codes["failure"], codes["state"]),
            budget=real["budget"],
            rung=_whole(real["rung"]),
            origin=_whole(real["origin"]),
            violation=real["violation"],
            losses={name: column.values[order] for name, column in self._losses.items()}
            if len(self._losses) > 1
            else {},
            objectives=self._objectives,
            labels={name: self._label(name, self._labels[name].values[order]) for name in sorted(self._labels)},
            asked=self.asked,
        )

    def _label(self, name: str, values: Array) -> Label:
        known = values[np.isfinite(values)] if name in self._choices else values[:0]
        most = int(min(known.max(initial=-1), 100_000))
        return Label(
            name=name,
            values=values,
            options=[self._options.get((name, float(index)), "?") for index in range(most + 1)],
            # A rounded value may be 0, which a logarithmic axis cannot show.
            is_log=self._space.get(name, "").startswith(_LOG) and not bool((values <= 0).any()),
        )

    def _sorted(self, name: str, codes: NDArray[np.int32]) -> Codes:
        """Return a column of texts with its names sorted, so that it does not depend on the order of the trials."""
        names = [*self._names[name]]
        order = sorted(range(len(names)), key=names.__getitem__)
        new = np.full(len(names) + 1, -1, np.int32)
        new[order] = np.arange(len(names))
        return Codes(new[codes], [shortened(one_line(names[place])) for place in order])


def read_columns(study: StudyResults) -> TrialColumns:
    """Return the trials of a study as its store has them now."""
    growing = GrowingColumns(study)
    names = ("number", *NUMBERS, *TEXTS, *LATE)
    growing.put(study.rows(names), names)
    return growing.columns()


def _reals(column: Sequence[object], *, is_finite: bool) -> Array:
    """Return a column as numbers. What is not a number, or not finite where it must be, becomes NaN."""
    try:
        found = np.array(column, float)
    except (TypeError, ValueError):
        found = np.array([value if isinstance(value, (int, float)) else math.nan for value in column], float)
    return np.where(np.isinf(found), math.nan, found) if is_finite else found


def _whole(values: Array) -> Indices:
    """Return counts from 0 as integers, -1 where they are missing."""
    is_known = (values >= 0) & (values < 2**53)
    return np.where(is_known, values, -1.0).astype(np.intp)


def _mapping(text: object) -> Mapping[str, float]:
    """Return numbers by name from their JSON; {} for anything else."""
    if not isinstance(text, str):
        return {}
    try:
        return _as_numbers(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def _headline(error: object) -> str | None:
    return headline(error) if isinstance(error, str) else None


def _of_failed(failure: Codes, state: Codes) -> Codes:
    """Return the failures of FAILED trials only: a trial that was tried again has the error of its earlier attempt."""
    return Codes(np.where(state.is_in(TrialState.FAILED.value), failure.codes, -1).astype(np.int32), failure.names)
