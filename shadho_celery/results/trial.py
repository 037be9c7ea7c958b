"""A recorded trial with the values that its objective got, and the sequence of a study's trials."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from msgspec.structs import replace

from shadho_celery.core.best import Merit, merit
from shadho_celery.core.checks import short
from shadho_celery.core.columns import TrialFacts
from shadho_celery.core.failures import headline
from shadho_celery.core.objectives import turned, turned_first
from shadho_celery.core.trial import Params, Report, Trial, TrialState
from shadho_celery.errors import ShadhoError, StoreError
from shadho_celery.objective import study_file
from shadho_celery.space.stored import RestoredSpace
from shadho_celery.store.base import Store, StudyRecord
from shadho_celery.store.sql import PAGE, SqlStore

#: computes values from params
Evaluate = Callable[[Params], Any]


class Values:
    """Computes values from params: with the space in the store, else with that of the study's module, else as texts."""

    def __init__(self, record: StudyRecord, evaluate: Evaluate | None = None) -> None:
        """`evaluate` is the method of the study's space, if it is available."""
        self._record = record
        self._evaluate = evaluate
        #: by label of a choice: what `outlined` returns for some of its options, by index
        self._outlines: dict[str, dict[int, str]] = {}
        #: reason why some values are texts, with the remedy; None as long as all are the values that the objective got
        self.note: str | None = None

    def of(self, params: Params) -> Any:
        """Return the values for these params; `note` then says whether they are texts."""
        if self._evaluate is not None:
            return self._evaluate(params)
        value, is_exact = self._restored.evaluate(params) if self._restored else (dict(params), False)
        if is_exact:
            return value
        evaluate = self._of_module
        if evaluate is None:
            return value
        try:
            return evaluate(params)
        except Exception as error:  # a space may call any function
            self.note = f"the space of {self._record.module} fails on these params: {short(error)}"
            return value

    def shown(self, params: Params, label: str) -> Any:
        """Return the value of one active label as a table shows it.

        The value None becomes a text, because None in a table stands for an inactive label.
        """
        value = self._restored.shown(params, label) if self._restored else params[label]
        return "None" if value is None else value

    def outlined(self, params: Params, label: str) -> Any:
        """Return the same as `shown`, but a tuple or dict among the options of a choice in the form of `brief`."""
        drawn = params[label]
        known = self._outlines.get(label)
        if known is None:
            known = self._outlines[label] = self._outlines_of(label)
        return known[drawn] if isinstance(drawn, int) and drawn in known else self.shown(params, label)

    def _outlines_of(self, label: str) -> dict[int, str]:
        if self._restored is None:
            return {}
        texts = {index: brief(value) for index, value in self._restored.outlines(label).items()}
        if not texts:
            return {}
        # Options that differ only in rounded digits keep their texts in `shown`, which differ.
        counts = Counter([*texts.values(), *map(str, self._restored.labels[label].options or ())])
        return {index: text for index, text in texts.items() if counts[text] == 1}

    @cached_property
    def _restored(self) -> RestoredSpace | None:
        """The space that the store has; None if it has no space, or the space cannot be read."""
        if self._record.tree is None:
            return None
        try:
            return RestoredSpace(self._record.tree)
        except (ValueError, TypeError, RecursionError):
            return None

    @cached_property
    def _of_module(self) -> Evaluate | None:
        """Function that evaluates params with the space of the study's module; None, with a note, if there is none.

        The module is used only if this program has imported it itself, because a stranger's store may name any module.
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
        return space.evaluate


class TrialResult(TrialFacts):
    """A recorded trial for users: the facts of `core.columns`, and the values that its objective got."""

    def __init__(self, trial: Trial, values: Values, store: Store, record: StudyRecord) -> None:
        super().__init__(trial)
        self._values = values
        self._store = store
        self._record = record

    @cached_property
    def values(self) -> Any:
        """Values that the objective got, in the space's own shape; see `StudyResults.values_note`."""
        return self._values.of(self._trial.params)

    @property
    def losses(self) -> Mapping[str, float]:  # type: ignore[override] # a fact cannot be set either
        """Losses by name, as the objective returned them; empty in a study without `objectives`."""
        return turned(self._trial.outcome.losses, self._record.objectives)

    @property
    def merit(self) -> Merit:
        """Sort key, which is least for the best trial; see `core.best.merit`."""
        return merit(self._trial)

    @property
    def is_feasible(self) -> bool:
        """True if no constraint is above 0."""
        return not self.violation

    @cached_property
    def reports(self) -> Sequence[Report]:
        """Intermediate losses as the objective reported them, each with `.attempt`, `.step`, `.loss` and `.at`."""
        reports, objectives = self._store.reports(self._record.key, [self.number]), self._record.objectives
        return tuple(replace(each, loss=turned_first(each.loss, objectives)) for each in reports)

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
    """Return a trial's values in short form, as all tables and pages show them."""
    try:
        return brief(trial.values)
    except Exception as error:  # a space may call any function, which may fail on these params
        return f"({type(error).__name__})"


def brief(value: object) -> str:
    """Return values as a short text, with rounded numbers."""
    if isinstance(value, float):
        # A whole number, such as a width, keeps its digits.
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.5g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {brief(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(brief, value)) + ")"
    return str(value)


class TrialResults(Sequence[TrialResult]):
    """Trials of a study in the order of their numbers, finished or not: those recorded when this was created.

    They are read from the store in pages when they are needed.
    """

    def __init__(self, store: SqlStore, record: StudyRecord, values: Values) -> None:
        self._store = store
        self._record = record
        self._values = values
        #: numbers of the trials; they have gaps if a repair has moved trials away
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

        Raises StoreError if the trial cannot be read. A slice or a loop leaves it out with a warning.
        """
        if isinstance(place, slice):
            return list(self._of(self._numbers[place]))
        number = self._numbers[place]
        for trial in self._of([number]):
            return trial
        raise StoreError(f"trial {number} of study {self._record.name!r} cannot be read; the warning says why")

    def _of(self, numbers: Sequence[int]) -> Iterator[TrialResult]:
        where = self._values, self._store, self._record
        # Returned in the order of `numbers`, because the store returns another order.
        found = {trial.number: trial for trial in self._store.trials(self._record.key, numbers)}
        return (TrialResult(found[number], *where) for number in numbers if number in found)
