"""Avoidance of failures, except for a few trials that test whether a region still fails.

Sources: Gardner, Kusner, Xu, Weinberger, Cunningham, "Bayesian Optimization with Inequality Constraints", ICML 2014,
and Gelbart, Snoek, Adams, "Bayesian Optimization with Unknown Constraints", UAI 2014: the expected improvement is
multiplied by the probability that the trial succeeds. Our addition is a limit: the number of failures that random
search would have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.predictors.feasibility import FailureModel
from shadho_celery.predictors.features import Array
from shadho_celery.space.split import Subspace

#: prior probability that a trial fails, used once a first trial has failed
FAILS = 0.2
#: number of draws from the prior, of which one that is likely to succeed is taken
DRAWS = 32
#: fraction of the failures of random search that may be spent on proposals that ignore failures, so that a region
#: behind failing ones is reached slowly
BOLD = 0.3
#: smaller probabilities of success count as this
_LEAST = 1e-9

#: maximum number of failed trials, and of other trials, from which is learned at a time
LATEST = 100


class FailureAvoidance:
    """Lets a sampler avoid params of a subspace that are likely to fail. It has no effect before the first failure."""

    def __init__(self, subspace: Subspace) -> None:
        self._subspace = subspace
        self._failures = FailureModel(subspace.domains, FAILS)
        #: params of trials that have finished since the last proposal, and True if they failed
        self._untold: list[tuple[Params, bool]] = []
        #: number of trials since the first proposal by a model, and how many of them failed
        self._guessed = self._failed = 0

    def tell(self, trial: Trial, guessed: bool) -> None:
        """Record a finished trial. `guessed` is True if it was not a random draw."""
        failed = trial.state is TrialState.FAILED
        self._untold.append((trial.params, failed))
        if guessed:
            self._guessed += 1
            self._failed += failed

    @property
    def any(self) -> bool:
        """True once a trial has failed."""
        self._read()
        return self._failures.any

    def draw(self, generator: np.random.Generator, within: Subspace | None = None) -> Params:
        """Return a draw from the prior of a subspace, by default of the whole.

        Draws that are likely to fail are accepted less often.
        """
        self._read()
        subspace = within or self._subspace
        if not self._failures.any:
            return subspace.sample(generator, 1)[0]
        draws = subspace.sample(generator, DRAWS)
        chances = self._failures.chances(draws)
        taken = np.flatnonzero(generator.random(DRAWS) >= chances)
        return draws[int(taken[0]) if len(taken) else int(chances.argmin())]

    def weights(
        self, candidates: Sequence[Params], generator: np.random.Generator, within: Subspace | None = None
    ) -> Array:
        """Return the terms, shape (n,), that account for failures in the log expected improvement of candidates.

        These are params of one subspace, by default of the whole.
        """
        self._read()
        weights = np.zeros(len(candidates))
        if not self._failures.any:
            return weights
        usual = float(self._failures.chances((within or self._subspace).sample(generator, DRAWS)).mean())
        random_failures = usual * self._guessed
        if self._failed + 1 > BOLD * random_failures:
            chances = self._failures.chances(candidates)
            weights = np.log(np.maximum(1.0 - chances, _LEAST))
            safe = chances <= usual
            if self._failed > random_failures and safe.any():
                weights = np.where(safe, weights, -np.inf)
        return weights

    def _read(self) -> None:
        """Learn from the trials since the last call. Of many trials of an earlier run, use the latest of either
        outcome.
        """
        counts = [0, 0]
        kept: list[tuple[Params, bool]] = []
        for params, failed in reversed(self._untold):
            counts[failed] += 1
            if counts[failed] <= LATEST:
                kept.append((params, failed))
        for params, failed in reversed(kept):
            self._failures.tell(params, failed)
        self._untold.clear()
