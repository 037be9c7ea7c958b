"""Failures of a study's trials counted by kind, and the decision whether a study is hopeless."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shadho_celery.core.failures import Failure, read_failure
from shadho_celery.core.trial import Trial


@dataclass(frozen=True, kw_only=True)
class FailureCount:
    """Number of trials that have failed in the same way, and the first of them."""

    #: the failure of the trial `first`
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
        known = self._counts.get(failure.kind)
        new = FailureCount(failure=failure, first=trial.number)
        if known is not None:
            # Trials do not end in the order of their numbers. The failure shown is that of the trial named beside it.
            new = replace(new if trial.number < known.first else known, trials=known.trials + 1)
        self._counts[failure.kind] = new
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
        """A text with the failure that all of the first trials have had, or None."""
        kinds = {failure.kind for failure in self._failed.values()}
        if len(kinds) != 1 or len(self._failed) < len(self._numbers):
            return None
        return f"the first {len(self._numbers)} trials have all failed with {self._failed[self._numbers[0]]}"
