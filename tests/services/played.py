"""Studies that were played by the simulated executor, and a console to show them on."""

from __future__ import annotations

import io
from collections.abc import Callable

from hyperopt import hp
from rich.console import Console

from services.families import fleet_of
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.simulation.executor import SimulatedExecutor
from shadho_celery.space.compile import Space, compile_space
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits, StudyState

S = TrialState


def two_models() -> Space:
    return compile_space(
        hp.choice(
            "model",
            [
                {"name": "net", "rate": 10 ** hp.uniform("exponent", -4, -3)},
                {"name": "[/red] forest", "depth": hp.randint("depth", 3)},
            ],
        )
    )


def play(attempt: Attempt, compute_class: str) -> Outcome:
    if attempt.number % 5 == 3:
        return Outcome(
            state=S.FAILED, error="Traceback (most recent call last)\n  line\nValueError: [/bad] depth", seconds=1.0
        )
    return Outcome(state=S.COMPLETE, loss=1.0 / (1 + attempt.number), seconds=1.0)


def searched(
    space: Space | None = None,
    trials: int = 10,
    name: str = "s",
    play: Callable[..., Outcome] = play,
    turns: int = 999,
    store: str = "sqlite://",
) -> tuple[StudyState, Scheduler, Space]:
    space = space or two_models()
    clock = ManualClock(1000.0)
    study = open_study(SqlStore(store), space.describe(), name=name, seed=1, clock=clock)
    executor = SimulatedExecutor(fleet_of({"gpu": 1, "[/cpu]": 2}), play, clock)
    scheduler = make_scheduler(Plan.of(space, StudySettings(sampler="random"), Limits(trials=trials)), study, executor)
    for _ in range(turns):
        if scheduler.done:
            break
        scheduler.turn()
    return study, scheduler, space


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200, force_terminal=False), text
