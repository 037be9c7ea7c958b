"""The trials of a study as columns, from which charts are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shadho_celery.charts.chart import Array, Cell, Indices, Mark, Series, cells
from shadho_celery.core.trial import TrialState

#: some places of a column: True for each of them, or their indices
Within = NDArray[np.bool_] | Indices | slice
#: what the names of series of infeasible trials end with
INFEASIBLE = ", infeasible"


class Depth(IntEnum):
    """How much is read of each trial. The less a chart needs, the sooner it is drawn."""

    #: what the history of the losses needs: state, class, sampler, loss, budget and violation
    LOSSES = 0
    #: also times, subspace, machine, rung and origin
    FACTS = 1
    #: also params, failures, versions of the code, and losses by name
    PARAMS = 2


@dataclass(frozen=True)
class Codes:
    """Column of texts, each as the index of its name: a study has many trials and few names."""

    #: index of each text in `names`, -1 for a missing one; shape (n,)
    codes: NDArray[np.int32]
    names: Sequence[str]

    @classmethod
    def of(cls, values: Iterable[str | None]) -> Codes:
        """Return a column of these texts. Its names are sorted."""
        texts = [*values]
        names = sorted({text for text in texts if text is not None})
        place: dict[str | None, int] = {name: index for index, name in enumerate(names)}
        return cls(np.array([place.get(text, -1) for text in texts], np.int32), names)

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.codes)

    def __getitem__(self, index: int) -> str | None:
        """Return a text, or None if it is missing."""
        code = int(self.codes[index])
        return None if code < 0 else self.names[code]

    def is_in(self, *names: str) -> NDArray[np.bool_]:
        """Return where the text is one of `names`, shape (n,)."""
        return np.asarray(np.isin(self.codes, [code for code, name in enumerate(self.names) if name in names]), bool)

    def texts(self, places: Indices) -> list[str]:
        """Return the texts at some places, "" for a missing one."""
        return [self.names[code] if code >= 0 else "" for code in self.codes[places].tolist()]

    def places(self, within: Within = slice(None)) -> Iterator[tuple[str, Indices]]:
        """Yield each name that occurs, with its places, of those that are `within`."""
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
    #: first loss, in the objective's own direction; NaN without one
    loss: Array
    #: True if a greater loss is better
    is_maximized: bool
    #: seconds of the objective, and moments in seconds since the epoch; NaN if not known
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
    #: a failure as `core.failures` shows it, and its kind, which is equal for failures of one line of code
    failure: Codes
    failure_kind: Codes
    #: budget (NaN for all of it) and rung (-1 without budgets)
    budget: Array
    rung: Indices
    #: number of the trial that a promoted trial continues; -1 for others
    origin: Indices
    #: sum of the constraints above 0
    violation: Array
    #: losses by name, in the objective's own direction; empty in a study of one loss without a name
    losses: Mapping[str, Array]
    #: direction of each loss by name
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

    def by_class(self, within: Within) -> Iterator[tuple[str, bool, Indices]]:
        """Yield places of trials `within` by class, first of feasible trials, then of infeasible ones (True)."""
        among, is_infeasible = np.arange(len(self))[within], self.is_infeasible[within]
        for group in (False, True):
            for name, places in self.compute_class.places(among[is_infeasible == group]):
                yield name, group, places

    @cached_property
    def slot_seconds(self) -> Array:
        """Seconds of the objective times the slots of the trial, shape (n,)."""
        return self.seconds * self.slots

    @cached_property
    def is_rated(self) -> NDArray[np.bool_]:
        """True for COMPLETE, feasible trials with a finite loss and the greatest budget so far, shape (n,)."""
        rated = self.is_complete & np.isfinite(self.loss) & ~self.is_infeasible
        budget = np.where(np.isnan(self.budget), math.inf, self.budget)
        return np.asarray(rated & (budget == budget[rated].max(initial=-math.inf)), bool)

    @cached_property
    def is_current(self) -> NDArray[np.bool_]:
        """True for trials under the code of the trial that ended last, and for those of unknown code, shape (n,)."""
        codes, known = self.code.codes, np.flatnonzero((self.code.codes >= 0) & np.isfinite(self.finished_at))
        latest = codes[known[self.finished_at[known].argmax()]] if len(known) else -1
        return np.asarray((codes < 0) | (codes == latest), bool)

    @cached_property
    def merit(self) -> Array:
        """The loss in the direction in which less is better, shape (n,)."""
        return -self.loss if self.is_maximized else self.loss

    @cached_property
    def ranking(self) -> Indices:
        """Places of the trials from best to worst, shape (n,): the order of `core.best.merit`."""
        has_no_loss = np.isnan(self.loss)
        budget = np.where(np.isnan(self.budget), math.inf, self.budget)
        violation = np.where(np.isnan(self.violation), 0.0, self.violation)
        keys = (self.merit, ~self.is_complete, -budget, violation)
        # Trials without a loss are all alike; numpy sorts by the last key first.
        return np.lexsort([self.number, *(np.where(has_no_loss, 0, key) for key in keys), has_no_loss])

    @cached_property
    def best(self) -> int | None:
        """Number of the first trial of the `ranking`, if it is COMPLETE and has a loss; else None."""
        places = np.flatnonzero(self.is_complete & ~np.isnan(self.loss))
        violation = np.where(np.isnan(self.violation), 0.0, self.violation)
        budget = np.where(np.isnan(self.budget), math.inf, self.budget)
        # Much faster than sorting all trials.
        for key in (violation, -budget, self.merit):
            places = places[key[places] == key[places].min(initial=math.inf)]
        return int(self.number[places].min()) if len(places) else None

    @cached_property
    def began_at(self) -> float:
        """Time at which the first trial began; NaN before it."""
        known = self.started_at[np.isfinite(self.started_at)]
        return float(known.min()) if len(known) else math.nan


def points_by_class(
    trials: TrialColumns,
    x: Array,
    within: Within,
    more: Mapping[str, Callable[[Indices], list[Cell]]] = MappingProxyType({}),
    *,
    state: str = "",
    form: str = "filled",
) -> Iterator[Series]:
    """Yield points of the losses of trials over `x`, a series for each class.

    Infeasible trials have series of their own. `more` makes further columns. `state` is added to the series' names.
    """
    for name, is_infeasible, own in trials.by_class(within):
        columns = {"x": cells(x[own]), "y": cells(trials.loss[own]), "number": cells(trials.number[own])}
        yield Series(
            name=f"{name}{INFEASIBLE if is_infeasible else state}",
            mark=Mark.POINTS,
            colour=f"class {name}",
            form="dash" if is_infeasible else form,
            columns={**columns, **{column: make(own) for column, make in more.items()}},
        )


class Session(NamedTuple):
    """A time in which a worker could run trials of a study. Moments are in seconds since the epoch."""

    worker: str
    compute_class: str
    host: str
    slots: int
    since: float
    #: None while it lasts
    until: float | None = None
    #: why it ended, such as "preempted"
    reason: str | None = None
    #: mean number of slots that ran trials of other studies, by the time from which on
    others: Sequence[tuple[float, float]] = ()

    def seconds(self, edges: Array, now: float) -> Array:
        """Return for how many seconds it lasted between each two of these moments, shape (edges - 1,)."""
        return np.diff(np.clip(edges, self.since, now if self.until is None else self.until))

    def others_seconds(self, edges: Array, now: float) -> Array:
        """Return the slot seconds of trials of other studies between each two of these moments, shape (edges - 1,)."""
        if not self.others:
            return np.zeros(len(edges) - 1)
        times, slots = np.array(self.others, float).T
        knots = np.append(np.maximum.accumulate(times), now if self.until is None else self.until)
        used = np.cumsum(np.minimum(slots, self.slots) * np.maximum(np.diff(knots), 0.0))
        return np.diff(np.interp(edges, knots, np.append(0.0, used)))


@dataclass(frozen=True, kw_only=True)
class AttemptColumns:
    """The attempts of a study's trials, and the workers that could run them. Moments are in seconds since the epoch."""

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
    #: seconds that the scheduler expected of the attempt's class when it placed the attempt; NaN without a prediction
    predicted: Array
    sessions: Sequence[Session]
    #: time of reading, or of the last record of a study that does not run
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
