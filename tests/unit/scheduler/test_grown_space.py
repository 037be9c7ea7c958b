"""A study whose objective asks for more and more labels goes on with the trials that were drawn before."""

from __future__ import annotations

from msgspec import to_builtins
from services.families import fleet_of

from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.session.opening import Opening, Request
from shadho_celery.simulation.executor import SimulatedExecutor
from shadho_celery.space.schema import number, suggested
from shadho_celery.study.state import Limits


def play(attempt: Attempt, compute_class: str) -> Outcome:
    """Ask for one label more every 25 trials."""
    labels = [f"x{place}" for place in range(1 + attempt.number // 25)]
    laws = {label: number(label, 0, 1, is_int=False) for label in labels}
    asked = to_builtins(suggested(laws, {label: attempt.params.get(label, 0.5) for label in labels}))
    seconds = attempt.params.get("x0", 0.5) * (10 if compute_class == "gpu" else 100)
    return Outcome(state=TrialState.COMPLETE, loss=1.0, seconds=1 + seconds, asked=asked)


def test_trials_that_were_drawn_ahead_run_after_the_space_has_grown() -> None:
    request = Request(space=None, store="sqlite://", limits=Limits(trials=120), seed=0, given={"sampler": "random"})
    opened = Opening(request).open()
    study, clock = opened.study, ManualClock(0.0)
    study.clock = clock
    executor = SimulatedExecutor(fleet_of({"gpu": 2, "cpu": 4}), play, clock)
    scheduler = opened.scheduler(executor)
    for _ in range(5000):
        if scheduler.done:
            break
        scheduler.turn()
        if study.has_grown:
            opened = opened.grown()
            scheduler.become(opened.scheduler(executor, is_known=True))
    assert study.count(TrialState.COMPLETE) == 120
    assert not study.count(TrialState.WAITING)
    assert {f"x{place}" for place in range(4)} <= {*study.trials.of([119])[0].params}
