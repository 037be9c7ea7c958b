"""Problems with budgets: what a trial of a budget returns, what it costs, and its true loss at the full budget.

Sources: Kandasamy et al., "Multi-fidelity Bayesian Optimisation with Continuous Approximations", ICML 2017 (Hartmann's
functions with budgets); Falkner et al., "BOHB", ICML 2018 (stochastic counting ones).
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hyperopt import hp

Draw = np.random.Generator


@dataclass(frozen=True, kw_only=True)
class FidelityProblem:
    """A search space whose trials have budgets."""

    space: Any
    #: values, budget and a generator for its noise -> loss
    loss: Callable[[Any, float, Draw], float]
    #: values -> loss without noise at the full budget
    truth: Callable[[Any], float]
    #: least of `truth`
    optimum: float
    least: float
    most: float
    #: budget -> cost, in any unit
    cost: Callable[[float], float]


#: weights of Hartmann's functions, and by dimension their widths and centres
HARTMANN_WEIGHTS = np.array([1.0, 1.2, 3.0, 3.2])
HARTMANN_3 = (
    np.array([[3, 10, 30], [0.1, 10, 35], [3, 10, 30], [0.1, 10, 35]]),
    1e-4 * np.array([[3689, 1170, 2673], [4699, 4387, 7470], [1091, 8732, 5547], [381, 5743, 8828]]),
)
HARTMANN_6 = (
    np.array(
        [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
    ),
    1e-4
    * np.array(
        [
            [1312, 1696, 5569, 124, 8283, 5886],
            [2329, 4135, 8307, 3736, 1004, 9991],
            [2348, 1451, 3522, 2883, 3047, 6650],
            [4047, 8828, 8732, 5743, 1091, 381],
        ]
    ),
)
#: the full budget of these
FULL = 100.0


def hartmann(matrices: tuple[Any, Any], optimum: float, *, bias: float = 0.5, noise: float = 0.1) -> FidelityProblem:
    """Hartmann's function, whose weights are off by `bias` at the least budget, with one-sided noise."""
    widths, centres = matrices
    labels = [f"x{place}" for place in range(widths.shape[1])]

    def value(values: Any, budget: float) -> float:
        x = np.array([values[label] for label in labels])
        weights = HARTMANN_WEIGHTS - bias * (1 - math.log(budget) / math.log(FULL))
        return -float(weights @ np.exp(-(widths * (x - centres) ** 2).sum(axis=1)))

    return FidelityProblem(
        space={label: hp.uniform(label, 0, 1) for label in labels},
        loss=lambda values, budget, draw: (
            value(values, budget) + noise * (1 - math.log(budget) / math.log(FULL)) * abs(float(draw.standard_normal()))
        ),
        truth=lambda values: value(values, FULL),
        optimum=optimum,
        least=1.0,
        most=FULL,
        cost=lambda budget: 0.05 + 0.95 * (budget / FULL) ** 2,
    )


def counting_ones(
    categories: int, numbers: int, least: float | None = None, most: float | None = None
) -> FidelityProblem:
    """As many ones as can be among categories of 0 and 1, and numbers seen by `budget` draws of a coin."""
    total = categories + numbers
    coins, shares = [f"c{n}" for n in range(categories)], [f"x{n}" for n in range(numbers)]

    def loss(values: Any, budget: float, draw: Draw) -> float:
        count = max(1, round(budget))
        seen = sum(draw.binomial(count, values[label]) / count for label in shares)
        return -float(sum(values[label] for label in coins) + seen)

    return FidelityProblem(
        space={
            **{label: hp.choice(label, [0, 1]) for label in coins},
            **{label: hp.uniform(label, 0, 1) for label in shares},
        },
        loss=loss,
        truth=lambda values: -float(sum(values[label] for label in (*coins, *shares))),
        optimum=-float(total),
        least=576 / total if least is None else least,
        most=93312 / total if most is None else most,
        cost=lambda budget: budget,
    )


PROBLEMS: Mapping[str, FidelityProblem] = {
    "mfh3": hartmann(HARTMANN_3, -3.862782),
    "mfh6": hartmann(HARTMANN_6, -3.322368),
    "misleading": hartmann(HARTMANN_6, -3.322368, bias=3.5, noise=4.0),
    "ones": counting_ones(8, 8),
}


def read_problems(path: Path) -> Mapping[str, FidelityProblem]:
    """Return PROBLEMS of a Python file: by name a FidelityProblem, or the dict of its fields."""
    found = runpy.run_path(str(path))["PROBLEMS"]
    return {
        name: each if isinstance(each, FidelityProblem) else FidelityProblem(**each) for name, each in found.items()
    }
