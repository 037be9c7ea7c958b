"""Studies that were played by the simulated executor, and a console to show them on."""

from __future__ import annotations

import io
import itertools

from hyperopt import hp
from rich.console import Console

from services.searching import SimulatedSearch
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.simulation.executor import Play
from shadho_celery.space.compile import Space, compile_space
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
    space: Space | None = None, trials: int = 10, name: str = "s", play: Play = play, turns: int = 999
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
    )
    turned = itertools.count()
    search.run(lambda _: next(turned) >= turns)
    return search.study, search.scheduler, search.space


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200, force_terminal=False), text
