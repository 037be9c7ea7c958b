"""Failures of a study's trials counted by kind, and the decision whether a study is hopeless."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from shadho_celery.core.failures import Failure, read_failure
from shadho_celery.core.trial import Trial


@dataclass(frozen=True, kw_only=True)
class FailureCount:
    """Number of trials that have failed in the same way, and the first of them."""

    #: what is true of the failures of all of them
    failure: Failure
    #: the least number of these trials
    first: int
    trials: int = 1

    def __str__(self) -> str:
        return f"{self.trials} x {self.failure}; the first is trial {self.first}"


class Failures:
    """Counts of failed trials by kind of failure."""

    def __init__(self, trials: Iterable[Trial] = ()) -> None:
        self._counts: dict[str, FailureCount] = {}
        for trial in trials:
            self.add(trial)

    def add(self, trial: Trial) -> Failure:
        """Count a FAILED trial. Return how it failed."""
        failure = read_failure(trial.outcome.error)
        if (known := self._counts.get(failure.kind)) is None:
            self._counts[failure.kind] = FailureCount(failure=failure, first=trial.number)
        else:
            shared, first = known.failure.shared(failure), min(known.first, trial.number)
            self._counts[failure.kind] = FailureCount(failure=shared, first=first, trials=known.trials + 1)
        return failure

    def common(self) -> list[FailureCount]:
        """Return the counts, the greatest first. Of equal counts, the one with the earlier first trial comes first."""
        return sorted(self._counts.values(), key=lambda each: (-each.trials, each.first))


class Hopelessness:
    """Decides whether the first trials of a run all fail in one way, as with a wrong name in the code.

    The first trials are those with the least numbers, because the order in which trials end depends on the machines.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        """`numbers` are the trial numbers of the first trials. If it is empty, `reason` is always None."""
        self._numbers = numbers
        self._failed: dict[int, Failure] = {}

    def add(self, trial: Trial, failure: Failure) -> None:
        """Record how a trial has failed. A trial that is not among the first ones is ignored."""
        if trial.number in self._numbers:
            self._failed[trial.number] = failure

    @property
    def reason(self) -> str | None:
        """A text with the failure that all of the first trials have had, or None. Their messages may differ."""
        causes = {failure.cause for failure in self._failed.values()}
        if len(causes) != 1 or len(self._failed) < len(self._numbers):
            return None
        shared = reduce(Failure.shared, self._failed.values())
        return f"the first {len(self._numbers)} trials have all failed with {shared}"
