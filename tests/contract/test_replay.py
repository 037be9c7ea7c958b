"""A seeded study replays: with four slots on a virtual clock, and one trial after another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp
from services.families import fleet_of

from shadho_celery import Study, minimize
from shadho_celery.core.names import SAMPLERS
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, Trial, TrialState
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.simulation.executor import SimulatedExecutor
from shadho_celery.space.compile import compile_space
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import MemoryStore
from shadho_celery.study.state import Limits, StudyState

SPACE = {
    "kind": hp.choice("kind", [{"u": hp.uniform("u", -2, 2)}, {"v": hp.loguniform("v", -7, 0)}]),
    "x": hp.uniform("x", -2, 2),
    "n": hp.randint("n", 4),
}
TRIALS = 30


def loss(params: Any) -> float:
    return float(params["x"] ** 2 + params.get("u", params.get("v", 0.0)) ** 2 + params["n"])


def play(attempt: Attempt, compute_class: str) -> Outcome:
    """Return a result after seconds that depend on the params; every now and then a failure."""
    seconds = 1.0 + abs(attempt.params["x"])
    if math.fmod(abs(attempt.params["x"]), 0.5) < 0.05:
        return Outcome(state=TrialState.FAILED, error="ValueError", seconds=seconds)
    return Outcome(state=TrialState.COMPLETE, loss=loss(attempt.params), seconds=seconds)


def played(sampler: str, seed: int, trials: int = TRIALS) -> list[Trial]:
    """Return the trials of a study on four slots."""
    clock = ManualClock()
    record = StudyRecord(key="played", name="played", module="", seed=seed, space={}, created_at=0.0)
    study = StudyState(MemoryStore(), record, 1, clock=clock)
    executor = SimulatedExecutor(fleet_of({"cpu": 3, "gpu": 1}), play, clock)
    limits, settings = Limits(trials=trials), StudySettings(sampler=sampler)
    make_scheduler(Plan.of(compile_space(SPACE), settings, limits), study, executor).run()
    return [*study]


def searched(sampler: str, seed: int) -> list[tuple[Any, float | None]]:
    """Return the params and losses of a study with one slot."""
    study = minimize(
        lambda values: loss({**values, **values["kind"]}), SPACE, trials=TRIALS, sampler=sampler, seed=seed
    )
    return [(trial.params, trial.loss) for trial in study.trials]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [*SAMPLERS, "optuna:TPESampler"])
def test_the_same_seed_gives_the_same_trials_at_the_same_moments_on_four_slots(sampler: str) -> None:
    first = played(sampler, 1)
    assert len(first) >= TRIALS
    assert first == played(sampler, 1)
    assert [trial.params for trial in first[:8]] != [trial.params for trial in played(sampler, 2, trials=8)[:8]]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_resumed_study_goes_on_with_the_same_proposals(sampler: str, tmp_path: Path) -> None:
    """Also where trials ended that had been asked for before others."""
    asked = []
    for place in range(2):
        where: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/{place}.db", "study": "s"}
        with Study(SPACE, sampler=sampler, seed=1, **where) as study:
            for trial in [study.ask() for _ in range(24)]:
                study.tell(trial, loss(trial.params) - 20.0 * (trial.number == 6))
            live = [study.ask().params for _ in range(3)] if place == 0 else []
        if place:
            with Study(SPACE, **where, resume=True) as study:
                live = [study.ask().params for _ in range(3)]
        asked.append(live)
    assert asked[0] == asked[1]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [*SAMPLERS, "optuna:TPESampler"])
def test_the_same_seed_gives_the_same_trials_one_after_another(sampler: str) -> None:
    assert searched(sampler, 1) == searched(sampler, 1)
