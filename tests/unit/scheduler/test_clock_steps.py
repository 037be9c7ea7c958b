"""A scheduler's decisions follow the time that passes, whatever its clock and those of its workers show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hyperopt import hp
from services.clocks import MachineTime
from services.families import fleet_of

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock, SystemClock
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.scheduler.scheduler import WATCH_SECONDS, Scheduler
from shadho_celery.simulation.executor import SimulatedExecutor
from shadho_celery.space.compile import compile_space
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits

SPACE = compile_space({"x": hp.uniform("x", 0, 1)})

#: seconds by which the time of day is set while the study runs
steps = pytest.mark.parametrize("step", [-3600.0, 3600.0])


class Workers(ManualClock):
    """The workers' clock: time passes as on the scheduler's machine, the time of day is that of 1970."""

    def __init__(self, machine: MachineTime) -> None:
        self._machine = machine

    def now(self) -> float:
        return self._machine.monotonic()

    wall = now

    def sleep(self, seconds: float) -> None:
        self._machine.sleep(seconds)

    def advance_to(self, moment: float) -> None:
        self._machine.sleep(max(0.0, moment - self.now()))


def searching(
    machine: MachineTime, lasting: Callable[[Attempt], float], *, slots: int = 2, speculate: bool = False, **limits: Any
) -> Scheduler:
    def play(attempt: Attempt, compute_class: str) -> Outcome:
        return Outcome(state=TrialState.COMPLETE, loss=0.5, seconds=lasting(attempt))

    study = open_study(SqlStore("sqlite://"), SPACE.describe(), name="s", seed=1, clock=SystemClock())
    executor = SimulatedExecutor(fleet_of({"cpu": slots}), play, Workers(machine))
    return make_scheduler(Plan.of(SPACE, StudySettings(speculate=speculate), Limits(**limits)), study, executor)


def turn(scheduler: Scheduler, seconds: float, machine: MachineTime) -> None:
    until = machine.monotonic() + seconds
    while machine.monotonic() < until and not scheduler.done:
        scheduler.turn()


@steps
def test_a_study_of_15_seconds_takes_15_seconds_although_the_clock_is_set(
    machine_time: MachineTime, step: float
) -> None:
    scheduler = searching(machine_time, lambda attempt: 1.0, seconds=15.0)
    began = machine_time.monotonic()
    turn(scheduler, 5.0, machine_time)
    assert not scheduler.stopping
    machine_time.set_by(step)
    turn(scheduler, 100.0, machine_time)
    assert scheduler.done
    assert 15.0 <= machine_time.monotonic() - began <= 17.0


@steps
def test_a_trial_is_copied_once_it_is_late_whatever_the_clocks_show(machine_time: MachineTime, step: float) -> None:
    """The last trial hangs beside an idle slot; its worker's clock is decades behind, and the scheduler's is set."""

    def seconds(attempt: Attempt) -> float:
        return 10_000.0 if (attempt.number, attempt.attempt) == (20, 1) else 10.0

    scheduler = searching(machine_time, seconds, speculate=True, trials=21)
    turn(scheduler, 105.0, machine_time)
    assert scheduler.study.trial(20).state is TrialState.RUNNING
    machine_time.set_by(step)
    turn(scheduler, 5.0, machine_time)
    assert scheduler.study.copied == 0
    turn(scheduler, 30.0, machine_time)
    assert scheduler.done
    assert (scheduler.study.copied, scheduler.study.rescued) == (1, 1)


@steps
def test_the_cost_model_is_told_how_long_trials_have_run_whatever_the_clocks_show(
    machine_time: MachineTime, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    scheduler = searching(machine_time, lambda attempt: 1_000.0, trials=10)
    told: list[float] = []
    monkeypatch.setattr(scheduler.cost_model, "watch", lambda running: told.extend(each.seconds for each in running))
    turn(scheduler, 1.0, machine_time)
    machine_time.set_by(step)
    turn(scheduler, 3 * WATCH_SECONDS, machine_time)
    assert [round(seconds, -1) for seconds in told] == [10.0, 10.0, 20.0, 20.0, 30.0, 30.0]


def test_after_a_resume_what_runs_has_run_since_the_resume(machine_time: MachineTime) -> None:
    """When it began, only its worker's clock tells."""
    first = searching(machine_time, lambda attempt: 1_000.0, trials=10)
    turn(first, 50.0, machine_time)
    store = first.study.store
    assert isinstance(store, SqlStore)
    first.study.close()
    study = open_study(store, SPACE.describe(), name="s", resume=True, clock=SystemClock())
    assert {study.running_since(trial) for trial in study.alone} == {machine_time.monotonic()}
