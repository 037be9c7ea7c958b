"""Finished trials, and a sampler's trials one after another, without a study."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shadho_celery.core.trial import Outcome, Params, Trial, TrialState
from shadho_celery.samplers.random import Sampler


def told(params: Params, end: float | TrialState, **facts: Any) -> Trial:
    """Return a trial that has ended in a loss, or in another state."""
    outcome = Outcome(state=end) if isinstance(end, TrialState) else Outcome(state=TrialState.COMPLETE, loss=end)
    return Trial(**{"number": 0, "subspace": "all", **facts}, params=params, state=outcome.state, outcome=outcome)


def search(sampler: Sampler, end: Callable[[Params], float | TrialState], trials: int) -> list[Params]:
    """Ask for trials one after another, and tell how each ends; return their params."""
    asked: list[Params] = []
    for _ in range(trials):
        asked += sampler.ask(1, [])
        sampler.tell([told(asked[-1], end(asked[-1]))])
    return asked
