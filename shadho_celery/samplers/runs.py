"""Base of samplers that search in runs, each from a new start: `cma` and `local`.

What such a sampler learns depends only on the trials in the order in which they were told. Each proposal has its own
generator, seeded by its place. A resumed study therefore continues where it was.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import numpy as np

from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.space.split import Key, Subspace

#: maximum number of draws until one differs from all trials so far
TRIES = 10


class SamplerInRuns(ABC):
    """Proposes params one by one, and learns from the trials of its current run."""

    adaptive = True

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        self._subspace = subspace
        self._entropy = tuple(entropy)
        self._told = 0
        #: end of the last run: earlier proposals belong to that run
        self._since = -math.inf
        self._tried: set[Key] = set()

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        first = self._told + len(pending)
        taken = {self._subspace.key(trial.params) for trial in pending}

        def is_tried(params: Params) -> bool:
            return (key := self._subspace.key(params)) in self._tried or key in taken

        asked: list[Params] = []
        for index in range(first, first + n):
            generator = np.random.default_rng([*self._entropy, index])
            draws = [self._draw(generator)]
            while is_tried(draws[-1]) and len(draws) < TRIES:
                draws.append(self._draw(generator))
            asked.append(draws[-1])
            taken.add(self._subspace.key(draws[-1]))
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self._told += 1
            if trial.state is TrialState.CANCELLED:
                continue
            self._tried.add(self._subspace.key(trial.params))
            if trial.asked_at is None or trial.asked_at >= self._since:
                self._learn(trial)

    def _end_run(self, trial: Trial) -> None:
        """End the current run with this trial."""
        self._since = -math.inf if trial.finished_at is None else trial.finished_at

    @abstractmethod
    def _draw(self, generator: np.random.Generator) -> Params:
        """Return params of the current run."""

    @abstractmethod
    def _learn(self, trial: Trial) -> None:
        """Learn from an ended trial of the current run."""
