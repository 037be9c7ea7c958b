"""Optuna's names of the laws of labels."""

from __future__ import annotations

from functools import partial
from typing import Any

from shadho_celery.space.schema import Law, choice, number

_NAME = "distribution"

FloatDistribution = partial(number, _NAME, is_int=False)
IntDistribution = partial(number, _NAME, is_int=True)
CategoricalDistribution = partial(choice, _NAME)


def law_of(distribution: Any) -> Law:
    """Return the law of a distribution, which may be one of Optuna itself."""
    if isinstance(distribution, Law):
        return distribution
    if hasattr(distribution, "choices"):
        return choice(_NAME, distribution.choices)
    make = IntDistribution if type(distribution).__name__.startswith("Int") else FloatDistribution
    return make(distribution.low, distribution.high, step=distribution.step, log=distribution.log)
