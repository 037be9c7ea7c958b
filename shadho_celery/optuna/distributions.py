"""Optuna's names of the laws of labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shadho_celery.space.schema import Law, choice, number

_NAME = "distribution"


def FloatDistribution(low: float, high: float, log: bool = False, step: float | None = None) -> Law:  # noqa: N802
    """Return the law of a float."""
    return number(_NAME, low, high, is_int=False, step=step, log=log)


def IntDistribution(low: int, high: int, log: bool = False, step: int = 1) -> Law:  # noqa: N802
    """Return the law of a whole number."""
    return number(_NAME, low, high, is_int=True, step=step, log=log)


def CategoricalDistribution(choices: Iterable[Any]) -> Law:  # noqa: N802
    """Return the law of a choice."""
    return choice(_NAME, choices)


def law_of(distribution: Any) -> Law:
    """Return the law of a distribution, which may be one of Optuna itself."""
    if isinstance(distribution, Law):
        return distribution
    if hasattr(distribution, "choices"):
        return choice(_NAME, distribution.choices)
    is_int = type(distribution).__name__.startswith("Int")
    ends = distribution.low, distribution.high
    return number(_NAME, *ends, is_int=is_int, step=distribution.step, log=distribution.log)
