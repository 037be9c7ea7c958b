"""Avoid what fails, but for a few trials that see whether it still does.

Sources: Gardner, Kusner, Xu, Weinberger, Cunningham, "Bayesian Optimization with Inequality Constraints", ICML 2014,
and Gelbart, Snoek, Adams, "Bayesian Optimization with Unknown Constraints", UAI 2014: the expected improvement is
weighed by the chance that the trial succeeds. Added here is a limit: random search's own number of failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.predictors.feasibility import FailureModel, Features
from shadho_celery.space.domains import Array
from shadho_celery.space.split import Subspace

#: the chance that a trial fails, before anything is known but that some did
FAILS = 0.2
#: draws from the law, of which one that will do is taken
DRAWS = 32
#: the part of random search's failures that is spent on guesses regardless of failures: what lies behind a wall of
#: them is reached, if slowly
BOLD = 0.3
#: the least chance of success that is told from none
_LEAST = 1e-9

#: trials of either outcome that are learned from at a time
LATEST = 100


class FailureAvoidance:
    """Failures of a subspace. As long as there is none it draws and changes nothing."""

    def __init__(self, subspace: Subspace) -> None:
        self._subspace = subspace
        self._features = Features(subspace.domains)
        self._failures = FailureModel(self._features.is_numeric, FAILS)
        #: params of trials that have finished since anything was asked, and whether they failed
        self._untold: list[tuple[Params, bool]] = []
        #: trials since the first guess, and how many of them failed
        self._guessed = self._failed = 0

    def tell(self, trial: Trial, guessed: bool) -> None:
        """A trial has finished; `guessed` where it was no random draw."""
        failed = trial.state is TrialState.FAILED
        self._untold.append((trial.params, failed))
        if guessed:
            self._guessed += 1
            self._failed += failed

    def draw(self, generator: np.random.Generator) -> dict[str, Any]:
        """A draw from the law, the less often the more likely it fails."""
        self._read()
        if not self._failures.any:
            return self._subspace.sample(generator, 1)[0]
        draws = self._subspace.sample(generator, DRAWS)
        chances = self._chances(draws)
        taken = np.flatnonzero(generator.random(DRAWS) >= chances)
        return draws[int(taken[0]) if len(taken) else int(chances.argmin())]

    def weights(self, candidates: Sequence[dict[str, Any]], generator: np.random.Generator) -> Array:
        """What the logarithm of each candidate's expected improvement is worth less for its failures, shape (n,)."""
        self._read()
        if not self._failures.any:
            return np.zeros(len(candidates))
        usual = float(self._chances(self._subspace.sample(generator, DRAWS)).mean())
        random_failures = usual * self._guessed
        if self._failed + 1 <= BOLD * random_failures:
            return np.zeros(len(candidates))
        chances = self._chances(candidates)
        weights: Array = np.log(np.maximum(1.0 - chances, _LEAST))
        safe = chances <= usual
        if self._failed > random_failures and safe.any():
            weights = np.where(safe, weights, -np.inf)
        return weights

    def _read(self) -> None:
        """Learn from what has finished since; of the many trials of an earlier run, from the latest of either kind."""
        kept: list[tuple[Params, bool]] = []
        counts = [0, 0]
        for params, failed in reversed(self._untold):
            counts[failed] += 1
            if counts[failed] <= LATEST:
                kept.append((params, failed))
        kept.reverse()
        rows = self._features.rows([params for params, _ in kept])
        for row, (_, failed) in zip(rows, kept, strict=True):
            self._failures.tell(row, failed)
        self._untold.clear()

    def _chances(self, params_list: Sequence[Params]) -> Array:
        return self._failures.chances(self._features.rows(params_list))
