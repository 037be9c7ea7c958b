"""Trials and attempts of a study as columns, from which charts are made, and the classes that read them from a store.

A chart gets `TrialColumns` and `AttemptColumns`. `GrowingTrials` and `GrowingAttempts` make these from the rows of a
store, and take further rows while the study runs. Rows may have values of any type, because a store may have been
written by strangers.
"""

from __future__ import annotations

import math
import struct
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shadho_celery.charts.chart import Array, Axis, Indices, Mark, Series, scale_of, shortened
from shadho_celery.core.checks import one_line
from shadho_celery.core.failures import read_failure
from shadho_celery.core.records import CLASS_BYTES, SessionRecord
from shadho_celery.core.trial import MAX_ATTEMPTS, MAX_COUNT, TrialState, turned_first
from shadho_celery.results.study import StudyResults
from shadho_celery.study.table import best_first, collector_paused

#: a selection of the entries of a column: a mask, indices (called places here), or a slice
Within = NDArray[np.bool_] | Indices | slice
#: ending of the names of series of infeasible trials
INFEASIBLE = ", infeasible"
#: minimum number of completed trials for an axis that is fitted to the better half of them
LEAST_FOCUSED = 10


class Depth(IntEnum):
    """Which facts of each trial are read. With fewer facts, a chart is drawn sooner."""

    #: facts for the history of the losses: state, class, sampler, loss, budget, violation and times
    LOSSES = 0
    #: also seconds, subspace, machine, rung and origin
    FACTS = 1
    #: also params, failures, versions of the code, and losses by name
    PARAMS = 2


@dataclass(frozen=True)
class Codes:
    """Column of texts, each stored as an index of `names`, because a study has many trials but few different texts."""

    #: index of each text in `names`, -1 for a missing one; shape (n,)
    codes: NDArray[np.int32]
    names: Sequence[str]

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.codes)

    def __getitem__(self, index: int) -> str | None:
        """Return a text, or None if it is missing."""
        code = int(self.codes[index])
        return None if code < 0 else self.names[code]

    def is_in(self, *names: str) -> NDArray[np.bool_]:
        """Return True for each entry whose text is one of `names`, shape (n,)."""
        return np.asarray(np.isin(self.codes, [code for code, name in enumerate(self.names) if name in names]), bool)

    def places(self, within: Within = slice(None)) -> Iterator[tuple[str, Indices]]:
        """Yield each name that occurs among the entries `within`, with the places of these entries."""
        among, codes = np.arange(len(self))[within], self.codes[within]
        for code, name in enumerate(self.names):
            places = among[codes == code]
            if len(places):
                yield name, places


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label of the space with its drawn values."""

    name: str
    #: values, shape (n,): numbers, or indices of `options`; NaN where the label is inactive
    values: Array
    #: texts of the options of a choice; empty for a label with numbers
    options: Sequence[str] = ()
    #: True if the label's distribution is logarithmic, and all values are above 0
    is_log: bool = False

    @property
    def is_active(self) -> NDArray[np.bool_]:
        """True for the trials in which the label is active, shape (n,)."""
        return ~np.isnan(self.values)


@dataclass(frozen=True, kw_only=True)
class TrialColumns:
    """The trials of a study by number. Each column has one entry per trial."""

    number: Indices
    state: Codes
    #: first loss, as the objective returned it, even if it is maximised; NaN if there is none
    loss: Array
    #: True if a greater loss is better
    is_maximized: bool
    #: seconds that the objective took; and below it two times in seconds since the epoch; NaN if not known
    seconds: Array
    started_at: Array
    finished_at: Array
    #: number of slots that the trial takes
    slots: Array
    subspace: Codes
    compute_class: Codes
    host: Codes
    sampler: Codes
    #: version of the code that ran
    code: Codes
    #: failure as `core.failures` shows it; and below it the kind, which failures at the same line of code share
    failure: Codes
    failure_kind: Codes
    #: budget, NaN for a trial without a budget; and rung, -1 for a trial without a rung
    budget: Array
    rung: Indices
    #: number of the trial that a promoted trial continues; -1 for others
    origin: Indices
    #: sum of the values of the violated constraints, which are those above 0
    violation: Array
    #: by name of the loss: its values, as the objective returned them; empty in a study with one loss
    losses: Mapping[str, Array]
    #: by name of the loss: "minimize" or "maximize"
    objectives: Mapping[str, str]
    labels: Mapping[str, Label]
    #: limit on the number of trials; None without one
    asked: int | None = None

    def __len__(self) -> int:
        """Return the number of trials."""
        return len(self.number)

    @cached_property
    def is_complete(self) -> NDArray[np.bool_]:
        """True for COMPLETE trials, shape (n,)."""
        return self.state.is_in(TrialState.COMPLETE.value)

    @cached_property
    def is_infeasible(self) -> NDArray[np.bool_]:
        """True for trials that violate a constraint, shape (n,)."""
        return np.asarray(self.violation > 0, bool)

    @cached_property
    def slot_seconds(self) -> Array:
        """Seconds of the objective times the slots of the trial, shape (n,)."""
        return self.seconds * self.slots

    @cached_property
    def is_rated(self) -> NDArray[np.bool_]:
        """True for COMPLETE, feasible trials with a finite loss and the greatest budget of such trials, shape (n,)."""
        rated = self.is_complete & np.isfinite(self.loss) & ~self.is_infeasible
        budget = np.where(np.isnan(self.budget), math.inf, self.budget)
        return np.asarray(rated & (budget == budget[rated].max(initial=-math.inf)), bool)

    @cached_property
    def is_current(self) -> NDArray[np.bool_]:
        """True for trials of unknown code, and for trials under the code of the trial that ended last, shape (n,)."""
        codes, known = self.code.codes, np.flatnonzero((self.code.codes >= 0) & np.isfinite(self.finished_at))
        latest = codes[known[self.finished_at[known].argmax()]] if len(known) else -1
        return np.asarray((codes < 0) | (codes == latest), bool)

    @cached_property
    def merit(self) -> Array:
        """The loss with the sign for which less is better, shape (n,)."""
        return -self.loss if self.is_maximized else self.loss

    @property
    def loss_name(self) -> str:
        """Name of the first loss."""
        return next(iter(self.objectives), "loss")

    def loss_axis(self, share: float = 0.5) -> Axis:
        """Return the axis of the first loss, which pages fit to the better `share` of the completed trials."""
        known = self.loss[self.is_complete & np.isfinite(self.loss)]
        parts = [1.0 - share, 1.0] if self.is_maximized else [0.0, share]
        low, high = np.quantile(known, parts).tolist() if len(known) >= LEAST_FOCUSED else [0.0, 0.0]
        apart = 0.05 * (high - low)
        focus = (max(low - apart, 0.9 * low) if low > 0 else low - apart, high + apart)
        return Axis(
            name=f"{self.loss_name} (maximize)" if self.is_maximized else self.loss_name,
            scale=scale_of(known),
            focus=focus if 0 < apart < math.inf else (),
        )

    @cached_property
    def ranking(self) -> Indices:
        """Places of the trials from best to worst, shape (n,)."""
        return best_first(self.number, self.merit, self.violation, self.budget, self.is_complete)

    @cached_property
    def best(self) -> int | None:
        """Number of the best trial, which is COMPLETE and has a loss; None if there is none."""
        # The minimum is found much faster than a sorted `ranking`, which is needed as long as no trial is rated.
        places = np.flatnonzero(self.is_rated)
        places = places[[self.merit[places].argmin()]] if len(places) else self.ranking[:1]
        return int(self.number[places[0]]) if (self.is_complete & ~np.isnan(self.loss))[places].any() else None

    @cached_property
    def began_at(self) -> float:
        """Time at which the first trial began; NaN if none has begun."""
        known = self.started_at[np.isfinite(self.started_at)]
        return float(known.min()) if len(known) else math.nan


def points_by_class(
    trials: TrialColumns, x: Array, within: Within, state: str = "", form: str = "filled"
) -> Iterator[Series]:
    """Yield points of the losses of the trials `within` over `x`, in one series for each class.

    Infeasible trials have separate series, which come last. `state` is appended to the names of the other series, whose
    points have this `form`.
    """
    among, is_infeasible = np.arange(len(trials))[within], trials.is_infeasible[within]
    for group, end, look in ((False, state, form), (True, INFEASIBLE, "dash")):
        for name, own in trials.compute_class.places(among[is_infeasible == group]):
            points = {"x": x[own], "y": trials.loss[own], "number": trials.number[own]}
            yield Series.of(f"{name}{end}", Mark.POINTS, f"class {name}", look, **points)


class Session(SessionRecord, frozen=True, kw_only=True):
    """A period in which a worker could run trials of a study, with methods that divide its seconds into intervals."""

    def seconds(self, edges: Array, now: float) -> Array:
        """Return the seconds of the session within each interval between neighbouring `edges`, shape (edges - 1,)."""
        return np.diff(np.clip(edges, self.since, now if self.until is None else self.until))

    def others_seconds(self, edges: Array, now: float) -> Array:
        """Return the slot seconds of other studies' trials in each interval between `edges`, shape (edges - 1,)."""
        if not self.others:
            return np.zeros(len(edges) - 1)
        times, slots = np.array(self.others, float).T
        knots = np.append(np.maximum.accumulate(times), now if self.until is None else self.until)
        used = np.cumsum(np.minimum(slots, self.slots) * np.maximum(np.diff(knots), 0.0))
        return np.diff(np.interp(edges, knots, np.append(0.0, used)))


@dataclass(frozen=True, kw_only=True)
class AttemptColumns:
    """The attempts of a study's trials, and the workers that could run them. Times are in seconds since the epoch."""

    #: number of the trial, and of the attempt within it
    number: Indices
    attempt: Indices
    compute_class: Codes
    host: Codes
    worker: Codes
    #: number of the worker's slot; -1 if not known
    slot: Indices
    queued_at: Array
    started_at: Array
    ended_at: Array
    #: how the attempt ended, such as "complete" or "lost"; missing while it lasts
    end: Codes
    is_copy: NDArray[np.bool_]
    #: seconds that the scheduler predicted when it placed the attempt on its class; NaN without a prediction
    predicted: Array
    sessions: Sequence[Session]
    #: time of reading; for a study that does not run, the time of its last record
    now: float

    def __len__(self) -> int:
        """Return the number of attempts."""
        return len(self.number)

    @cached_property
    def until(self) -> Array:
        """The end of each attempt that has started, or the time of reading; NaN for one that has not started."""
        return np.where(np.isnan(self.started_at), math.nan, np.where(np.isnan(self.ended_at), self.now, self.ended_at))

    @property
    def has_others(self) -> bool:
        """True if workers have run trials of other studies."""
        return any(session.others for session in self.sessions)

    @cached_property
    def classes(self) -> list[str]:
        """Names of the compute classes that have attempts or workers, sorted."""
        return sorted({*self.compute_class.names, *(session.compute_class for session in self.sessions)})


Integers = NDArray[np.int64]


class Grown:
    """Array that grows at its end. It takes no memory as long as all values are `fill`."""

    def __init__(self, fill: float, kind: type[np.generic]) -> None:
        """`fill` is the value of places for which no value was put in."""
        self._fill = np.array(fill, kind)
        self._values: NDArray[Any] = np.empty(0, kind)

    def put(self, places: Indices, values: NDArray[Any], count: int) -> None:
        """Put in values at these places. The array then has at least `count` places."""
        if not len(self._values) and np.array_equal(values, np.full_like(values, self._fill), equal_nan=True):
            return
        if count > len(self._values):
            room = np.full(max(count, 2 * len(self._values), 1024) - len(self._values), self._fill)
            self._values = np.concatenate([self._values, room])
        self._values[places] = values

    def first(self, count: int) -> NDArray[Any]:
        """Return the first `count` values, as a view that may be read-only."""
        if not len(self._values):
            return np.broadcast_to(self._fill, count)
        self.put(np.empty(0, np.intp), np.empty(0, self._values.dtype), count)
        return self._values[:count]


class Keys:
    """Places of rows by their keys, which are whole numbers from 0."""

    def __init__(self) -> None:
        self._keys = Grown(-1, np.int64)
        self._count = 0
        #: places in the order of their keys
        self.order: Indices | slice = slice(0, 0)

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._count

    @property
    def values(self) -> Integers:
        """The key of each place."""
        return self._keys.first(self._count)

    def known(self, keys: Integers) -> Indices:
        """Return the place of each key, -1 for an unknown key."""
        if not self._count:
            return np.full(len(keys), -1, np.intp)
        ranks = np.minimum(np.searchsorted(self.values[self.order], keys), self._count - 1)
        found = np.arange(self._count)[self.order][ranks]
        return np.where(self.values[found] == keys, found, -1)

    def places(self, keys: Integers) -> Indices:
        """Return the place of each key. Each new key gets the next place."""
        new = np.unique(keys[self.known(keys) < 0])
        if len(new):
            places = np.arange(self._count, self._count + len(new))
            self._count += len(new)
            self._keys.put(places, new, self._count)
            # This is fast, because most keys are in their order. By a slice, columns are read without a copy.
            order = np.argsort(self.values, kind="stable")
            self.order = slice(0, self._count) if bool((np.diff(order) > 0).all()) else order
        return self.known(keys)


class Names:
    """Column of texts, each as the index of its name."""

    def __init__(self) -> None:
        self._codes = Grown(-1, np.int32)
        #: by value in the store, a text or its bytes: index of the name; -1 for None
        self._known: dict[object, int] = {None: -1}
        self._places: dict[str, int] = {}

    def put(self, places: Indices, values: Sequence[object], count: int) -> None:
        """Put in texts at these places. The column then has at least `count` places."""
        try:
            codes = [*map(self._known.__getitem__, values)]
        except (KeyError, TypeError):
            codes = [*map(self._code, values)]
        self._codes.put(places, np.array(codes, np.int32), count)

    def first(self, count: int, order: Indices | slice) -> Codes:
        """Return the first `count` texts, permuted by `order`, as codes: places in the sorted list of distinct texts.

        The order in which texts arrived has no influence on the codes.
        """
        names = [*self._places]
        sorted_ = sorted(range(len(names)), key=names.__getitem__)
        new = np.full(len(names) + 1, -1, np.int32)
        new[sorted_] = np.arange(len(names))
        return Codes(new[self._codes.first(count)[order]], [shortened(one_line(names[place])) for place in sorted_])

    def _code(self, value: object) -> int:
        if not isinstance(value, str | bytes):
            return -1
        if value not in self._known:
            self._known[value] = self._places.setdefault(text_of(value), len(self._places))
        return self._known[value]


def text_of(value: str | bytes) -> str:
    """Return a text, decoded if it is bytes. Bytes that are not UTF-8 become escapes."""
    return value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")


#: greatest finite number
FINITE = sys.float_info.max


def reals(column: Sequence[object], most: float = FINITE) -> Array:
    """Return a column as floats. Values that are not numbers, and numbers beyond `most`, become NaN."""
    try:
        found = np.array(column, float)
    except (TypeError, ValueError):
        found = np.array([value if isinstance(value, (int, float)) else math.nan for value in column], float)
    found[np.abs(found) > most] = math.nan
    return found


def integers(column: Sequence[object], least: int, most: int) -> Integers:
    """Return a column as integers. Values that are not integers from `least` to `most` become -1."""
    if {*map(type, column)} != {int}:
        column = [value if type(value) is int else -1 for value in column]
    # All integers fit, because those of a database have at most 64 bits.
    found = np.array(column, np.int64)
    return np.where((found >= least) & (found <= most), found, -1)


def columns_of(rows: Iterable[Sequence[Any]], names: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return rows as columns by name; empty columns if there are no rows."""
    return dict(zip(names, [*zip(*rows, strict=True)] or [()] * len(names), strict=True))


#: by depth: columns with numbers, and columns with texts. LATE are the columns that take longest to read, at depth
#: PARAMS. The trial's number is always read
NUMBERS = {
    Depth.LOSSES: ("loss", "budget", "violation", "started_at", "finished_at"),
    Depth.FACTS: ("seconds", "rung", "origin", "slots"),
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
#: maximum number of labels that are kept; greatest number of a slot
MOST_LABELS, MOST_SLOT = 2000, 10**6
#: beginnings of the descriptions of choices, and of logarithmic domains
_CHOICES, _LOG = ("choice(", "pchoice("), ("log", "qlog")

#: times in seconds since the epoch that are greater than this count as missing
MOST_MOMENT = 1e11
#: a number greater than all numbers of attempts; format of the predicted seconds in `AttemptRecord.placed`, the first
#: number of each class
_ATTEMPTS, _FLOAT = MAX_ATTEMPTS + 1, struct.Struct("<f")
#: exceptions of the decoders below for text that is not a JSON object of numbers
_NO_NUMBERS = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)

_as_numbers = msgspec.json.Decoder(dict[str, float]).decode
_as_many = msgspec.json.Decoder(list[dict[str, float]]).decode

#: row of a table: values in the order of the selected columns
Row = Sequence[Any]


def names_of(depth: Depth, beyond: Depth | None = None) -> tuple[str, ...]:
    """Return the names of the columns that are read at `depth`, without the columns that are read at `beyond`."""
    depths = [each for each in Depth if each <= depth and (beyond is None or each > beyond)]
    found = [name for each in depths for name in (*NUMBERS.get(each, ()), *TEXTS.get(each, ()))]
    return ("number", *found, *(LATE if Depth.PARAMS in depths else ()))


class Growing:
    """Growing columns of one study. A row that has changed in the store is put in again, and replaces the old row."""

    def __init__(self, numbers: Iterable[str], texts: Iterable[str]) -> None:
        self._keys = Keys()
        self._reals = {name: Grown(math.nan, np.float64) for name in numbers}
        self._names = {name: Names() for name in texts}

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._keys)

    def _fill(self, places: Indices, columns: Mapping[str, Sequence[Any]]) -> None:
        """Put in the columns at these places. Values of a wrong type count as missing; unknown columns are ignored."""
        count = len(self._keys)
        for name, column in columns.items():
            if name in self._reals:
                most = MOST_MOMENT if name.endswith("_at") else {"slot": MOST_SLOT, "loss": math.inf}.get(name, FINITE)
                self._reals[name].put(places, reals(column, most), count)
            elif name in self._names:
                self._names[name].put(places, column, count)

    def _facts(self) -> dict[str, Any]:
        """Return the columns by name, in the order of the keys."""
        count, order = len(self._keys), self._keys.order
        found: dict[str, Any] = {name: column.first(count)[order] for name, column in self._reals.items()}
        return found | {name: column.first(count, order) for name, column in self._names.items()}


class GrowingTrials(Growing):
    """The trials of one study as growing columns, by number."""

    def __init__(self, study: StudyResults) -> None:
        texts = ("failure", "failure_kind", *(name for names in TEXTS.values() for name in names))
        super().__init__((name for names in NUMBERS.values() for name in names), texts)
        self._space, self._objectives = study.space, study.objectives
        self._choices = {label for label, text in self._space.items() if text.startswith(_CHOICES)}
        self._option = study.option
        #: limit on the number of trials in the latest run; None if it has none
        self.asked = study.asked
        self._labels: dict[str, Grown] = {}
        self._losses = {name: Grown(math.nan, np.float64) for name in self._objectives}
        #: by label and index: text of an option
        self._options: dict[tuple[str, float], str] = {}

    def put(self, blocks: Iterable[Sequence[Row]], names: Sequence[str], *, are_new: bool = True) -> None:
        """Put in blocks of rows. `names` are the columns of a row, among them the number.

        Rows of trials that are not known yet are left out unless `are_new`.
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
        self._fill(places, columns)
        if "error" in columns:
            read = [
                read_failure(text_of(text)) if text and isinstance(text, str | bytes) else None
                for text in columns["error"]
            ]
            self._fill(places, {"failure": [each and str(each) for each in read]})
            self._fill(places, {"failure_kind": [each and each.kind for each in read]})
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
        """Store the texts of the options that occur among these drawn values of a choice."""
        for option in np.unique(drawn).tolist():
            if (label, option) not in self._options:
                # The index of an option is an int, but a drawn value is a float here.
                index = int(option) if option.is_integer() else option
                self._options[label, option] = shortened(one_line(self._option(label, index)))

    def columns(self) -> TrialColumns:
        """Return the columns, sorted by the number of the trial."""
        count, order = len(self._keys), self._keys.order
        facts, sign = self._facts(), turned_first(1.0, self._objectives)
        is_failed = facts["state"].is_in(TrialState.FAILED.value)
        for name in ("failure", "failure_kind"):
            # A trial that was retried still has the error of its earlier attempt, so only those of FAILED trials count.
            codes = np.where(is_failed, facts[name].codes, -1).astype(np.int32)
            facts[name] = Codes(codes, facts[name].names)
        facts |= {name: _whole(facts[name]) for name in ("rung", "origin")}
        facts["slots"] = np.where(facts["slots"] >= 1, facts["slots"], 1.0)
        losses = self._losses if len(self._losses) > 1 else {}
        return TrialColumns(
            number=np.asarray(self._keys.values[order], np.intp),
            **(facts | {"loss": sign * facts["loss"]}),
            is_maximized=sign < 0,
            losses={name: column.first(count)[order] for name, column in losses.items()},
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
            options=[self._options.get((name, float(index)), "") for index in range(most + 1)],
            # A rounded value may be 0, which a logarithmic axis cannot show.
            is_log=self._space.get(name, "").startswith(_LOG) and not bool((values <= 0).any()),
        )


class GrowingAttempts(Growing):
    """The attempts of one study as growing columns, by the number of the trial and of the attempt."""

    def __init__(self, study: StudyResults) -> None:
        numbers = ("queued_at", "started_at", "ended_at", "predicted", "slot", "copy")
        super().__init__(numbers, ("compute_class", "host", "worker", "end"))
        self._records = study.records
        self._classes: Sequence[str] = ()

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
                columns["predicted"] = self._predictions(columns["compute_class"], columns["placed"])
                self._fill(self._keys.places(numbers[kept] * _ATTEMPTS + attempts[kept]), columns)

    def _predictions(self, names: Sequence[object], placed: Sequence[object]) -> list[float]:
        """Return the seconds that were predicted for each attempt on its class; NaN without a prediction."""
        texts = {name: text_of(name) for name in {*names} if isinstance(name, str | bytes)}
        if not {*texts.values()} <= {*self._classes}:
            # Classes may be added while the study runs. The positions of known classes do not change.
            self._classes = self._records.class_order()
        place_of = {text: CLASS_BYTES * place for place, text in enumerate(self._classes)}
        starts: dict[object, int] = {name: place_of[text] for name, text in texts.items() if text in place_of}
        return [
            _FLOAT.unpack_from(packed, start)[0]
            if (start := starts.get(name)) is not None
            and isinstance(packed, bytes | memoryview)
            and len(packed) >= start + CLASS_BYTES
            else math.nan
            for name, packed in zip(names, placed, strict=True)
        ]

    def columns(self, now: float, *, is_running: bool) -> AttemptColumns:
        """Return the columns, sorted by trial and attempt. `now` is the time of reading.

        If the study does not run, attempts and workers without an end are taken to end at the time of the last record.
        """
        facts, keys = self._facts(), self._keys.values[self._keys.order]
        found = self._records.sessions()
        sessions = [Session(**dict(zip(found, row, strict=True))) for row in zip(*found.values(), strict=True)]
        if not is_running:
            moments = [facts[name] for name in ("queued_at", "started_at", "ended_at")]
            latest = [float(np.nanmax(column)) for column in moments if not np.isnan(column).all()]
            known = [moment for name in ("since", "until") for moment in found[name] if moment is not None]
            now = min(now, max([*latest, *known], default=now))
        facts["slot"], is_copy = _whole(facts["slot"]), facts.pop("copy") == 1
        return AttemptColumns(
            number=np.asarray(keys // _ATTEMPTS, np.intp),
            attempt=np.asarray(keys % _ATTEMPTS, np.intp),
            is_copy=is_copy,
            sessions=sessions,
            now=now,
            **facts,
        )


def read_trials(study: StudyResults) -> TrialColumns:
    """Return the trials of a study as its store has them now."""
    growing, names = GrowingTrials(study), names_of(Depth.PARAMS)
    growing.put(study.rows_of_trials(names), names)
    return growing.columns()


def read_attempts(study: StudyResults, now: float, *, is_running: bool = True) -> AttemptColumns:
    """Return the attempts and workers of a study as its store has them now. The arguments are as in
    `GrowingAttempts.columns`.
    """
    growing = GrowingAttempts(study)
    growing.put(study.rows_of_attempts(ATTEMPTS))
    return growing.columns(now, is_running=is_running)


def _whole(values: Array) -> Indices:
    """Return a column of whole numbers as integers, with -1 for values that are missing, negative or too large."""
    is_known = (values >= 0) & (values < 2**53)
    return np.where(is_known, values, -1.0).astype(np.intp)


def _tables(texts: Sequence[object]) -> Iterator[tuple[Indices, tuple[str, ...], Array]]:
    """Yield tables of the numbers in JSON objects: indices of texts, names, and values of shape (texts, names).

    There is one table for each set of names. Texts that are not objects of numbers are left out.
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
    """Return the numbers by name from each JSON text; {} for a text that is not an object of numbers."""
    try:
        # Decoding all texts as one list takes a third of the time.
        found = _as_many(b"[%b]" % b",".join(texts) if isinstance(texts[0], bytes) else f"[{','.join(texts)}]")
    except _NO_NUMBERS:
        found = []
    return found if len(found) == len(texts) else [*map(_mapping, texts)]


def _mapping(text: Any) -> Mapping[str, float]:
    try:
        return _as_numbers(text)
    except _NO_NUMBERS:
        return {}
