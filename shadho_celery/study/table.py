"""Table of the finished trials of a study (`FinishedTrials`), and summaries of it by subspace, class and rung.

The summary of a rung has the numbers of trials and their seconds by class, and how well ranks agree with the next rung.
`StudyTrials` adds the unfinished trials; the scheduler and readers of a store use it.
"""

from __future__ import annotations

import gc
import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shadho_celery.core.code import Digest
from shadho_celery.core.columns import (
    FLAG,
    MOMENT,
    NAMED,
    NO_MERIT,
    PACKED,
    STATE,
    Merit,
    Packed,
    Summary,
    merit,
    of_trial,
)
from shadho_celery.core.failures import Failures
from shadho_celery.core.trial import COUNTED, Attempt, Losses, Outcome, Params, Trial, TrialState, violation_of
from shadho_celery.errors import StoreError, StoreOutage
from shadho_celery.store.base import Store, StudyRecord
from shadho_celery.study.forecast import FEWEST, Forecast
from shadho_celery.study.front import Front
from shadho_celery.study.repeats import Repeated, Repeats

Array = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]
Indices = NDArray[np.intp]


class OnClass(Struct, frozen=True, kw_only=True):
    """Numbers of a rung's or a subspace's finished trials on one compute class, and their median seconds."""

    complete: int
    pruned: int
    failed: int
    #: median seconds of the complete trials; None if there is no complete trial
    seconds: float | None


class RungSummary(Struct, frozen=True, kw_only=True):
    """Summary of the finished trials of one rung."""

    budget: float
    #: summaries by compute class; trials that were never sent are left out
    classes: Mapping[str, OnClass]
    #: trust of a `Forecast` in the losses on this rung, from 0 to 1; None if too few trials ran on the next rung, too
    agreement: float | None


def best_first(numbers: Integers, losses: Array, violations: Array, budgets: Array, is_complete: Bools) -> Indices:
    """Return the indexes of trials from best to worst, in the order of `core.columns.merit`, then by number.

    The arrays have shape (trials,). NaN means that a trial has no loss, no constraint, or no budget.
    """
    has_no_loss = np.isnan(losses)
    budgets = np.where(np.isnan(budgets), np.inf, budgets)
    keys = (losses, ~is_complete, -budgets, np.where(np.isnan(violations), 0.0, violations))
    # All trials without a loss are equal, so their other keys are 0. numpy sorts by the last key first.
    return np.lexsort([numbers, *(np.where(has_no_loss, 0, key) for key in keys), has_no_loss])


def agreements(
    rungs: Integers, budgets: Array, numbers: Integers, origins: Integers, losses: Array
) -> list[tuple[int, float, float | None]]:
    """Return each rung with its budget, and the trust of a `Forecast` in its losses, None if fewer than FEWEST trials
    ran on the next rung, too. Sorted by budget.

    The arrays have an entry for each finished trial, shape (trials,). `origins` has for a promoted trial the number of
    the first trial with its params, and a negative number for other trials. A trial whose loss is NaN is ranked worst.
    """
    found: list[tuple[int, float, float | None]] = []
    origins = np.where(origins < 0, numbers, origins)
    losses = np.where(np.isnan(losses), np.inf, losses)
    known = np.isfinite(budgets)
    for rung, budget in np.unique(np.column_stack([rungs[known], budgets[known]]), axis=0).tolist():
        mine, above = (budgets == budget) & (rungs == rung), rungs == rung + 1
        here = dict(zip(origins[mine].tolist(), losses[mine].tolist(), strict=True))
        promoted = dict(zip(origins[above].tolist(), losses[above].tolist(), strict=True))
        both = sum(math.isfinite(loss) and math.isfinite(here.get(each, math.inf)) for each, loss in promoted.items())
        agreement = Forecast([here, promoted]).trust(0) if both >= FEWEST else None
        found.append((int(rung), budget, agreement))
    return sorted(found, key=itemgetter(1))


#: function that reads the trials with these numbers from a store; it may return them in any order
Read = Callable[[Sequence[int]], Iterable[Trial]]

#: if no trial runs for more than this many seconds, this is taken as a pause between two runs
PAUSE_SECONDS = 60.0

#: number of trials that are read from the store at a time
BLOCK = 2000

#: facts of a row that are texts, stored as indexes of a list of names
_NAMED = [name for name, form in PACKED.items() if form is NAMED]
#: facts of a row that are numbers
_NUMBERS = {name: form for name, form in PACKED.items() if form not in (NAMED, STATE)}
#: types of a row's columns; `violation` is the sum of the violated constraints, and `warned` is 1 for a trial with a
#: warning
_TYPES = {
    **{name: form.code for name, form in _NUMBERS.items()},
    "state": STATE.code,
    **dict.fromkeys(_NAMED, NAMED.code),
    "violation": "d",
    "warned": "B",
}
_ROW = struct.Struct("<" + "".join(_TYPES.values()))
_COLUMNS = np.dtype([(name, f"<{kind}") for name, kind in _TYPES.items()])
#: for each column in _NUMBERS: the number that stands for None
_NONES = [form.none for form in _NUMBERS.values()]
#: functions that return the facts in _NUMBERS, and those in _NAMED, of a trial; then the same for a summary
_OF_TRIAL = attrgetter(*map(of_trial, _NUMBERS)), attrgetter(*map(of_trial, _NAMED))
_OF_SUMMARY = attrgetter(*_NUMBERS), attrgetter(*_NAMED)
#: facts of a row that are fields of Trial; then those that are fields of its Outcome
_OWN = [name for name in PACKED if name in Trial.__struct_fields__ and name != "state"]
_OF_OUTCOME = [name for name in PACKED if name not in Trial.__struct_fields__]
_STATES = tuple(TrialState)
#: by number in a column: the value of a flag
_FLAGS = {-1: None, 0: False, 1: True}
_INDEX_OF = {state: index for index, state in enumerate(_STATES)}
_Table = NDArray[np.void]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector while trials are loaded.

    Records have no reference cycles. For each million of them, the collector would scan all objects about 100 times.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Timed(NamedTuple):
    """Numbers and seconds of a subspace's ended trials on one compute class.

    Cancelled trials, and trials without seconds, are left out.
    """

    #: number of COMPLETE trials, and number of all these trials
    complete: int = 0
    ended: int = 0
    #: sum of the seconds of all these trials, and sum of seconds times slots
    seconds: float = 0.0
    slot_seconds: float = 0.0


class Counts:
    """Numbers of trials by state and subspace, and of attempts by compute class."""

    def __init__(self) -> None:
        #: numbers by compute class, subspace and state; None means all classes, or all subspaces
        self._counts: Counter[tuple[str | None, str | None, TrialState]] = Counter()

    def add(self, trial: Trial, by: int = 1) -> None:
        """Count a trial. With `by` -1, subtract it."""
        self._counts[None, None, trial.state] += by
        self._counts[None, trial.subspace, trial.state] += by

    def add_placed(self, one: Attempt | Trial, by: int = 1) -> None:
        """Count an attempt, or a finished trial, in its class. A trial that was never sent has no class and is not
        counted.
        """
        if one.compute_class is not None:
            self._counts[one.compute_class, None, one.state] += by

    def count(self, *states: TrialState, compute_class: str | None = None, subspace: str | None = None) -> int:
        """Return the number of trials in any of `states`, in one subspace or one compute class if given.

        For a compute class, the number is that of the calls of `add_placed`, which also counts live attempts.
        """
        # This is called several times per trial, and `sum` with a generator would double its time.
        found = 0
        for state in states:
            found += self._counts[compute_class, subspace, state]
        return found


class FinishedTrials:
    """Finished trials in the order of their results, and the best of them.

    For each trial, a row of numbers is kept in memory. Params, metrics and texts are read from the store when needed.
    """

    def __init__(self, earlier: Iterable[Trial | Summary] = (), read: Read | None = None, repeats: int = 1) -> None:
        """`earlier` are trials sorted by number. `read` reads trials from the store. `repeats` is the study's setting.

        Without `read`, whole trials are kept in memory.
        """
        self._read = read
        self._rows = bytearray()
        #: list of the names of subspaces and classes, and by name: its index in the list
        self._names: list[str | None] = [None]
        self._indexes: dict[str | None, int] = {None: 0}
        #: by number: the trials that are not in the store yet
        self._fresh: dict[int, Trial] = {}
        #: by subspace: the merit of its best trial
        self._merits: dict[str, Merit] = {}
        #: orders trials by their means with their repeats
        self.repeats = Repeats(repeats)
        #: the COMPLETE trial with the best loss of its own, see `best`; and the latest one with the best mean
        self._best: Trial | None = None
        self._best_mean: Trial | None = None
        #: front of the feasible trials with several losses at their highest budget, and this budget
        self._front = Front()
        self._front_budget = -math.inf
        #: number of trials on the front
        self.on_front = 0
        #: by number: losses and constraints by name, for trials that have them
        self._numbers: dict[int, tuple[Losses, Losses]] = {}
        #: by number: slots, for trials that take several slots
        self._wide: dict[int, int] = {}
        #: number of trials that have ended since the best feasible trial, or since the last change of the front;
        #: cancelled trials are not counted
        self.without_gain = 0
        #: number of trials that have ended since the last COMPLETE trial; cancelled trials are not counted
        self.without_complete = 0
        #: numbers of the finished trials; `StudyTrials` also counts its unfinished trials and its live attempts here
        self.counts = Counts()
        self.count = self.counts.count
        #: by budget: number of COMPLETE trials
        self.by_budget: Counter[float] = Counter()
        #: number of lost claimed attempts of the finished trials
        self.lost = 0
        #: by subspace and compute class: numbers of trials, and their seconds
        self.timed: dict[tuple[str, str], Timed] = {}
        for trial in earlier:
            self._append(trial)
            if read is None and isinstance(trial, Trial):
                self._fresh[trial.number] = trial
        self._count_rows()

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def __iter__(self) -> Iterator[Trial]:
        return self._whole(self.numbers)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the trials, in the order of their results."""
        numbers: list[int] = self._table()["number"].tolist()
        return numbers

    def add(self, trial: Trial) -> None:
        """Add a finished trial. It is kept in memory until `release`."""
        self._append(trial)
        self._fresh[trial.number] = trial
        self.counts.add(trial)
        self.counts.add_placed(trial)
        self.without_gain += trial.state in COUNTED
        self.without_complete += trial.state in COUNTED
        self.repeats.tell(trial)
        seconds = trial.outcome.seconds
        if seconds is not None and trial.compute_class is not None and trial.state in COUNTED:
            key = trial.subspace, trial.compute_class
            complete, ended, total, wide = self.timed.get(key, Timed())
            complete += trial.state is TrialState.COMPLETE
            self.timed[key] = Timed(complete, ended + 1, total + seconds, wide + seconds * trial.slots)
        if trial.state is TrialState.COMPLETE:
            self.without_complete = 0
            if trial.outcome.loss is not None:
                self._rank(trial)

    def _rank(self, trial: Trial) -> None:
        """Update the best trial, the best trial of its subspace and the front with a new COMPLETE trial."""
        mine, best = merit(trial), self._best
        best_here = self._merits[trial.subspace] = min(mine, self._merits.get(trial.subspace, NO_MERIT))
        if len(trial.outcome.losses) > 1 and self._is_on_front(trial):
            self.without_gain = 0
            if self._front.numbers[0] == trial.number:
                self._best = trial
        elif mine == best_here and not self.on_front:
            before = NO_MERIT if best is None else merit(best)
            if mine < before:
                self._best = trial
                self.without_gain *= mine[1] > 0
            elif mine == before and best is not None and trial.number < best.number:
                self._best = trial

    @property
    def best(self) -> Trial | None:
        """The best COMPLETE trial: the one with the least loss at the highest budget; of equal trials, the one with the
        least number.

        With several losses, it is the trial with the least first loss. If no trial is feasible, it is the one with the
        least violation. With repeats, it is the one with the least mean loss among those with all their results, or
        among all trials if none has all.
        """
        for number in self.repeats.best_few(1):
            if self._best_mean is None or self._best_mean.number != number:
                # During an outage of the store, the previous one counts.
                with suppress(StoreOutage):
                    self._best_mean = self.get(number)
        return self._best_mean or self._best

    @property
    def repeated(self) -> Repeated | None:
        """Results of the best trial and its repeats; None if it has no repeats."""
        return None if (best := self.best) is None else self.repeats.of(best.number)

    def release(self) -> None:
        """Drop the whole trials that are kept in memory. Call this once the store has them."""
        if self._read is not None:
            self._fresh.clear()

    def get(self, number: int) -> Trial | None:
        """Return the trial with this number, or None if it has not finished."""
        found = self._fresh.get(number)
        if found is None and self._read is not None:
            found = next(iter(self._read([number])), None)
        return found if found is not None and found.state.is_finished else None

    def of(self, numbers: Sequence[int]) -> list[Trial]:
        """Return the finished trials with these numbers, in this order. Raises StoreError if a trial is missing."""
        stored = [number for number in numbers if number not in self._fresh]
        known = {trial.number: trial for trial in self._read(stored)} if stored and self._read is not None else {}
        if gone := [number for number in stored if number not in known]:
            raise StoreError(f"trial {gone[0]} is not in the store any more; restore it from a copy")
        return [self._fresh.get(number) or known[number] for number in numbers]

    def latest(self, count: int) -> list[Trial]:
        """Return at most `count` of the trials with the latest results, in their order."""
        return self.of(self.numbers[-count:])

    @property
    def front(self) -> list[Trial]:
        """Trials on the Pareto front of several losses, sorted by the first loss.

        Only the feasible trials with their highest budget are on it.
        """
        return self.of(self._front.numbers)

    def losses(self, names: Collection[str]) -> tuple[Indices, Array]:
        """Return two arrays about the feasible COMPLETE trials with their highest budget, in the order of the results.

        The first one has for each trial the number of trials that had ended with it or before, without cancelled
        trials. The second one has the named losses, shape (trials, losses).
        """
        table = self._table()
        ended = np.cumsum(table["state"] != _INDEX_OF[TrialState.CANCELLED])
        is_feasible = (table["state"] == _INDEX_OF[TrialState.COMPLETE]) & (table["violation"] == 0)
        budgets = np.where(np.isnan(table["budget"]), math.inf, table["budget"])
        is_feasible &= budgets == budgets[is_feasible].max(initial=-math.inf)
        known = zip(ended[is_feasible].tolist(), table["number"][is_feasible].tolist(), strict=True)
        found = [(at, losses) for at, number in known if (losses := self._numbers.get(number, ({}, {}))[0])]
        values = np.array([[losses[name] for name in names] for _, losses in found], float)
        return np.array([at for at, _ in found], np.intp), values

    def best_of(self, subspace: str) -> float | None:
        """Return the least loss in `subspace` at its highest budget, or None if the subspace has no feasible COMPLETE
        trial.
        """
        lacks_loss, violation, *_, loss = self._merits.get(subspace, NO_MERIT)
        return None if lacks_loss or violation else loss

    def best_few(self, count: int) -> list[Trial]:
        """Return at most `count` of the best COMPLETE trials, the best first."""
        return self.of(self.repeats.best_few(count) or self._ranked()["number"][:count].tolist())

    def of_state(self, state: TrialState) -> Iterator[Trial]:
        """Iterate over the trials in one state, the latest first."""
        return self._whole(self._of_state(state)["number"][::-1].tolist())

    def warned(self) -> Iterator[Trial]:
        """Iterate over the trials with a warning."""
        table = self._table()
        return self._whole(table["number"][table["warned"] > 0].tolist())

    def by_subspace(self) -> dict[str, dict[str, OnClass]]:
        """Return the summary of the trials of each subspace on each compute class."""
        table = self._table()
        table = table[np.argsort(table["subspace"], kind="stable")]
        indexes, starts = np.unique(table["subspace"], return_index=True)
        blocks = zip(indexes.tolist(), np.split(table, starts)[1:], strict=True)
        return {str(self._names[index]): self._by_class(block) for index, block in blocks}

    def last_end(self) -> float | None:
        """Return the time in seconds since the epoch at which the last trial ended; None if no trial has ended."""
        table = self._table()
        return float(table["finished_at"].max()) if len(table) else None

    def active_seconds(self) -> float:
        """Return the seconds from the first start to the last end of a trial, without pauses of more than
        PAUSE_SECONDS.

        Longer pauses are taken to lie between two runs of the study.
        """
        table = self._table()
        if not len(table):
            return 0.0
        starts = table["finished_at"] - np.nan_to_num(table["seconds"])
        order = np.argsort(starts)
        starts, ends = starts[order], np.maximum.accumulate(table["finished_at"][order])
        pauses = starts[1:] - ends[:-1]
        return float(ends[-1] - starts[0] - pauses[pauses > PAUSE_SECONDS].sum())

    def last_steps(self) -> list[tuple[int, int]]:
        """Return pairs of a step and the number of PRUNED trials whose last report was at this step, sorted by step."""
        steps, counts = np.unique(self._of_state(TrialState.PRUNED)["step"], return_counts=True)
        return [*zip(steps.tolist(), counts.tolist(), strict=True)]

    def rungs(self) -> list[RungSummary]:
        """Return the summary of each rung's finished trials, the lowest budget first; [] in a study without budgets.

        Cancelled trials are left out.
        """
        table = self._table()
        table = table[(table["rung"] >= 0) & (table["state"] != _INDEX_OF[TrialState.CANCELLED])]
        if not len(table):
            return []
        is_ranked = (table["state"] == _INDEX_OF[TrialState.COMPLETE]) & (table["violation"] == 0)
        losses = np.where(is_ranked, table["loss"], np.nan)
        return [
            RungSummary(
                budget=budget,
                classes=self._by_class(table[(table["budget"] == budget) & (table["rung"] == rung)]),
                agreement=agreed,
            )
            for rung, budget, agreed in agreements(
                table["rung"], table["budget"], table["number"], table["origin"], losses
            )
        ]

    def _by_class(self, table: _Table) -> dict[str, OnClass]:
        """Return the summary of the trials of these rows on each compute class."""
        found = {}
        for index in _named(table["compute_class"]):
            mine = table[table["compute_class"] == index]
            counts = Counter(_STATES[state] for state in mine["state"].tolist())
            seconds = mine["seconds"][(mine["state"] == _INDEX_OF[TrialState.COMPLETE]) & ~np.isnan(mine["seconds"])]
            found[str(self._names[index])] = OnClass(
                complete=counts[TrialState.COMPLETE],
                pruned=counts[TrialState.PRUNED],
                failed=counts[TrialState.FAILED],
                seconds=_median(seconds) if len(seconds) else None,
            )
        return found

    @property
    def last_number(self) -> int:
        """The greatest number of a trial, or -1 if there is no trial."""
        return int(self._table()["number"].max(initial=-1))

    @property
    def compute_classes(self) -> list[str]:
        """Names of the compute classes of the trials."""
        return [str(self._names[index]) for index in _named(self._table()["compute_class"])]

    def asked(self) -> dict[str, int]:
        """Return the number of trials by subspace. Promoted trials are not counted."""
        table = self._table()
        indexes, counts = np.unique(table["subspace"][table["origin"] < 0], return_counts=True)
        return {str(self._names[index]): count for index, count in zip(indexes.tolist(), counts.tolist(), strict=True)}

    def drawn(self) -> Iterator[tuple[int, str]]:
        """Iterate over the number and the subspace of each trial, sorted by number. Promoted trials are left out."""
        rows = self._table()
        rows = rows[rows["origin"] < 0][["number", "subspace"]]
        rows = rows[np.argsort(rows["number"])]
        for start in range(0, len(rows), BLOCK):
            for number, index in rows[start : start + BLOCK].tolist():
                yield number, str(self._names[index])

    def recall(self, *, by_number: bool = False) -> Iterator[tuple[list[Trial], Mapping[str, int]]]:
        """Yield blocks of all finished trials for samplers and other models, in the order of results or numbers.

        The trials lack texts, metrics and most times. Their params are read from the store when they are used. Each
        block comes with the number of trials in later blocks, by subspace.
        """
        rows = self._table()
        rows = rows[np.argsort(rows["number"])] if by_number else rows.copy()
        following = Counter(rows["subspace"].tolist())
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            params = _Block(block["number"].tolist(), self.of)
            trials = [self._fresh.get(trial.number, trial) for trial in self._recalled(block, params)]
            following.subtract(block["subspace"].tolist())
            yield trials, {str(self._names[index]): count for index, count in following.items() if count}

    def _append(self, trial: Trial | Summary) -> None:
        """Append the row of a trial."""
        # A `Summary` has the facts of an `Outcome` as fields of its own.
        one: Any = trial
        ended, (numbers_of, names_of) = (one, _OF_SUMMARY) if isinstance(trial, Summary) else (one.outcome, _OF_TRIAL)
        self.lost += one.lost
        if one.budget is not None and one.state is TrialState.COMPLETE:
            self.by_budget[one.budget] += 1
        losses, constraints = ended.losses, ended.constraints
        if losses or constraints:
            self._numbers[one.number] = losses, constraints
        if one.slots > 1:
            self._wide[one.number] = one.slots
        self._rows += _ROW.pack(
            *[none if value is None else value for value, none in zip(numbers_of(trial), _NONES, strict=True)],
            _INDEX_OF[one.state],
            *map(self._index_of, names_of(trial)),
            violation_of(constraints) if constraints else 0.0,
            ended.warning is not None,
        )

    def _count_rows(self) -> None:
        """Sort all rows in the order of results, count them, and find the best trials.

        This computes with whole columns, because there may be millions of rows.
        """
        table = self._table()
        unread = _Block([], self.of)
        for one in self._recalled(table, unread) if self.repeats.wanted > 1 else ():
            self.repeats.tell(one)
        table[:] = table[np.argsort(table["finished_at"], kind="stable")]
        kinds = table[["subspace", "compute_class", "state"]]
        _, indexes, counts = np.unique(kinds, return_index=True, return_counts=True)
        for one, count in zip(self._recalled(table[indexes], unread), counts.tolist(), strict=True):
            self.counts.add(one, count)
            self.counts.add_placed(one, count)
        is_timed = (table["compute_class"] > 0) & ~np.isnan(table["seconds"])
        timed = table[is_timed & (table["state"] != _INDEX_OF[TrialState.CANCELLED])]
        pairs, indexes = np.unique(timed[["subspace", "compute_class"]], return_inverse=True)
        is_complete = timed["state"] == _INDEX_OF[TrialState.COMPLETE]
        slots = [self._wide.get(number, 1) for number in timed["number"].tolist()] if self._wide else 1
        summed = (is_complete, None, timed["seconds"], timed["seconds"] * slots)
        sums = [np.bincount(indexes, each, len(pairs)).tolist() for each in summed]
        for (subspace, name), complete, ended, *seconds in zip(pairs.tolist(), *sums, strict=True):
            key = str(self._names[subspace]), str(self._names[name])
            self.timed[key] = Timed(int(complete), int(ended), *seconds)
        ranked = self._ranked()
        _, firsts = np.unique(ranked["subspace"], return_index=True)
        for one in self._recalled(ranked[firsts], unread):
            self._merits[one.subspace] = merit(one)
        ended = table[table["state"] != _INDEX_OF[TrialState.CANCELLED]]
        is_complete = np.flatnonzero(ended["state"] == _INDEX_OF[TrialState.COMPLETE])
        self.without_complete = len(ended) - 1 - int(is_complete[-1] if len(is_complete) else -1)
        self.without_gain = len(ended)
        # Of equally good trials, only the one that ended first counts as a gain.
        equal = ranked[["violation", "loss"]] == ranked[["violation", "loss"]][:1]
        equal &= np.nan_to_num(ranked["budget"]) == np.nan_to_num(ranked["budget"][:1])
        best = np.isin(ended["number"], ranked["number"][equal & (ranked["violation"] == 0)])
        if self._numbers:
            for one in self._recalled(self._of_state(TrialState.COMPLETE), unread):
                if self._is_on_front(one):
                    best = ended["number"] == one.number
        if len(ranked):
            self._best = self.get((self._front.numbers or ranked["number"].tolist())[0])
        if best.any():
            self.without_gain -= 1 + int(np.argmax(best))

    def _is_on_front(self, trial: Trial) -> bool:
        """Add a COMPLETE trial to the front if it belongs there. Return whether it does."""
        losses, budget = [*trial.outcome.losses.values()], math.inf if trial.budget is None else trial.budget
        if len(losses) < 2 or trial.outcome.violation or budget < self._front_budget:
            return False
        if budget > self._front_budget:
            # Losses at lower budgets cannot be compared with it.
            self._front, self._front_budget = Front(), budget
        is_on_front = self._front.add(trial.number, losses)
        self.on_front = len(self._front.numbers)
        return is_on_front

    def _ranked(self) -> _Table:
        """Return the rows of the COMPLETE trials, the best first: by `merit`, then by number."""
        table = self._of_state(TrialState.COMPLETE)
        table = table[~np.isnan(table["loss"])]
        is_complete = np.ones(len(table), bool)
        order = best_first(table["number"], table["loss"], table["violation"], table["budget"], is_complete)
        ranked: _Table = table[order]
        return ranked

    def _recalled(self, rows: _Table, params: _Block) -> Iterator[Trial]:
        facts = {name: self._unpacked(rows[name], form) for name, form in PACKED.items()}
        # None is the default of each field, so facts that no trial of the block has are left out of the arguments.
        own, of_outcome = ([n for n in part if facts[n].count(None) < len(rows)] for part in (_OWN, _OF_OUTCOME))
        mine, ended = ([*zip(*(facts[n] for n in part), strict=True)] or [()] * len(rows) for part in (own, of_outcome))
        for number, state, values, found in zip(facts["number"], facts["state"], mine, ended, strict=True):
            losses, constraints = self._numbers.get(number, ({}, {}))
            named = dict(zip(of_outcome, found, strict=True))
            outcome = Outcome(state=state, losses=losses, constraints=constraints, **named)
            named = dict(zip(own, values, strict=True))
            yield Trial(params=_Params(number, params), state=state, outcome=outcome, **named)

    def _unpacked(self, column: _Table, form: Packed) -> list[Any]:
        """Return the facts that the values of a column stand for."""
        values: list[Any] = column.tolist()
        if form is NAMED:
            return [self._names[index] for index in values]
        if form is STATE:
            return [_STATES[index] for index in values]
        if form is FLAG:
            return [_FLAGS[value] for value in values]
        if form is MOMENT:
            return values
        for index in np.flatnonzero(np.isnan(column) if math.isnan(form.none) else column == form.none).tolist():
            values[index] = None
        return values

    def _whole(self, numbers: Sequence[int]) -> Iterator[Trial]:
        for start in range(0, len(numbers), BLOCK):
            yield from self.of(numbers[start : start + BLOCK])

    def _index_of(self, name: str | None) -> int:
        if name not in self._indexes:
            self._indexes[name] = len(self._names)
            self._names.append(name)
        return self._indexes[name]

    def _of_state(self, state: TrialState) -> _Table:
        table = self._table()
        found: _Table = table[table["state"] == _INDEX_OF[state]]
        return found

    def _table(self) -> _Table:
        """Return a view of the rows as a numpy table. While it is referenced, the rows cannot grow."""
        return np.frombuffer(self._rows, dtype=_COLUMNS)


class StudyTrials:
    """All trials of one study, finished and unfinished. The scheduler and readers of the store use it."""

    def __init__(
        self, store: Store, record: StudyRecord, trials: Iterable[Trial | Summary], warm_start: Sequence[Trial]
    ) -> None:
        """`trials` are the trials in the store, sorted by number."""
        self.store, self.record = store, record
        #: finished trials of earlier studies from which samplers learn; they are not part of this study
        self.warm_start = warm_start
        is_auto = record.in_force.get("sampler") == "auto"
        #: by subspace: text that says which sampler `auto` has chosen, and why; empty with other samplers
        self.choices: dict[str, str] = {**record.choices} if is_auto else {}
        #: version of the code of this run; "" if it is not known, or for a reader of the store
        self.code: Digest = ""
        #: numbers of the trials that failed in this run, by kind of failure; empty for a reader of the store
        self.failures = Failures()
        #: by number: the trials that have not finished
        self._open: dict[int, Trial] = {}
        with collector_paused():
            #: finished trials in the order of their results
            repeats = record.in_force.get("repeats", 1)
            self.trials = FinishedTrials(self._finished_of(trials), partial(store.trials, record.key), repeats)
        self._counts = self.trials.counts
        #: method `Counts.count`: it returns the number of trials in any of these states, also for one class or
        #: subspace. In a class, a trial with two live attempts counts twice
        self.count = self._counts.count
        self._asked = Counter(self.trials.asked())
        for trial in self._open.values():
            self._counts.add(trial)
            self._asked[trial.subspace] += trial.origin is None

    def _finished_of(self, trials: Iterable[Trial | Summary]) -> Iterator[Trial | Summary]:
        """Yield the finished trials, and add the others to the unfinished trials."""
        for trial in trials:
            if isinstance(trial, Summary) or trial.state.is_finished:
                yield trial
            else:
                self._open[trial.number] = trial

    def asked(self, subspace: str) -> int:
        """Return the number of trials drawn in a subspace so far. Promoted trials are not counted."""
        return self._asked[subspace]

    @property
    def open_origins(self) -> set[int]:
        """Numbers of the trials whose folders unfinished trials use."""
        return {trial.folder for trial in self._open.values()}

    @property
    def lost(self) -> int:
        """Number of claimed attempts that were lost."""
        return self.trials.lost + sum(trial.lost for trial in self._open.values())


def _named(indexes: NDArray[np.integer]) -> list[int]:
    """Return the distinct indexes of names in a column, in ascending order, without index 0, which means no name."""
    # np.unique imports numpy.ma, which takes longer than to open a new study.
    return (np.flatnonzero(np.bincount(indexes)[1:]) + 1).tolist()  # type: ignore[no-any-return]


def _median(values: NDArray[np.float64]) -> float:
    # np.median imports numpy.ma, too.
    return float(np.sort(values)[(len(values) - 1) // 2 : len(values) // 2 + 1].mean())


class _Block:
    """Params of a block of trials. All of them are read when the params of one trial are used."""

    def __init__(self, numbers: Sequence[int], read: Callable[[Sequence[int]], Iterable[Trial]]) -> None:
        self._numbers = numbers
        self._read = read

    @cached_property
    def params(self) -> Mapping[int, Params]:
        return {trial.number: trial.params for trial in self._read(self._numbers)}


class _Params(Mapping[str, Any]):
    """Params of a trial that are read when they are used."""

    __slots__ = ("_block", "_number")

    def __init__(self, number: int, block: _Block) -> None:
        self._number = number
        self._block = block

    def __getitem__(self, label: str) -> Any:
        return self._block.params[self._number][label]

    def __iter__(self) -> Iterator[str]:
        return iter(self._block.params[self._number])

    def __len__(self) -> int:
        return len(self._block.params[self._number])
