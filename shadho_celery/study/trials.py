"""Finished trials of a study, behind one interface: add, get, iterate, count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from struct import Struct
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.trial import COUNTED, Attempt, Losses, Outcome, Params, Summary, Trial, TrialState, violation_of
from shadho_celery.errors import StoreError
from shadho_celery.study.front import Front
from shadho_celery.study.rungs import LATEST, OnClass, RungSummary, agreement

#: reads trials by number, in any order
Read = Callable[[Sequence[int]], Iterable[Trial]]

#: seconds between two trials in which none ran, beyond which they are of two runs
PAUSE_SECONDS = 60.0

#: trials that are read at a time
BLOCK = 2000

#: columns of a finished trial, and their types. NaN and -1 stand for None, of a step the least one; subspace, class and
#: what it has outgrown are places in a list of names
_TYPES = {
    "number": "q",
    "origin": "q",
    "asked_at": "d",
    "finished_at": "d",
    "loss": "d",
    "violation": "d",
    "seconds": "d",
    "budget": "d",
    "memory": "q",
    "gpu_memory": "q",
    "subspace": "I",
    "compute_class": "I",
    "outgrown": "I",
    "outgrown_memory": "I",
    "rung": "h",
    "continued": "b",
    "step": "q",
    "state": "B",
    "warned": "B",
}
_ROW = Struct("<" + "".join(_TYPES.values()))
_COLUMNS = np.dtype([(name, f"<{kind}") for name, kind in _TYPES.items()])
_SUBSPACE = [*_TYPES].index("subspace")
_STATES = tuple(TrialState)
_PLACES = {state: place for place, state in enumerate(_STATES)}
#: in place of no step
_NO_STEP = -(2**63)
#: a merit that every trial exceeds
_NONE = (math.inf, math.inf, math.inf)
_Table = NDArray[np.void]


def merit(trial: Trial) -> tuple[float, float, float]:
    """Return a sort key, least for the best COMPLETE trial.

    The feasible ones first, then those nearest to it; of these the highest budget first, then the least loss.
    """
    budget = math.inf if trial.budget is None else trial.budget
    return trial.violation, -budget, math.inf if trial.loss is None else trial.loss


def load_trials(trials: Iterable[Trial | Summary], read: Read) -> tuple[FinishedTrials, list[Trial]]:
    """Return the finished ones of a study's trials, and the others; `read` is as in FinishedTrials."""
    opened: list[Trial] = []

    def finished() -> Iterator[Trial | Summary]:
        for trial in trials:
            if isinstance(trial, Summary) or trial.state.is_finished:
                yield trial
            else:
                opened.append(trial)

    return FinishedTrials(finished(), read), opened


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


class Counts:
    """Numbers of trials by state and subspace, and of attempts by compute class."""

    def __init__(self) -> None:
        #: by compute class, subspace and state; None for all classes or all subspaces
        self._counts: Counter[tuple[str | None, str | None, TrialState]] = Counter()

    def add(self, trial: Trial, by: int = 1) -> None:
        """Count a trial, or with `by` -1 count it no more."""
        self._counts[None, None, trial.state] += by
        self._counts[None, trial.subspace, trial.state] += by

    def add_placed(self, one: Attempt | Trial, by: int = 1) -> None:
        """Count an attempt, or a finished trial, in its class; a trial that was never sent has none."""
        if one.compute_class is not None:
            self._counts[one.compute_class, None, one.state] += by

    def count(self, *states: TrialState, compute_class: str | None = None, subspace: str | None = None) -> int:
        """Return the number in one of `states`, of one compute class or one subspace if that is given."""
        # Not `sum`: its generator costs as much again, and this is asked several times a trial.
        found = 0
        for state in states:
            found += self._counts[compute_class, subspace, state]
        return found


class FinishedTrials:
    """Finished trials in the order of their results, and the best of them.

    A row of numbers is kept of each; all else is read from the store when it is asked for.
    """

    def __init__(self, earlier: Iterable[Trial | Summary] = (), read: Read | None = None) -> None:
        """`earlier` trials come by number; `read` gets trials by number from the store.

        Without `read` the trials themselves are kept.
        """
        self._read = read
        self._rows = bytearray()
        #: names and their places: of subspaces, and of classes
        self._names: list[str | None] = [None]
        self._places: dict[str | None, int] = {None: 0}
        #: trials that are not in the store yet
        self._fresh: dict[int, Trial] = {}
        #: by subspace, the merit of its best trial
        self._merits: dict[str, tuple[float, float, float]] = {}
        self._best: Trial | None = None
        #: feasible trials with several losses that no other one dominates
        self._front = Front()
        #: by number, losses and constraints of the trials that have any
        self._numbers: dict[int, tuple[Losses, Losses]] = {}
        #: trials that have ended since the best feasible one did, or since the front has changed; not cancelled ones
        self.without_gain = 0
        self._counts = Counts()
        self.count = self._counts.count
        #: number of COMPLETE trials by budget, of those that have one
        self.by_budget: Counter[float] = Counter()
        #: claimed attempts of these trials that were lost
        self.lost = 0
        for trial in earlier:
            self._append(trial)
            if read is None and isinstance(trial, Trial):
                self._fresh[trial.number] = trial
        self._count_rows()

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def __iter__(self) -> Iterator[Trial]:
        return self._whole(self.numbers)

    def __reversed__(self) -> Iterator[Trial]:
        return self._whole(self.numbers[::-1])

    @overload
    def __getitem__(self, place: int) -> Trial: ...

    @overload
    def __getitem__(self, place: slice) -> list[Trial]: ...

    def __getitem__(self, place: int | slice) -> Trial | list[Trial]:
        """Return the trial that was the `place`-th to finish, -1 for the latest; or those of a slice."""
        if isinstance(place, slice):
            return self.of(self.numbers[place])
        return self.of([self.numbers[place]])[0]

    @property
    def numbers(self) -> list[int]:
        """Numbers of the trials in the order of their results."""
        numbers: list[int] = self._table()["number"].tolist()
        return numbers

    def add(self, trial: Trial) -> None:
        """Add a finished trial, which is kept until `settle`."""
        self._append(trial)
        self._fresh[trial.number] = trial
        self._counts.add(trial)
        self._counts.add_placed(trial)
        self.without_gain += trial.state in COUNTED
        has_loss = trial.state is TrialState.COMPLETE and trial.loss is not None
        if has_loss and (mine := merit(trial)) < self._merits.get(trial.subspace, _NONE):
            self._merits[trial.subspace] = mine
            if self._best is None or mine < merit(self._best):
                self._best = trial
                self.without_gain *= bool(trial.violation)
        if self._is_on_front(trial):
            self.without_gain = 0
            if self._front.numbers[0] == trial.number:
                self._best = trial

    def settle(self) -> None:
        """Let go of the trials: the store has them."""
        if self._read is not None:
            self._fresh.clear()

    def get(self, number: int) -> Trial | None:
        """Return the trial of that number; None if it has not finished."""
        found = self._fresh.get(number)
        if found is None and self._read is not None:
            found = next(iter(self._read([number])), None)
        return found if found is not None and found.state.is_finished else None

    def of(self, numbers: Sequence[int]) -> list[Trial]:
        """Return the trials of these numbers, which have finished, in this order."""
        stored = [number for number in numbers if number not in self._fresh]
        known = {trial.number: trial for trial in self._read(stored)} if stored and self._read is not None else {}
        if gone := [number for number in stored if number not in known]:
            raise StoreError(f"trial {gone[0]} is not in the store any more; restore it from a copy")
        return [self._fresh.get(number) or known[number] for number in numbers]

    @property
    def best(self) -> Trial | None:
        """The COMPLETE trial with the least loss, of those with the highest budget; the first of equals.

        Of several losses it is the one on the front with the least first loss. If no trial is feasible, it is the one
        that is nearest to it.
        """
        return self._best

    @property
    def front(self) -> list[Trial]:
        """Feasible trials with several losses that no other one dominates, the least first loss first."""
        return self.of(self._front.numbers)

    @property
    def on_front(self) -> int:
        """Number of trials on the front."""
        return len(self._front.numbers)

    def losses(self) -> Iterator[tuple[int, Losses]]:
        """Iterate over the feasible COMPLETE trials with named losses, in the order of their results.

        Beside the losses stands the number of trials that have ended so far, cancelled ones apart.
        """
        ended = 0
        for number, state in self._table()[["number", "state"]].tolist():
            ended += _STATES[state] in COUNTED
            losses, constraints = self._numbers.get(number, ({}, {}))
            if losses and _STATES[state] is TrialState.COMPLETE and not violation_of(constraints):
                yield ended, losses

    def best_of(self, subspace: str) -> float | None:
        """Return the least loss in `subspace` at the highest budget of its trials; None without a feasible one."""
        violation, _, loss = self._merits.get(subspace, _NONE)
        return None if violation else loss

    def best_few(self, count: int) -> list[Trial]:
        """Return the best COMPLETE trials, the best first."""
        return self.of(self._ranked()["number"][:count].tolist())

    def of_state(self, state: TrialState) -> Iterator[Trial]:
        """Iterate over the trials of one state, the latest first."""
        return self._whole(self._of_state(state)["number"][::-1].tolist())

    def warned(self) -> Iterator[Trial]:
        """Iterate over the trials with a warning."""
        table = self._table()
        return self._whole(table["number"][table["warned"] > 0].tolist())

    def by_subspace(self) -> dict[str, dict[str, OnClass]]:
        """Return how many of the trials of each subspace each class had."""
        table = self._table()
        table = table[np.argsort(table["subspace"], kind="stable")]
        places, starts = np.unique(table["subspace"], return_index=True)
        blocks = zip(places.tolist(), np.split(table, starts)[1:], strict=True)
        return {str(self._names[place]): self._by_class(block) for place, block in blocks}

    def active_seconds(self) -> float:
        """Return the seconds in which trials ran, together; a pause of more than PAUSE_SECONDS is one between runs."""
        table = self._table()
        if not len(table):
            return 0.0
        starts = table["finished_at"] - np.nan_to_num(table["seconds"])
        order = np.argsort(starts)
        starts, ends = starts[order], np.maximum.accumulate(table["finished_at"][order])
        pauses = starts[1:] - ends[:-1]
        return float(ends[-1] - starts[0] - pauses[pauses > PAUSE_SECONDS].sum())

    def seconds_since(self, start: int) -> dict[str, list[float]]:
        """Return by class the seconds of the trials that ended well or FAILED after the first `start` results."""
        table = self._table()[start:]
        ended = table[~np.isnan(table["seconds"]) & (table["state"] != _PLACES[TrialState.CANCELLED])]
        found: dict[str, list[float]] = {}
        for place, seconds in ended[["compute_class", "seconds"]].tolist():
            found.setdefault(str(self._names[place]), []).append(seconds)
        return found

    def last_steps(self) -> list[tuple[int, int]]:
        """Return the number of PRUNED trials by the step of their last report, the least step first."""
        steps, counts = np.unique(self._of_state(TrialState.PRUNED)["step"], return_counts=True)
        return [*zip(steps.tolist(), counts.tolist(), strict=True)]

    def rungs(self) -> list[RungSummary]:
        """Return the finished trials by rung, the lowest first; nothing in a study without budgets."""
        table = self._table()
        table = table[(table["rung"] >= 0) & (table["state"] != _PLACES[TrialState.CANCELLED])]
        origins = np.where(table["origin"] < 0, table["number"], table["origin"])
        # As rounds rank them: what has failed, or breaks a constraint, is worse than all else.
        is_ranked = (table["state"] == _PLACES[TrialState.COMPLETE]) & (table["violation"] == 0)
        losses = np.where(is_ranked & ~np.isnan(table["loss"]), table["loss"], np.inf)
        found: list[RungSummary] = []
        for rung, budget in np.unique(table[["rung", "budget"]]).tolist():
            mine = (table["budget"] == budget) & (table["rung"] == rung)
            here = dict(zip(origins[mine].tolist(), losses[mine].tolist(), strict=True))
            above = table["rung"] == rung + 1
            promoted = zip(origins[above].tolist(), losses[above].tolist(), strict=True)
            both = [(here[origin], loss) for origin, loss in promoted if origin in here][-LATEST:]
            found += [RungSummary(budget=budget, classes=self._by_class(table[mine]), agreement=agreement(both))]
        return sorted(found, key=lambda rung: rung.budget)

    def _by_class(self, table: _Table) -> dict[str, OnClass]:
        """Return how many of some trials each class had."""
        found = {}
        for place in np.unique(table["compute_class"][table["compute_class"] > 0]).tolist():
            mine = table[table["compute_class"] == place]
            counts = Counter(_STATES[state] for state in mine["state"].tolist())
            seconds = mine["seconds"][(mine["state"] == _PLACES[TrialState.COMPLETE]) & ~np.isnan(mine["seconds"])]
            found[str(self._names[place])] = OnClass(
                complete=counts[TrialState.COMPLETE],
                pruned=counts[TrialState.PRUNED],
                failed=counts[TrialState.FAILED],
                seconds=float(np.median(seconds)) if len(seconds) else None,
            )
        return found

    @property
    def last_number(self) -> int:
        """The greatest number, -1 without a trial."""
        return int(self._table()["number"].max(initial=-1))

    @property
    def compute_classes(self) -> list[str]:
        """Compute classes of the trials."""
        return [str(self._names[place]) for place in np.unique(self._table()["compute_class"]).tolist() if place]

    def asked(self) -> dict[str, int]:
        """Return the number of trials by subspace, without promoted ones."""
        table = self._table()
        places, counts = np.unique(table["subspace"][table["origin"] < 0], return_counts=True)
        return {str(self._names[place]): count for place, count in zip(places.tolist(), counts.tolist(), strict=True)}

    def drawn(self) -> Iterator[tuple[int, str]]:
        """Iterate over number and subspace of all trials but promoted ones, by number."""
        rows = self._table()
        rows = rows[rows["origin"] < 0][["number", "subspace"]]
        rows = rows[np.argsort(rows["number"])]
        for start in range(0, len(rows), BLOCK):
            for number, place in rows[start : start + BLOCK].tolist():
                yield number, str(self._names[place])

    def recall(self, *, by_number: bool = False) -> Iterator[tuple[list[Trial], Mapping[str, int]]]:
        """Yield all trials in blocks, in the order of their results or numbers, as those who learn from them need them.

        That is without texts, metrics and most moments; params are read when they are looked at. Beside each block
        stands the number of trials that follow it, by subspace.
        """
        rows = self._table()
        rows = rows[np.argsort(rows["number"])] if by_number else rows.copy()
        following = Counter(rows["subspace"].tolist())
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK].tolist()
            params = _Block([row[0] for row in block], self.of)
            trials = [self._fresh.get(row[0]) or self._recalled(row, params) for row in block]
            following.subtract(row[_SUBSPACE] for row in block)
            yield trials, {str(self._names[place]): count for place, count in following.items() if count}

    def _append(self, trial: Trial | Summary) -> None:
        """Append the row of a trial."""
        self.lost += trial.lost
        if trial.budget is not None and trial.state is TrialState.COMPLETE:
            self.by_budget[trial.budget] += 1
        if trial.losses or trial.constraints:
            self._numbers[trial.number] = trial.losses, trial.constraints
        self._rows += _ROW.pack(
            trial.number,
            -1 if trial.origin is None else trial.origin,
            math.nan if trial.asked_at is None else trial.asked_at,
            trial.finished_at or 0.0,
            math.nan if trial.loss is None else trial.loss,
            violation_of(trial.constraints),
            math.nan if trial.seconds is None else trial.seconds,
            math.nan if trial.budget is None else trial.budget,
            -1 if trial.memory is None else trial.memory,
            -1 if trial.gpu_memory is None else trial.gpu_memory,
            self._place(trial.subspace),
            self._place(trial.compute_class),
            self._place(trial.outgrown),
            self._place(trial.outgrown_memory),
            -1 if trial.rung is None else trial.rung,
            -1 if trial.continued is None else trial.continued,
            _NO_STEP if trial.step is None else trial.step,
            _PLACES[trial.state],
            trial.warning is not None,
        )

    def _count_rows(self) -> None:
        """Sort all rows by their results, count them, and find the best: at once, as there may be very many."""
        table = self._table()
        table[:] = table[np.argsort(table["finished_at"], kind="stable")]
        unread = _Block([], self.of)
        kinds = table[["subspace", "compute_class", "state"]]
        _, places, counts = np.unique(kinds, return_index=True, return_counts=True)
        for row, count in zip(table[places].tolist(), counts.tolist(), strict=True):
            one = self._recalled(row, unread)
            self._counts.add(one, count)
            self._counts.add_placed(one, count)
        ranked = self._ranked()
        _, firsts = np.unique(ranked["subspace"], return_index=True)
        for row in ranked[firsts].tolist():
            one = self._recalled(row, unread)
            self._merits[one.subspace] = merit(one)
        ended = table[table["state"] != _PLACES[TrialState.CANCELLED]]
        self.without_gain = len(ended)
        gained = int(ranked["number"][0]) if len(ranked) and not ranked["violation"][0] else None
        if self._numbers:
            for row in self._of_state(TrialState.COMPLETE).tolist():
                if self._is_on_front(one := self._recalled(row, unread)):
                    gained = one.number
        if len(ranked):
            self._best = self.get((self._front.numbers or ranked["number"].tolist())[0])
        if gained is not None:
            self.without_gain -= 1 + int(np.flatnonzero(ended["number"] == gained)[0])

    def _is_on_front(self, trial: Trial) -> bool:
        """Return whether a trial that has ended is on the front, and enter it there."""
        is_one = trial.state is TrialState.COMPLETE and len(trial.losses) > 1 and not trial.violation
        return is_one and self._front.add(trial.number, [*trial.losses.values()])

    def _ranked(self) -> _Table:
        """Return the rows of the COMPLETE trials, the best first."""
        table = self._of_state(TrialState.COMPLETE)
        table = table[~np.isnan(table["loss"])]
        budgets = np.where(np.isnan(table["budget"]), np.inf, table["budget"])
        ranked: _Table = table[np.lexsort((table["number"], table["loss"], -budgets, table["violation"]))]
        return ranked

    def _recalled(self, row: tuple[Any, ...], params: _Block) -> Trial:
        number, origin, asked_at, at, loss, _, seconds, budget, memory, gpu_memory, *places = row[:14]
        rung, continued, step, state, _ = row[14:]
        subspace, compute_class, outgrown, outgrown_memory = [self._names[place] for place in places]
        losses, constraints = self._numbers.get(number, ({}, {}))
        outcome = Outcome(
            state=_STATES[state],
            loss=_known(loss),
            losses=losses,
            constraints=constraints,
            seconds=_known(seconds),
            memory=None if memory < 0 else memory,
            gpu_memory=None if gpu_memory < 0 else gpu_memory,
            continued=None if continued < 0 else bool(continued),
        )
        return Trial(
            number=number,
            subspace=str(subspace),
            params=_Params(number, params),
            budget=_known(budget),
            origin=None if origin < 0 else origin,
            compute_class=compute_class,
            state=outcome.state,
            outcome=outcome,
            asked_at=_known(asked_at),
            finished_at=at,
            rung=None if rung < 0 else rung,
            step=None if step == _NO_STEP else step,
            outgrown=outgrown,
            outgrown_memory=outgrown_memory,
        )

    def _whole(self, numbers: Sequence[int]) -> Iterator[Trial]:
        for start in range(0, len(numbers), BLOCK):
            yield from self.of(numbers[start : start + BLOCK])

    def _place(self, name: str | None) -> int:
        if name not in self._places:
            self._places[name] = len(self._names)
            self._names.append(name)
        return self._places[name]

    def _of_state(self, state: TrialState) -> _Table:
        table = self._table()
        found: _Table = table[table["state"] == _PLACES[state]]
        return found

    def _table(self) -> _Table:
        """Return a view of the rows; while it is referred to no trial can be added."""
        return np.frombuffer(self._rows, dtype=_COLUMNS)


class _Block:
    """Params of a block of trials, read at once when one of them is looked at."""

    def __init__(self, numbers: Sequence[int], read: Callable[[Sequence[int]], Iterable[Trial]]) -> None:
        self._numbers = numbers
        self._read = read

    @cached_property
    def params(self) -> Mapping[int, Params]:
        return {trial.number: trial.params for trial in self._read(self._numbers)}


class _Params(Mapping[str, Any]):
    """Params of a trial that are read when they are looked at."""

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
