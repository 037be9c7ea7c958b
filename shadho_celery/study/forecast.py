"""Forecast of the loss at the full budget from the loss at a lower one, by a line for each rung.

The line of a rung predicts the loss on the next rung. It is a least-squares fit to the trials that ran on both. These
are the best of the lower rung, which does not bias the line, because they were selected by its argument. Their
correlation is computed as if a few more trials agreed perfectly, so that the first results do not decide.

The trust in a rung is the correlation that the line implies for all trials of the rung, as in Thorndike's correction
for a restricted range (case 2; Thorndike, "Personnel Selection", 1949). The correlation of promoted trials alone would
be too low, because their losses are close together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: number of trials that are assumed to agree perfectly, beside those that ran on both rungs
AGREEING = 4
#: minimum number of trials on both rungs for a correlation
FEWEST = 3
#: maximum number of trials of a line, the latest ones
LATEST = 64
#: losses above the median count as at most this many distances of the best loss from the median
FAR = 4.0
#: variance of the error without trials on both rungs, as a fraction of the variance on the lower one
LOOSE = 0.1
#: losses beyond this, and spreads below its inverse, are not computed with, because their squares overflow
LARGEST = 1e50


class Line(NamedTuple):
    """Prediction of the loss on the next rung: ``offset + slope * min(loss, most)``."""

    slope: float = 1.0
    offset: float = 0.0
    #: variance of the error
    error: float = 0.0
    #: correlation of the losses on the two rungs, from 0 to 1
    trust: float = 1.0
    #: greatest loss that is not an outlier
    most: float = math.inf


class Forecast:
    """Predicts losses at the full budget from the results on all rungs."""

    def __init__(self, results: Sequence[Mapping[int, float]]) -> None:
        """`results` has for each rung, the lowest first, the losses by origin, in the order of the results."""
        self.lines = [_line(low, high) for low, high in pairwise(results)]
        #: for each rung: the variance of the error of a prediction from it, in the unit of the losses at the top
        self.errors = [0.0]
        slope = 1.0
        for line in reversed(self.lines):
            self.errors.insert(0, self.errors[0] + slope * slope * line.error)
            slope *= line.slope

    def trust(self, rung: int) -> float:
        """Return the product of the trust in this rung and in all higher ones."""
        return math.prod(line.trust for line in self.lines[rung:])

    def top_loss(self, rung: int, loss: float) -> float:
        """Return the predicted loss at the full budget of a trial with this loss on this rung."""
        for line in self.lines[rung:]:
            loss = line.offset + line.slope * min(loss, line.most)
        return loss


def _line(low: Mapping[int, float], high: Mapping[int, float]) -> Line:
    """Return the line of a rung. `low` and `high` are losses by origin, on this rung and on the next one."""
    every = np.clip([loss for loss in low.values() if math.isfinite(loss)], -LARGEST, LARGEST)
    if not len(every):
        return Line(trust=0.0 if low else 1.0)
    every, most = _tamed(every)
    variance = float(every.var())
    both = [origin for origin in high if math.isfinite(high[origin]) and math.isfinite(low.get(origin, math.inf))]
    if not both:
        return Line(error=LOOSE * variance, most=most)
    x = np.clip([low[origin] for origin in both[-LATEST:]], -LARGEST, most)
    y, _ = _tamed(np.clip([high[origin] for origin in both[-LATEST:]], -LARGEST, LARGEST))
    spread_x, spread_y = float(x.std()), float(y.std())
    if len(x) < FEWEST or min(spread_x, spread_y) < 1.0 / LARGEST:
        return Line(offset=float(y.mean() - x.mean()), error=LOOSE * variance, most=most)
    correlation = float(((x - x.mean()) * (y - y.mean())).mean()) / (spread_x * spread_y)
    correlation = max(0.0, (len(x) * correlation + AGREEING) / (len(x) + AGREEING))
    slope = correlation * spread_y / spread_x
    error = spread_y**2 * max(0.0, 1.0 - correlation**2)
    explained = slope**2 * variance
    return Line(
        slope=slope,
        offset=float(y.mean() - slope * x.mean()),
        error=error,
        trust=math.sqrt(explained / (explained + error)) if explained > 0.0 else 0.0,
        most=most,
    )


def _tamed(losses: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return the losses with outliers moved to a greatest loss, and this loss."""
    middle, best = float(np.median(losses)), float(losses.min())
    # If half of the losses are the best one, the distance is that of the others.
    distance = middle - best or float(np.median([0.0, *(losses[losses > best] - best)]))
    most = min(middle + FAR * distance, float(losses.max()))
    return np.minimum(losses, most), most
