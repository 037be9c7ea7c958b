"""A scheduler is built of the parts that its settings name; an unknown name is refused before anything runs."""

from __future__ import annotations

import pytest
from hyperopt import hp
from services.families import fleet_of

from shadho_celery.core.hardware import DEFAULT_CLASSES
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.simulation.executor import SimulatedExecutor
from shadho_celery.space.compile import compile_space
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import MemoryStore
from shadho_celery.study.state import Limits, StudyState

SPACE = compile_space({"x": hp.uniform("x", 0, 1)})

UNKNOWN = [
    (
        StudySettings(sampler="lattice"),
        "there is no sampler 'lattice'; choose one of auto, random, tpe, gp, qmc, grid, cma, optuna:NAME",
    ),
    (StudySettings(policy="best"), "there is no policy 'best'; choose one of cost, paper, fifo"),
    (StudySettings(shares="fair"), "there is no shares 'fair'; choose one of even, uniform, promise, paper"),
]


def plan(settings: StudySettings | None = None) -> Plan:
    return Plan.of(SPACE, settings or StudySettings(), Limits(trials=3))


def build(settings: StudySettings | None = None) -> Scheduler:
    def play(attempt: Attempt, compute_class: str) -> Outcome:
        return Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=1.0)

    clock = ManualClock()
    record = StudyRecord(key="k", name="n", module="", seed=1, space={}, created_at=0.0)
    study = StudyState(MemoryStore(), record, 1, clock=clock)
    executor = SimulatedExecutor(fleet_of({"cpu": 2}), play, clock)
    return make_scheduler(plan(settings), study, executor)


@pytest.mark.parametrize(("settings", "message"), UNKNOWN, ids=["sampler", "policy", "shares"])
def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(settings: StudySettings, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(settings)
    assert str(caught.value) == message


def test_rungs_that_make_no_ladder_are_refused_as_names_are() -> None:
    with pytest.raises(UsageError, match="fidelity"):
        plan(StudySettings(fidelity={"least": 9, "most": 1}))


def test_without_settings_a_study_runs_with_the_default_ones() -> None:
    scheduler = build()
    assert tuple(scheduler.expected) == DEFAULT_CLASSES
    scheduler.run()
    assert scheduler.study.count(TrialState.COMPLETE) == 3


def test_the_expected_classes_are_those_of_the_settings() -> None:
    assert tuple(build(StudySettings(classes=("cpu", "gpu"))).expected) == ("cpu", "gpu")


def test_the_slots_of_a_trial_are_those_of_the_settings() -> None:
    scheduler = build(StudySettings(slots=2))
    scheduler.run()
    assert {trial.slots for trial in scheduler.study} == {2}
