"""Local search: steps around the best trial, longer after a success and shorter after a failure, with restarts.

Sources: the step width is that of a (1+1) evolution strategy with the success rule, as in Kern, Müller, Hansen, Büche,
Ocenasek, Koumoutsakos, "Learning Probability Distributions in Continuous Evolutionary Algorithms", Natural Computing 3,
2004. Steps along the difference of two good trials follow Storn, Price, "Differential Evolution", 1997.

A run starts with draws from the prior and ends when its steps are too short. Every second run starts at the best trial
so far instead. With many slots, each slot gets a different step from the same trial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shadho_celery.core.best import feasible_loss
from shadho_celery.core.trial import Params, Trial
from shadho_celery.samplers.runs import SamplerInRuns
from shadho_celery.space.domains import Domain, cell
from shadho_celery.space.split import Subspace

#: width of a run's first steps, and width below which it ends, in units of the ranges
FIRST_WIDTH, LAST_WIDTH = 0.25, 1e-6
#: number of results of draws from the prior with which a run starts
DRAWS = 5
#: number of good trials of a run whose differences are used as steps
GOOD = 8
#: probability of a step along such a difference, and of a step that moves only some labels, including choices
ALONG, SOME = 0.4, 0.3
#: width of the random part of a step along such a difference, relative to that of other steps
NARROWER = 0.1


class LocalSampler(SamplerInRuns):
    """Local search within one subspace."""

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        self._domains = subspace.domains
        #: factor of the width after a success; after a failure it is divided by the fourth root, so one success in five
        #: keeps it
        self._growth = math.exp(2.0 / math.sqrt(len(self._domains) + 1))
        #: the best trials of this run, the best first, with their losses; and the best trial of all
        self._good: list[tuple[float, Params]] = []
        self._best: tuple[float, Params] | None = None
        self._width = FIRST_WIDTH
        self._runs = self._drawn = 0
        #: time of the last success: a worse trial that was proposed before it says nothing about the width of the steps
        self._success = -math.inf

    def _learn_in_run(self, trial: Trial) -> None:
        loss = feasible_loss(trial)
        is_better = not self._good or loss < self._good[0][0]
        if loss < math.inf:
            # Of equal losses the latest comes first, so that the search moves across a plateau.
            place = next((place for place, (other, _) in enumerate(self._good) if loss <= other), len(self._good))
            self._good.insert(place, (loss, trial.params))
            del self._good[GOOD:]
            if self._best is None or loss < self._best[0]:
                self._best = (loss, trial.params)
        if self._drawn < DRAWS:
            self._drawn += 1
            return
        if is_better:
            self._width = min(self._growth * self._width, FIRST_WIDTH)
            self._success = -math.inf if trial.finished_at is None else trial.finished_at
        elif trial.asked_at is None or trial.asked_at >= self._success:
            self._width *= self._growth**-0.25
        if self._width < LAST_WIDTH:
            self._runs += 1
            at_best = self._runs % 2 == 1 and self._best is not None
            self._good = [self._best] if at_best and self._best is not None else []
            self._drawn, self._width = DRAWS if at_best else 0, FIRST_WIDTH
            self._end_run(trial)

    def _draw(self, generator: np.random.Generator) -> Params:
        if self._drawn < DRAWS or not (self._good and self._domains):
            return self._subspace.sample(generator, 1)[0]
        return self._step(generator)

    def _step(self, generator: np.random.Generator) -> Params:
        """Return params one step away from the best trial of this run."""
        centre = self._good[0][1]
        one, other = (self._good[place][1] for place in generator.integers(len(self._good), size=2))
        some, along = (generator.random() < chance for chance in (SOME, ALONG))
        moved = generator.random(len(self._domains)) < (1.0 / len(self._domains) if some else 1.0)
        moved[generator.integers(len(self._domains))] = True
        part = generator.normal() if along else 0.0
        params = {**self._subspace.fixed}
        for (label, domain), moves in zip(self._domains.items(), moved, strict=True):
            params[label] = domain.sample(generator, 1).tolist()[0]
            step = self._width * generator.normal() * (NARROWER if along else 1.0)
            if label not in centre:
                continue
            if not domain.is_numeric:
                params[label] = params[label] if some and moves else centre[label]
            elif moves:
                if label in one and label in other:
                    step += part * (_unit(domain, one[label]) - _unit(domain, other[label]))
                low, high = cell(domain, centre[label])
                if some and abs(step) < high - low:  # move at least to the next value
                    step = math.copysign(high - low, step)
                params[label] = domain.from_unit([_unit(domain, centre[label]) + step]).tolist()[0]
            else:
                params[label] = centre[label]
        return {label: params[label] for label in self._subspace.space.active(params)}


def _unit(domain: Domain, value: Any) -> float:
    return float(domain.to_unit([value])[0])
