"""A recorded trial, and the sequence of a study's trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from msgspec.structs import replace

from shadho_celery.core.failures import headline
from shadho_celery.core.hardware import shortages
from shadho_celery.core.objectives import turned, turned_first
from shadho_celery.core.trial import Attempt, Memory, Report, Trial, TrialState
from shadho_celery.errors import StoreError
from shadho_celery.results.values import Values
from shadho_celery.store.base import Store, StudyRecord
from shadho_celery.store.sql import PAGE, SqlStore


class TrialResult:
    """A trial as the store has it: facts, and the values that its objective got."""

    def __init__(self, trial: Trial, values: Values, store: Store, record: StudyRecord) -> None:
        self._trial = trial
        self._values = values
        self._store = store
        self._record = record

    @property
    def number(self) -> int:
        """Position of the trial in its study, from 0."""
        return self._trial.number

    @property
    def state(self) -> TrialState:
        """WAITING, QUEUED, RUNNING, COMPLETE, PRUNED, FAILED or CANCELLED; equal to that str."""
        return self._trial.state

    @property
    def subspace(self) -> str:
        """Name of the subspace of the params, such as ``kernel=rbf``."""
        return self._trial.subspace

    @property
    def params(self) -> dict[str, Any]:
        """Drawn value of each active label; of a choice the index of its option."""
        return dict(self._trial.params)

    @cached_property
    def values(self) -> Any:
        """What the objective got, by the space's own shape; see `StudyResults.values_note`."""
        return self._values.of(self._trial.params)

    @property
    def loss(self) -> float | None:
        """Loss as it is minimised, of several the first one, of a PRUNED trial that of its last report; or None.

        One to maximise is negative here: `losses` has it as the objective returned it.
        """
        return self._trial.loss

    @property
    def losses(self) -> Mapping[str, float]:
        """Losses by name, as the objective returned them; empty in a study without `objectives`."""
        return turned(self._trial.losses, self._record.objectives)

    @property
    def constraints(self) -> Mapping[str, float]:
        """Constraints by name; the trial is feasible if none is above 0."""
        return self._trial.constraints

    @property
    def is_feasible(self) -> bool:
        """True if no constraint is above 0."""
        return not self._trial.violation

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Further results of the objective."""
        return self._trial.metrics

    @property
    def error(self) -> str | None:
        """Reason of its failure, with the traceback."""
        return self._trial.error

    @property
    def warning(self) -> str | None:
        """Message to the user although it ended well, for instance about a dropped metric."""
        return self._trial.warning

    @property
    def code(self) -> str | None:
        """Digest of the code that it ran under; None for a function without a module."""
        return self._trial.code

    @property
    def log(self) -> str | None:
        """The last lines of its output, with time stamps, if it has failed."""
        return self._trial.log

    @property
    def seconds(self) -> float | None:
        """Seconds that the objective took."""
        return self._trial.seconds

    @property
    def memory(self) -> int | None:
        """Peak bytes of the objective's resident memory."""
        return self._trial.memory

    @property
    def gpu_memory(self) -> int | None:
        """Peak bytes of the objective's GPU memory; None if it used none."""
        return self._trial.gpu_memory

    @property
    def outgrown(self) -> Sequence[tuple[str, Memory]]:
        """Compute classes on which it ran out of memory, each with the kind, equal to the str "gpu" or "host"."""
        return shortages(self._trial.outgrown, self._trial.outgrown_memory)

    @property
    def seed(self) -> int:
        """Seed of the objective's own draws."""
        return self._trial.seed

    @property
    def budget(self) -> float | None:
        """Part of the fidelity; None for all of it."""
        return self._trial.budget

    @property
    def rung(self) -> int | None:
        """Rung of its budget, from 0; None in a study without budgets."""
        return self._trial.rung

    @property
    def origin(self) -> int | None:
        """Number of the trial whose params, seed and checkpoints it continues; None if they are its own."""
        return self._trial.origin

    @property
    def continued(self) -> bool | None:
        """True if a promoted trial found a checkpoint of its origin, False if it began anew; None for others."""
        return self._trial.continued

    @property
    def step(self) -> int | None:
        """Step of the last report of a trial that was pruned; None for others."""
        return self._trial.step

    @property
    def compute_class(self) -> str | None:
        """Compute class of its present or last machine."""
        return self._trial.compute_class

    @property
    def host(self) -> str | None:
        """Name of its present or last machine."""
        return self._trial.host

    @property
    def asked_at(self) -> float | None:
        """Seconds since the epoch at which it was proposed."""
        return self._trial.asked_at

    @property
    def started_at(self) -> float | None:
        """Seconds since the epoch at which it began to run."""
        return self._trial.started_at

    @property
    def finished_at(self) -> float | None:
        """Seconds since the epoch at which it ended."""
        return self._trial.finished_at

    @property
    def attempts(self) -> int:
        """Number of times that it was sent to a worker."""
        return self._trial.attempt

    @property
    def lost(self) -> int:
        """Number of attempts that were lost with their workers."""
        return self._trial.lost

    @property
    def live(self) -> Sequence[Attempt]:
        """Attempts that are queued or run, with class, host and start of each."""
        if self._trial.state not in {TrialState.QUEUED, TrialState.RUNNING}:
            return ()
        return tuple(self._trial.live or [self._trial.attempted(state=self._trial.state)])

    @cached_property
    def reports(self) -> Sequence[Report]:
        """Intermediate losses, as they were reported, each with `.attempt`, `.step`, `.loss` and `.at`."""
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
    """Trials of a study by number, finished or not, as far as they were recorded when this was made.

    Trials are read from the store in pages when they are asked for.
    """

    def __init__(self, store: SqlStore, record: StudyRecord, values: Values) -> None:
        self._store = store
        self._record = record
        self._values = values
        #: a repair may have moved trials away, so that the numbers have gaps
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
        """Return the trial at a place, -1 for the one with the greatest number; or those of a slice.

        Raises StoreError for one that cannot be read; a slice, and a loop, leave it out with a warning.
        """
        if isinstance(place, slice):
            return list(self._of(self._numbers[place]))
        number = self._numbers[place]
        for trial in self._of([number]):
            return trial
        raise StoreError(f"trial {number} of study {self._record.name!r} cannot be read; the warning says why")

    def _of(self, numbers: Sequence[int]) -> Iterator[TrialResult]:
        where = self._values, self._store, self._record
        # In the order of `numbers`: the store has its own.
        found = {trial.number: trial for trial in self._store.trials(self._record.key, numbers)}
        return (TrialResult(found[number], *where) for number in numbers if number in found)
