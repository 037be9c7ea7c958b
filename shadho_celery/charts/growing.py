"""Columns of trials and attempts that grow while a study runs, as a store has them."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from shadho_celery.charts.arrays import Grown, Keys, Names, columns_of, integers, reals, text_of
from shadho_celery.charts.chart import Array, Indices, shortened
from shadho_celery.charts.columns import AttemptColumns, Codes, Depth, Label, Session, TrialColumns
from shadho_celery.core.checks import one_line
from shadho_celery.core.failures import read_failure
from shadho_celery.core.objectives import turned_first
from shadho_celery.core.records import CLASS_BYTES
from shadho_celery.core.trial import MAX_ATTEMPTS, MAX_COUNT, TrialState
from shadho_celery.results.study import StudyResults
from shadho_celery.study.trials import collector_paused

#: by depth: columns of numbers, of names, and of what takes longest to read; the trial's number is always read
NUMBERS = {
    Depth.LOSSES: ("loss", "budget", "violation"),
    Depth.FACTS: ("seconds", "started_at", "finished_at", "rung", "origin", "slots"),
}
TEXTS = {
    Depth.LOSSES: ("state", "compute_class", "sampler"),
    Depth.FACTS: ("subspace", "host"),
    Depth.PARAMS: ("code",),
}
LATE = ("error", "losses", "params")
#: columns of attempts
ATTEMPTS = (
    *("number", "attempt", "compute_class", "host", "worker", "slot"),
    *("queued_at", "started_at", "ended_at", "end", "copy", "placed"),
)
#: maximum number of labels that are kept, and of a slot
MOST_LABELS, MOST_SLOT = 2000, 10**6
#: beginnings of the descriptions of choices, and of domains whose values differ by factors
_CHOICES, _LOG = ("choice(", "pchoice("), ("log", "qlog")

#: maximum of a moment in seconds since the epoch, of any sign
MOST_MOMENT = 1e11
#: a number above those of all attempts; the first 32-bit number of a class in `AttemptRecord.placed`
_ATTEMPTS, _FLOAT = MAX_ATTEMPTS + 1, struct.Struct("<f")
#: exceptions of what is not JSON of numbers by name
_NO_NUMBERS = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)

_as_numbers = msgspec.json.Decoder(dict[str, float]).decode
_as_many = msgspec.json.Decoder(list[dict[str, float]]).decode

#: row of a table: values in the order of the columns that were selected
Row = Sequence[Any]


def names_of(depth: Depth, beyond: Depth | None = None) -> tuple[str, ...]:
    """Return the columns that are read of each trial: its number, and those of a depth, or those `beyond` another."""
    depths = [each for each in Depth if each <= depth and (beyond is None or each > beyond)]
    found = [name for each in depths for name in (*NUMBERS.get(each, ()), *TEXTS.get(each, ()))]
    return ("number", *found, *(LATE if Depth.PARAMS in depths else ()))


class GrowingTrials:
    """The trials of one study. Rows are put in as they are read from the store, and read again when they change."""

    def __init__(self, study: StudyResults) -> None:
        self._space, self._objectives = study.space, study.objectives
        self._choices = {label for label, text in self._space.items() if text.startswith(_CHOICES)}
        self._option = study.option
        #: limit on the number of trials in the latest run, or None
        self.asked = study.asked
        self._keys = Keys()
        self._reals = {name: Grown(math.nan, np.float64) for names in NUMBERS.values() for name in names}
        self._names = {
            name: Names() for name in ("failure", "failure_kind", *(name for names in TEXTS.values() for name in names))
        }
        self._labels: dict[str, Grown] = {}
        self._losses = {name: Grown(math.nan, np.float64) for name in self._objectives}
        #: by label and index: text of an option
        self._options: dict[tuple[str, float], str] = {}

    def __len__(self) -> int:
        """Return the number of trials."""
        return len(self._keys)

    def put(self, blocks: Iterable[Sequence[Row]], names: Sequence[str], *, are_new: bool = True) -> None:
        """Put in blocks of rows with these columns, the first of which is the number.

        Values of a wrong type count as missing. Rows of unknown trials are left out unless `are_new`.
        """
        with collector_paused():
            for block in blocks:
                self._put(block, names, are_new=are_new)

    def _put(self, block: Sequence[Row], names: Sequence[str], *, are_new: bool) -> None:
        columns = columns_of(block, names)
        numbers = integers(columns["number"], 0, MAX_COUNT)
        places = np.full(len(numbers), -1)
        is_one = numbers >= 0
        places[is_one] = (self._keys.places if are_new else self._keys.known)(numbers[is_one])
        if (places < 0).any():
            kept = np.flatnonzero(places >= 0)
            places, columns = places[kept], columns_of([block[place] for place in kept.tolist()], names)
        if not len(places):
            return
        count = len(self._keys)
        for name, column in columns.items():
            if name in self._reals and not self._reals[name].is_unused_by(column):
                most = MOST_MOMENT if name.endswith("_at") else math.inf
                self._reals[name].put(places, reals(column, is_finite=name != "loss", most=most), count)
            elif name in self._names:
                self._names[name].put(places, column, count)
        if "error" in columns:
            read = [
                read_failure(text_of(text)) if text and isinstance(text, str | bytes) else None
                for text in columns["error"]
            ]
            self._names["failure"].put(places, [each and str(each) for each in read], count)
            self._names["failure_kind"].put(places, [each and each.kind for each in read], count)
        if "losses" in columns and self._losses:
            self._put_losses(places, columns["losses"])
        if "params" in columns:
            self._put_params(places, columns["params"])

    def _put_losses(self, places: Indices, texts: Sequence[object]) -> None:
        for rows, names, values in _tables(texts):
            for name, column in zip(names, values.T, strict=True):
                if name in self._losses:
                    own = -column if self._objectives[name] == "maximize" else column
                    self._losses[name].put(places[rows], own, len(self._keys))

    def _put_params(self, places: Indices, texts: Sequence[object]) -> None:
        for rows, labels, values in _tables(texts):
            for label, column in zip(labels, values.T, strict=True):
                if label not in self._labels and len(self._labels) >= MOST_LABELS:
                    continue
                self._labels.setdefault(label, Grown(math.nan, np.float64)).put(places[rows], column, len(self._keys))
            for index, label in enumerate(labels):
                if label in self._choices:
                    self._name_options(label, values[:, index])

    def _name_options(self, label: str, drawn: Array) -> None:
        """Note the texts of the options of a choice among these draws."""
        for option in np.unique(drawn).tolist():
            if (label, option) not in self._options:
                # An option is found by its index, which is a whole number.
                index = int(option) if option.is_integer() else option
                self._options[label, option] = shortened(one_line(self._option(label, index)))

    def columns(self) -> TrialColumns:
        """Return the columns by number."""
        count, order = len(self._keys), self._keys.order
        real = {name: column.first(count)[order] for name, column in self._reals.items()}
        codes = {name: column.first(count, order) for name, column in self._names.items()}
        sign = turned_first(1.0, self._objectives)
        return TrialColumns(
            number=np.asarray(self._keys.values[order], np.intp),
            state=codes["state"],
            loss=sign * real["loss"],
            is_maximized=sign < 0,
            seconds=real["seconds"],
            started_at=real["started_at"],
            finished_at=real["finished_at"],
            # Earlier versions did not record slots.
            slots=np.where(real["slots"] >= 1, real["slots"], 1.0),
            subspace=codes["subspace"],
            compute_class=codes["compute_class"],
            host=codes["host"],
            sampler=codes["sampler"],
            code=codes["code"],
            failure=_of_failed(codes["failure"], codes["state"]),
            failure_kind=_of_failed(codes["failure_kind"], codes["state"]),
            budget=real["budget"],
            rung=_whole(real["rung"]),
            origin=_whole(real["origin"]),
            violation=real["violation"],
            losses={name: column.first(count)[order] for name, column in self._losses.items()}
            if len(self._losses) > 1
            else {},
            objectives=self._objectives,
            labels={name: self._label(name, self._labels[name].first(count)[order]) for name in sorted(self._labels)},
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


class GrowingAttempts:
    """The attempts of one study, put in as `GrowingTrials` does it."""

    def __init__(self, study: StudyResults) -> None:
        self._records = study.records
        self._classes: Sequence[str] = ()
        self._keys = Keys()
        self._moments = {name: Grown(math.nan, np.float64) for name in ("queued_at", "started_at", "ended_at")}
        self._predicted = Grown(math.nan, np.float64)
        self._names = {name: Names() for name in ("compute_class", "host", "worker", "end")}
        self._slot, self._copy = Grown(-1, np.int32), Grown(False, np.bool_)

    def put(self, blocks: Iterable[Sequence[Row]]) -> None:
        """Put in blocks of rows with the columns ATTEMPTS."""
        for block in blocks:
            columns = columns_of(block, ATTEMPTS)
            numbers = integers(columns["number"], 0, MAX_COUNT)
            attempts = integers(columns["attempt"], 1, MAX_ATTEMPTS)
            kept = np.flatnonzero((numbers >= 0) & (attempts > 0))
            if len(kept) < len(block):
                columns = columns_of([block[row] for row in kept.tolist()], ATTEMPTS)
            if len(kept):
                self._put(self._keys.places(numbers[kept] * _ATTEMPTS + attempts[kept]), columns)

    def _put(self, places: Indices, columns: Mapping[str, Sequence[object]]) -> None:
        count = len(self._keys)
        for name, column in self._moments.items():
            column.put(places, reals(columns[name], most=MOST_MOMENT), count)
        for name, texts in self._names.items():
            texts.put(places, columns[name], count)
        self._slot.put(places, integers(columns["slot"], 0, MOST_SLOT), count)
        self._copy.put(places, np.array([copy == 1 for copy in columns["copy"]]), count)
        self._predicted.put(places, self._predictions(columns["compute_class"], columns["placed"]), count)

    def _predictions(self, names: Sequence[object], placed: Sequence[object]) -> Array:
        """Return the seconds that were predicted of each attempt's own class, NaN if they were not."""
        texts = {name: text_of(name) for name in {*names} if isinstance(name, str | bytes)}
        if not {*texts.values()} <= {*self._classes}:
            # Classes are added while the study runs. The places of the known ones stay.
            self._classes = self._records.class_order()
        place_of = {text: CLASS_BYTES * place for place, text in enumerate(self._classes)}
        starts: dict[object, int] = {name: place_of[text] for name, text in texts.items() if text in place_of}
        found = [
            _FLOAT.unpack_from(packed, start)[0]
            if (start := starts.get(name)) is not None
            and isinstance(packed, bytes | memoryview)
            and len(packed) >= start + CLASS_BYTES
            else math.nan
            for name, packed in zip(names, placed, strict=True)
        ]
        return reals(found)

    def columns(self, now: float, *, is_running: bool) -> AttemptColumns:
        """Return the columns by trial and attempt. `now` is the time of reading.

        If the study was interrupted, its last record is the end of what had not ended: nothing runs since then.
        """
        count, order = len(self._keys), self._keys.order
        keys = self._keys.values[order]
        moments = {name: column.first(count)[order] for name, column in self._moments.items()}
        found = self._records.sessions()
        sessions = [Session(*row) for row in zip(*(found[name] for name in Session._fields), strict=True)]
        if not is_running:
            latest = [float(np.nanmax(column)) for column in moments.values() if not np.isnan(column).all()]
            known = [moment for name in ("since", "until") for moment in found[name] if moment is not None]
            now = min(now, max([*latest, *known], default=now))
        names = {name: column.first(count, order) for name, column in self._names.items()}
        return AttemptColumns(
            number=np.asarray(keys // _ATTEMPTS, np.intp),
            attempt=np.asarray(keys % _ATTEMPTS, np.intp),
            compute_class=names["compute_class"],
            host=names["host"],
            worker=names["worker"],
            slot=np.asarray(self._slot.first(count)[order], np.intp),
            queued_at=moments["queued_at"],
            started_at=moments["started_at"],
            ended_at=moments["ended_at"],
            end=names["end"],
            is_copy=self._copy.first(count)[order],
            predicted=self._predicted.first(count)[order],
            sessions=sessions,
            now=now,
        )


def read_trials(study: StudyResults) -> TrialColumns:
    """Return the trials of a study as its store has them now."""
    growing, names = GrowingTrials(study), names_of(Depth.PARAMS)
    growing.put(study.rows_of_trials(names), names)
    return growing.columns()


def read_attempts(study: StudyResults, now: float, *, is_running: bool = True) -> AttemptColumns:
    """Return the attempts of a study and its workers as its store has them now, as `GrowingAttempts.columns` does."""
    growing = GrowingAttempts(study)
    growing.put(study.rows_of_attempts(ATTEMPTS))
    return growing.columns(now, is_running=is_running)


def _whole(values: Array) -> Indices:
    """Return counts from 0 as integers, -1 where they are missing."""
    is_known = (values >= 0) & (values < 2**53)
    return np.where(is_known, values, -1.0).astype(np.intp)


def _tables(texts: Sequence[object]) -> Iterator[tuple[Indices, tuple[str, ...], Array]]:
    """Yield numbers by name from their JSON, as tables: rows, names, and values of shape (rows, names).

    Rows that are anything else are left out.
    """
    found: defaultdict[tuple[str, ...], tuple[list[int], list[list[float]]]] = defaultdict(lambda: ([], []))
    for row, numbers in enumerate(_decoded(texts)):
        rows, values = found[tuple(numbers)]
        rows.append(row)
        values.append([*numbers.values()])
    for names, (rows, values) in found.items():
        if names:
            yield np.array(rows), names, np.array(values)


def _decoded(texts: Sequence[Any]) -> Sequence[Mapping[str, float]]:
    """Return numbers by name from each JSON text; {} for anything else."""
    try:
        # One list of all rows takes a third of the time.
        found = _as_many(b"[%b]" % b",".join(texts) if isinstance(texts[0], bytes) else f"[{','.join(texts)}]")
    except _NO_NUMBERS:
        found = []
    return found if len(found) == len(texts) else [*map(_mapping, texts)]


def _mapping(text: Any) -> Mapping[str, float]:
    try:
        return _as_numbers(text)
    except _NO_NUMBERS:
        return {}


def _of_failed(failure: Codes, state: Codes) -> Codes:
    """Return the failures of FAILED trials only: a trial that was tried again has the error of its earlier attempt."""
    return Codes(np.where(state.is_in(TrialState.FAILED.value), failure.codes, -1).astype(np.int32), failure.names)
