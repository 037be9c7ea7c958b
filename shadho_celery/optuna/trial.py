"""Trials in the shape of Optuna's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any

from shadho_celery.objective.suggest import Trial
from shadho_celery.program.optuna_study import STATES, moment
from shadho_celery.results.trial import TrialResult
from shadho_celery.space.schema import Law, Schema

__all__ = ["FrozenTrial", "Trial", "TrialState", "create_trial"]


class TrialState(IntEnum):
    """Optuna's states of a trial."""

    RUNNING = 0
    COMPLETE = 1
    PRUNED = 2
    FAIL = 3
    WAITING = 4

    def is_finished(self) -> bool:
        """Return whether the trial has ended."""
        return self not in {TrialState.RUNNING, TrialState.WAITING}


@dataclass(frozen=True, kw_only=True)
class FrozenTrial:
    """A recorded trial, in the shape of Optuna's."""

    number: int = -1
    state: TrialState = TrialState.COMPLETE
    #: losses as the objective returned them; for a pruned trial, the loss of its last report
    values: Sequence[float] | None = None
    #: value of each label that the trial asked for; and the law of the label, which includes those of other trials
    params: Mapping[str, Any] = field(default_factory=dict)
    distributions: Mapping[str, Law] = field(default_factory=dict)
    user_attrs: Mapping[str, Any] = field(default_factory=dict)
    system_attrs: Mapping[str, Any] = field(default_factory=dict)
    #: reported values by step
    intermediate_values: Mapping[int, float] = field(default_factory=dict)
    #: greatest step of a report; None without reports
    last_step: int | None = None
    datetime_start: datetime | None = None
    datetime_complete: datetime | None = None
    #: time from its start to its end; None if it has not ended
    duration: timedelta | None = None

    @property
    def value(self) -> float | None:
        """The only loss. Raises RuntimeError if there are several."""
        if self.values is not None and len(self.values) > 1:
            raise RuntimeError("this trial has several values; read values")
        return self.values[0] if self.values else None


def create_trial(*, value: float | None = None, **facts: Any) -> FrozenTrial:
    """Return a trial that was evaluated elsewhere, for `Study.add_trial`."""
    return FrozenTrial(**facts) if value is None else FrozenTrial(values=[value], **facts)


def frozen(
    trial: TrialResult, schema: Schema, objectives: Mapping[str, str], steps: Mapping[int, float]
) -> FrozenTrial:
    """Return a recorded trial in the shape of Optuna's. `steps` are its reports."""
    values = trial.losses.values() if objectives else [trial.loss]
    return FrozenTrial(
        number=trial.number,
        state=TrialState[STATES.get(trial.state, "WAITING")],
        values=[value for value in values if value is not None] or None,
        params=trial.values,
        distributions={label: schema.laws[label] for label in trial.params if label in schema.laws},
        user_attrs=trial.metrics,
        intermediate_values=steps,
        last_step=max(steps, default=None),
        datetime_start=(start := moment(trial.started_at)),
        datetime_complete=(end := moment(trial.finished_at)),
        duration=end - start if start and end else None,
    )
