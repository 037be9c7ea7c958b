"""Optuna's records of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from enum import IntEnum
from typing import Any

from shadho_celery.core.trial import TrialState as State
from shadho_celery.core.trial import turned_first
from shadho_celery.objective.suggest import Trial, fact_name
from shadho_celery.optuna.distributions import law_of
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


_STATES = {State.FAILED: TrialState.FAIL, State.CANCELLED: TrialState.FAIL}
_STATES |= {State.COMPLETE: TrialState.COMPLETE, State.PRUNED: TrialState.PRUNED, State.RUNNING: TrialState.RUNNING}


@dataclass(frozen=True, kw_only=True)
class FrozenTrial:
    """A recorded trial, in the shape of Optuna's."""

    number: int = -1
    state: TrialState = TrialState.COMPLETE
    #: losses as the objective returned them; of a pruned trial that of its last report
    values: Sequence[float] | None = None
    #: value of each label that it asked for, and its law in all trials
    params: Mapping[str, Any] = field(default_factory=dict)
    distributions: Mapping[str, Law] = field(default_factory=dict)
    user_attrs: Mapping[str, Any] = field(default_factory=dict)
    system_attrs: Mapping[str, Any] = field(default_factory=dict)
    #: reported values by step
    intermediate_values: Mapping[int, float] = field(default_factory=dict)
    datetime_start: datetime | None = None
    datetime_complete: datetime | None = None

    @property
    def value(self) -> float | None:
        """The only loss. Raises RuntimeError if there are several."""
        if self.values is not None and len(self.values) > 1:
            raise RuntimeError("this trial has several values; read values")
        return self.values[0] if self.values else None

    @property
    def last_step(self) -> int | None:
        """Greatest step of a report, or None without reports."""
        return max(self.intermediate_values, default=None)

    @property
    def duration(self) -> timedelta | None:
        """Time from its start to its end, or None if it has not ended."""
        if self.datetime_start is None or self.datetime_complete is None:
            return None
        return self.datetime_complete - self.datetime_start


def create_trial(
    *,
    state: TrialState = TrialState.COMPLETE,
    value: float | None = None,
    values: Sequence[float] | None = None,
    params: Mapping[str, Any] | None = None,
    distributions: Mapping[str, Any] | None = None,
    user_attrs: Mapping[str, Any] | None = None,
    system_attrs: Mapping[str, Any] | None = None,
    intermediate_values: Mapping[int, float] | None = None,
) -> FrozenTrial:
    """Return a trial that was evaluated elsewhere, for `Study.add_trial`."""
    return FrozenTrial(
        state=TrialState(state),
        values=values if value is None else [value],
        params=params or {},
        distributions={label: law_of(each) for label, each in (distributions or {}).items()},
        user_attrs=user_attrs or {},
        system_attrs=system_attrs or {},
        intermediate_values=intermediate_values or {},
    )


def frozen(trial: TrialResult, schema: Schema | None, objectives: Mapping[str, str], reports: Any) -> FrozenTrial:
    """Return a recorded trial in the shape of Optuna's. `reports` are those of the trial."""
    state = _STATES.get(State(trial.state), TrialState.WAITING)
    values = [*trial.losses.values()] if objectives else [] if trial.loss is None else [trial.loss]
    laws = {} if schema is None else schema.laws
    last = max((each.attempt for each in reports), default=0)
    has_values = state in {TrialState.COMPLETE, TrialState.PRUNED} and bool(values)
    return FrozenTrial(
        number=trial.number,
        state=state,
        values=values if has_values else None,
        params=trial.values if schema is not None and state is not TrialState.WAITING else {},
        distributions={label: laws[label] for label in trial.params if label in laws},
        user_attrs={fact_name(name): value for name, value in trial.metrics.items()},
        intermediate_values={
            each.step: turned_first(each.loss, objectives) for each in reports if each.attempt == last
        },
        datetime_start=_moment(trial.started_at),
        datetime_complete=_moment(trial.finished_at),
    )


def _moment(seconds: float | None) -> datetime | None:
    """Return a moment in local time without a zone, as Optuna does."""
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).astimezone().replace(tzinfo=None)
