"""A recorded trial with the values that its objective got, the sequence of a study's trials, and other records.

`Records` has the attempts, workers and machines of a study as columns, from which charts are made. Reading takes no
lock.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from shadho_celery.core.checks import short
from shadho_celery.core.columns import Merit, TrialFacts, merit
from shadho_celery.core.failures import headline
from shadho_celery.core.files import CHECKPOINTS
from shadho_celery.core.records import AttemptRecord, MachineRecord, SessionRecord, unpack
from shadho_celery.core.trial import Report, Trial, TrialState, turned, turned_first
from shadho_celery.errors import ShadhoError, StoreError
from shadho_celery.objective import study_file
from shadho_celery.space.describe import brief
from shadho_celery.space.space import Space
from shadho_celery.space.stored import read_given, read_labels, read_schema, read_shown
from shadho_celery.space.tree import evaluate
from shadho_celery.store.base import PAGE, Store, StudyRecord
from shadho_celery.store.memory import MemoryStore

if TYPE_CHECKING:
    from shadho_celery.store.sql import SqlStore


class Values:
    """Finds the values that a study's objective got: from the store, or computed with the study's search space."""

    def __init__(self, record: StudyRecord, space: Space | None = None) -> None:
        """`space` is the study's space, if it is available. Values are then computed with it."""
        self._record = record
        self._space = space
        self._labels = read_labels(record.tree)
        #: True if the study has no declared space: its trials asked for labels, as in Optuna, so their values are dicts
        self._is_asked = read_schema(record.tree) is not None
        #: reason why some values are only texts, with the remedy; None as long as all values are those that the
        #: objective got
        self.note: str | None = None

    def of(self, trial: Trial) -> Any:
        """Return the values of a trial. If they can only be shown as texts, `note` says why."""
        if self._space is not None:
            return self._space.evaluate(trial.params)
        value, is_exact = read_given(trial.given, trial.params)
        space = None if is_exact else self._of_module
        if space is None:
            return value
        try:
            return space.evaluate(trial.params)
        except Exception as error:  # a space may call any function
            self.note = f"the space of {self._record.module} fails on these params: {short(error)}"
            return value

    def by_label(self, trial: Trial) -> dict[str, Any]:
        """Return the value of each active label as the objective got it: an option of a choice, or a number.

        For an option that contains labels, the value is the name of the option. A label within an expression has its
        drawn value.
        """
        if self._is_asked:
            return dict(read_given(trial.given, trial.params)[0])
        found = {}
        for label, drawn in trial.params.items():
            known = self._labels.get(label)
            found[label], is_exact = (drawn, True) if known is None else known.given(drawn)
            space = self._space if is_exact or self._space is not None else self._of_module
            if not is_exact and space is not None and label in space.switches:
                found[label] = evaluate(space.switches[label].options[drawn], {}, {})
        return found

    def shown(self, trial: Trial) -> dict[str, Any]:
        """Return the value of each active label as a table shows it.

        The value None becomes a text, because None in a table stands for an inactive label.
        """
        labels = {
            label: self._labels[label].shown(drawn) for label, drawn in trial.params.items() if label in self._labels
        }
        found = {**trial.params, **labels, **read_shown(trial.given)}
        return {label: "None" if found[label] is None else found[label] for label in trial.params}

    def outlined(self, trial: Trial, label: str) -> Any:
        """Return the value of one label as in `shown`, but an option that is a tuple or dict in the short form of
        `brief`.
        """
        shown = read_shown(trial.given)
        return shown[label] if label in shown else self.option(label, trial.params[label])

    def option(self, label: str, drawn: Any) -> Any:
        """Return the option of a choice, or the number of another label, as a chart shows it."""
        known = self._labels.get(label)
        value = drawn if known is None else known.outlined(drawn)
        return "None" if value is None else value

    @cached_property
    def _of_module(self) -> Space | None:
        """The space of the study's module. If it is not available, this is None, and `note` says why.

        The module is used only if this program has already imported it, because a stranger's store may name any module.
        """
        name = self._record.module
        if not name:
            self.note = "some values are shown as texts: they are objects that exist only in the study's own program"
            return None
        if name not in sys.modules:
            self.note = f"some values are shown as texts: import {name} in the program first to get the objects"
            return None
        from shadho_celery.space.compile import compile_space

        try:
            space = compile_space(study_file.load(name).space)
        except ShadhoError as error:
            self.note = f"some values are shown as texts: {error}"
            return None
        if space.describe() != dict(self._record.space):
            self.note = f"some values are shown as texts: {name} now has another search space"
            return None
        return space


class TrialResult(TrialFacts):
    """A recorded trial for users: the facts of `core.columns`, and the values that its objective got."""

    def __init__(self, trial: Trial, values: Values, store: Store, record: StudyRecord) -> None:
        super().__init__(trial)
        self._values = values
        self._store = store
        self._record = record

    @cached_property
    def values(self) -> Any:
        """Values that the objective got, in the shape of the space. They may be only texts, see
        `StudyResults.values_note`.
        """
        return self._values.of(self._trial)

    @property
    def losses(self) -> Mapping[str, float]:  # type: ignore[override] # both are read-only
        """Losses by name, as the objective returned them; empty in a study without `objectives`."""
        return turned(self._trial.outcome.losses, self._record.objectives)

    @property
    def merit(self) -> Merit:
        """Sort key: the less, the better the trial; see `core.columns.merit`."""
        return merit(self._trial)

    @property
    def is_feasible(self) -> bool:
        """True if no constraint is above 0."""
        return not self.violation

    @cached_property
    def reports(self) -> Sequence[Report]:
        """Reports of the objective, each with `.attempt`, `.step`, `.loss` (as it was reported) and the time `.at`.

        With several objectives, `.loss` is the first one, and `.losses` has those that are finite, by name.
        """
        reports, ways = self._store.reports(self._record.key, [self.number]), self._record.objectives
        own = [(each, each.losses and turned(each.losses, ways)) for each in reports]
        return tuple(replace(each, loss=turned_first(each.loss, ways), losses=losses) for each, losses in own)

    @property
    def folder(self) -> str:
        """Path of its `checkpoint_dir`, relative to the working directory of its worker. The folder may not exist."""
        return f"{CHECKPOINTS}/{self._record.key}/{self._trial.folder}"

    @property
    def record(self) -> Trial:
        """The trial as the store has it. Its losses are negated if they are maximised."""
        return self._trial

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrialResult) and self._trial == other._trial

    def __hash__(self) -> int:
        return hash((self._record.key, self.number))

    def __repr__(self) -> str:
        named: Mapping[str, float | None] = self.losses or {"loss": self.loss}
        losses = ", ".join(f"{name} {loss}" for name, loss in named.items())
        found = headline(self.error) if self.state == TrialState.FAILED else losses
        return f"<trial {self.number}: {self.state}, {found}, params {self.params}>"


def given(trial: TrialResult) -> str:
    """Return the values of a trial in the short form that tables and pages show."""
    try:
        return brief(trial.values)
    except Exception as error:  # a space may call any function, which may fail on these params
        return f"({type(error).__name__})"


class TrialResults(Sequence[TrialResult]):
    """Sequence of a study's trials, sorted by number, finished or not.

    It has the trials that were recorded when it was created. They are read from the store in blocks when needed.
    """

    def __init__(self, store: Store, record: StudyRecord, values: Values) -> None:
        self._store = store
        self._record = record
        self._values = values
        #: numbers of the trials; numbers are missing if rows were deleted
        self._numbers = [*store.numbers(record.key)]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[TrialResult]:
        for start in range(0, len(self._numbers), PAGE):
            yield from self._of(self._numbers[start : start + PAGE])

    @overload
    def __getitem__(self, place: int) -> TrialResult: ...

    @overload
    def __getitem__(self, place: slice) -> list[TrialResult]: ...

    def __getitem__(self, place: int | slice) -> TrialResult | list[TrialResult]:
        """Return the trial at a position (-1 for the trial with the greatest number), or the trials of a slice.

        Raises StoreError if a trial cannot be read.
        """
        if isinstance(place, slice):
            return list(self._of(self._numbers[place]))
        number = self._numbers[place]
        for trial in self._of([number]):
            return trial
        raise StoreError(f"trial {number} of study {self._record.name!r} was deleted from the store")

    def _of(self, numbers: Sequence[int]) -> Iterator[TrialResult]:
        where = self._values, self._store, self._record
        # The store may return trials in another order than `numbers`.
        found = {trial.number: trial for trial in self._store.trials(self._record.key, numbers)}
        return (TrialResult(found[number], *where) for number in numbers if number in found)


#: values by the name of the column; all lists have the same length
Columns = Mapping[str, list[Any]]


class Records:
    """The attempts, workers and machines of one study as columns. Each call reads the store again."""

    def __init__(self, store: SqlStore | MemoryStore, key: str) -> None:
        """`key` is the study's key."""
        self._store, self._key = store, key

    def attempts(self, numbers: Collection[int] | None = None) -> Columns:
        """Return the attempts of all trials, or of the trials with these numbers, sorted by trial and attempt.

        The columns are the fields of `AttemptRecord`. An entry of `placed` has, for each compute class, the predicted
        seconds, the backlog in seconds and the price. A number that was not known is None. An entry is {} if nothing
        was recorded.
        """
        columns = _columns(AttemptRecord, self._store.attempts(self._key, numbers))
        # The order is read after the attempts, so that it has the classes of all attempts, also of the latest ones.
        order = self.class_order()
        columns["placed"] = [unpack(packed, order) for packed in columns["placed"]]
        columns["end"] = [None if end is None else str(end) for end in columns["end"]]
        return columns

    def class_order(self) -> Sequence[str]:
        """Return the names of the study's compute classes in the order of `AttemptRecord.placed`."""
        return self._store.class_order(self._key)

    def of_trial(self, number: int) -> list[dict[str, Any]]:
        """Return the attempts of one trial, each as a dict with the names of the columns."""
        columns = self.attempts([number])
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def sessions(self) -> Columns:
        """Return the periods in which workers could run trials of the study. The columns are the fields of
        `SessionRecord`.
        """
        columns = _columns(SessionRecord, self._store.sessions(self._key))
        columns["reason"] = [None if reason is None else str(reason) for reason in columns["reason"]]
        return columns

    def machines(self) -> Columns:
        """Return the machines of the workers. The columns are the fields of `MachineRecord`, with GPUs as dicts."""
        columns = _columns(MachineRecord, self._store.machines(self._key))
        columns["gpus"] = [[*map(to_builtins, gpus)] for gpus in columns["gpus"]]
        return columns


def _columns(kind: type[Struct], records: Iterable[Struct]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in kind.__struct_fields__}
    appends = [(name, column.append) for name, column in columns.items()]
    for record in records:
        for name, append in appends:
            append(getattr(record, name))
    return columns
