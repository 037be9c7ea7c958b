"""A recorded trial, and the sequence of a study's trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from msgspec.structs import replace

from shadho_celery.core.best import Merit, merit
from shadho_celery.core.columns import TrialFacts
from shadho_celery.core.failures import headline
from shadho_celery.core.objectives import turned, turned_first
from shadho_celery.core.trial import Report, Trial, TrialState
from shadho_celery.errors import StoreError
from shadho_celery.results.values import Values
from shadho_celery.store.base import Store, StudyRecord
from shadho_celery.store.sql import PAGE, SqlStore


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
        reports, objectives = self._store.reports(self._record.key, self.number), self._record.objectives
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
