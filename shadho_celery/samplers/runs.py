"""Base of samplers that search in runs, each from a new start: `cma` and `local`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from shadho_celery.core.trial import Params, Trial
from shadho_celery.samplers.base import Learner
from shadho_celery.space.split import Subspace

#: maximum number of draws until one differs from all trials so far
TRIES = 10


class SamplerInRuns(Learner):
    """Base class: proposes params one by one, and learns from the trials of its current run."""

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        #: time of the end of the last run: trials proposed before it are ignored
        self._since = -math.inf

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        taken = {self._subspace.key(trial.params) for trial in pending}
        asked: list[Params] = []
        for place in self._places(n, pending):
            generator = self._generator(place)
            for _ in range(TRIES):
                params = self._draw(generator)
                if self._is_new(params, taken):
                    break
            asked.append(params)
            taken.add(self._subspace.key(params))
        return asked

    def _learn(self, trial: Trial) -> None:
        if trial.asked_at is None or trial.asked_at >= self._since:
            self._learn_in_run(trial)

    def _end_run(self, trial: Trial) -> None:
        """End the current run with this trial. Trials proposed before its end will be ignored."""
        self._since = -math.inf if trial.finished_at is None else trial.finished_at

    def _draw(self, generator: np.random.Generator) -> Params:
        """Return one draw of params by the rule of the current run."""
        raise NotImplementedError

    def _learn_in_run(self, trial: Trial) -> None:
        """Learn from an ended trial of the current run."""
