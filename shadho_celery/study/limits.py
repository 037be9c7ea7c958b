"""Limits of a study: what ends it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shadho_celery.core.objectives import turned_first
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Trial
from shadho_celery.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """The limits that end a study. A field is None if it sets no limit."""

    #: number of trials that end COMPLETE, PRUNED or FAILED
    trials: int | None = None
    #: seconds of this run of the scheduler
    seconds: float | None = None
    #: a loss of a feasible trial that is good enough
    target: float | None = None
    #: number of first trials of this run; if they all fail in one way, and the study has had no success, it stops
    failures: int | None = None
    #: number of trials in a row that end without a better feasible loss; with several losses, without a change of the
    #: Pareto front
    without_gain: int | None = None
    #: lowest budget at which a loss may reach the target; None for any budget
    budget: float | None = None
    #: money that the attempts may have cost when the last trial is sent
    money: float | None = None

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise UsageError(f"a study needs at least one trial, not {self.trials}; change trials")
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"a study needs more than {self.seconds} seconds; change seconds")
        if self.trials is self.seconds is self.target is self.without_gain is self.money is None:
            raise UsageError("a study needs an end: give trials, seconds, target or early_stop")

    @classmethod
    def of(cls, settings: StudySettings) -> Limits:
        """Return the limits in the settings. Raises UsageError without a limit, or for a target with several losses."""
        failures, target = settings.max_failures or None, settings.target
        if target is not None and settings.objectives:
            if settings.has_several:
                names = ", ".join(settings.objectives)
                raise UsageError(f"a target is for one loss, but this study has several: {names}; leave out target")
            target = turned_first(target, settings.objectives)
        return cls(
            trials=settings.trials,
            seconds=settings.seconds,
            target=target,
            failures=failures,
            without_gain=settings.early_stop,
            money=settings.max_cost,
        )

    def trials_left(self, trials: int) -> float:
        """Return the number of trials that may still follow once there are `trials`; infinity without a limit."""
        return math.inf if self.trials is None else self.trials - trials

    def seconds_left(self, began: float, now: float) -> float:
        """Return the seconds left at the time `now` of a run that started at `began`; infinity without a limit."""
        return math.inf if self.seconds is None else began + self.seconds - now

    def is_met_by(self, best: Trial | None) -> bool:
        """Return whether the `best` COMPLETE trial is feasible and reaches the target."""
        if self.target is None or best is None or best.outcome.violation:
            return False
        if self.budget is not None and best.budget is not None and best.budget < self.budget:
            # Losses at lower budgets do not count. A resumed study may have had higher budgets.
            return False
        return (best.outcome.loss or 0.0) <= self.target
