"""Trainings of the digits network by gangs on a virtual clock: the product's coordinator, strategies and tuner.

The gradients are real. The seconds of a gradient are drawn by (seed, place, step): two runs of one seed meet the same
luck. All workers are played by one process, so a training takes much less time than it lasts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from services.played_gang import PlayedGang

from shadho_celery.training.replica.replica import Delay
from shadho_celery.training.report import Report
from shadho_celery.training.strategies import Sync

#: seconds of an ordinary gradient
SECONDS = 0.05

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Seconds of a gradient: `seconds` and some jitter, and with a small probability 4 P times that, P Pareto."""

    #: seconds of an ordinary gradient
    seconds: float = SECONDS
    #: an ordinary gradient takes up to this fraction longer (uniform)
    jitter: float = 0.0
    #: chance that one is slow
    probability: float = 0.05
    #: of Pareto's law with x_m = 1
    alpha: float = 2.0

    def draw(self, generator: np.random.Generator, size: int) -> Floats:
        """Seconds of `size` gradients. Always takes 3 `size` draws, so that two runs of one seed meet the same luck."""
        slow = generator.random(size) < self.probability
        pareto = (1 - generator.random(size)) ** (-1 / self.alpha)
        return self.seconds * np.where(slow, 4 * pareto, 1.0) * (1 + self.jitter * generator.random(size))

    def delay(self, seed: int) -> Delay:
        """Seconds by place and step."""
        return lambda place, step: float(self.draw(np.random.default_rng([seed, place, step]), 1)[0])


CALM, PARETO = Stragglers(probability=0.0, jitter=0.02), Stragglers(jitter=0.02)


def seconds_a_step(law: Stragglers, replicas: int, backups: Any, *, steps: int, seed: int) -> Report:
    """Train on so little that only the time matters."""
    torch.manual_seed(seed)
    data = (torch.randn(64, 2), torch.randn(64, 1))
    gang = PlayedGang(
        Sync(replicas=replicas, backups=backups),
        nn.Linear(2, 1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data,
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        seconds=law.delay(seed),
        steps=steps,
        seed=seed,
    )
    return gang.train()
