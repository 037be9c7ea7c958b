"""Replay of an earlier run: tells rounds its trials in the order in which they were sent and ended."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shadho_celery.core.trial import Trial
from shadho_celery.fidelity.rounds import Rounds


class Replay:
    """Rounds that a resumed study tells its earlier results: each one after the trials that were sent before it.

    The choices of rounds depend on the results that they know, so this leads to the choices of the earlier run. A
    result counts from its trial's end. If trials were sent between that and its arrival, which takes milliseconds, the
    order differs.
    """

    def __init__(self, rounds: Rounds, trials: Iterable[Trial]) -> None:
        """`trials` are all that were sent, by number. Those without a time count as sent before all results."""
        self._rounds = rounds
        self._trials = iter(trials)
        self._next = next(self._trials, None)

    def tell(self, trial: Trial) -> None:
        """Add all trials that were sent before a result, including the result's own, and tell the result."""
        at = -math.inf if trial.finished_at is None else trial.finished_at
        while (sent := self._next) is not None:
            if sent.number > trial.number and sent.asked_at is not None and sent.asked_at >= at:
                break
            self._add(sent)
        self._rounds.tell(trial)

    def end(self) -> None:
        """Add the trials that were sent after all results."""
        while self._next is not None:
            self._add(self._next)

    def _add(self, trial: Trial) -> None:
        self._rounds.add(trial)
        self._next = next(self._trials, None)
