"""Plays a study on simulated slots: what the benchmarks of placement have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.scheduler.scheduler import TURN_SECONDS
from shadho_celery.simulation.executor import Fleet, Play, SimulatedClass, SimulatedExecutor
from shadho_celery.space.compile import compile_space
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import MemoryStore
from shadho_celery.study.state import Limits, StudyState


def play_study(
    space: Any,
    slots: Mapping[str, int],
    play: Play,
    seconds: float | None,
    *,
    trials: int | None = None,
    policy: str = "cost",
    shares: str | None = "uniform",
    sampler: str = "random",
    fidelity: Mapping[str, Any] | None = None,
    speculate: bool = True,
    repeats: int = 1,
    turn_seconds: float = TURN_SECONDS,
    seed: int = 0,
    on_turn: Callable[[StudyState], None] = lambda study: None,
) -> StudyState:
    """The study of `space` at its limit, `seconds` or `trials`; what still ran then is left unfinished.

    A result ends a turn, so where nothing else happens, longer turns change nothing but the time of the benchmark.
    """
    clock = ManualClock()
    of_sampler: dict[str, Any] = {"shares": shares, "sampler": sampler, "fidelity": fidelity, "repeats": repeats}
    settings = StudySettings(policy=policy, speculate=speculate, **of_sampler)
    record = StudyRecord(key="simulated", name="simulated", module="", seed=seed, space={}, created_at=0.0)
    study = StudyState(MemoryStore(), replace(record, in_force=settings.in_force()), 1, clock=clock)
    plan = Plan.of(compile_space(space), settings, Limits(seconds=seconds, trials=trials))
    fleet = Fleet(classes={name: SimulatedClass(workers=number) for name, number in slots.items()})
    scheduler = make_scheduler(plan, study, SimulatedExecutor(fleet, play, clock))
    scheduler.turn_seconds = turn_seconds
    while not (scheduler.stopping if trials is None else scheduler.done):
        scheduler.turn()
        on_turn(study)
    return study
