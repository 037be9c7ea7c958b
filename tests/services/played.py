"""Studies that were played by the simulated executor, and a console to show them on."""

from __future__ import annotations

import io
import itertools
import sqlite3
from contextlib import closing
from pathlib import Path

from hyperopt import hp
from rich.console import Console

from services.searching import SimulatedSearch
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, Report, Result, TrialState
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.simulation.executor import Play
from shadho_celery.space.compile import Space, compile_space
from shadho_celery.store.sql import SqlStore
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
    play: Play = play,
    turns: int = 999,
    store: str = "sqlite://",
) -> tuple[StudyState, Scheduler, Space]:
    """Play a study for so many turns of its loop at most."""
    search = SimulatedSearch(
        space or two_models(),
        play,
        {"gpu": 1, "[/cpu]": 2},
        settings=StudySettings(sampler="random"),
        limits=Limits(trials=trials),
        clock=ManualClock(1000.0),
        seed=1,
        name=name,
        store=SqlStore(store),
    )
    turned = itertools.count()
    search.run(lambda _: next(turned) >= turns)
    return search.study, search.scheduler, search.space


def record_played(path: Path) -> None:
    """Record studies that were played on a manual clock: one with failures, and one whose trials were promoted."""
    study, *_ = searched(name="played", store=f"sqlite:///{path}")
    in_force = {"sampler": "auto", "policy": "cost", "shares": "promise", "pool": None, "pruner": None}
    study.store.record_settings(study.record.key, study.fence, {}, in_force)
    study.close()
    study, *_ = searched(name="rungs", store=f"sqlite:///{path}", turns=0)
    for host, continued in (("a", True), ("b", True), ("a", False), ("a", None)):
        origin = None
        for rung, where, went_on in [(0, "z", None), (1, "a", True), (2, host, continued)]:
            trial = study.add("model=net", {"model": 0, "exponent": -3.5}, 1, 3.0**rung, rung=rung, origin=origin)
            origin = trial.number if origin is None else origin
            attempt = study.send(trial, "cpu")
            study.tell(Report(number=attempt.number, attempt=1, step=1, loss=2.0, at=1001.0))
            metrics = {"accuracy": 0.5}
            outcome = Outcome(state=TrialState.COMPLETE, loss=0.5, metrics=metrics, continued=went_on)
            study.tell(Result(number=attempt.number, attempt=1, outcome=outcome, host=where, at=1001.0))
    study.close()
    with closing(sqlite3.connect(path)) as store, store:
        store.execute("UPDATE trials SET code = 'a1b2c3d4e5f6' WHERE number = 8")
        memories = "memory = 1048576, gpu_memory = 2097152, outgrown = 'gpu,cpu', outgrown_memory = 'gpu,host'"
        store.execute(f"UPDATE trials SET {memories} WHERE number = 0")


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200, force_terminal=False), text
