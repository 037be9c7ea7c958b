"""Declared cost: the relative cost of trials that the study file gives, as a function for the cost model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shadho_celery.core.settings import Cost
from shadho_celery.core.trial import Params
from shadho_celery.errors import UsageError
from shadho_celery.predictors.cost_model import DeclaredCost
from shadho_celery.space.compile import Space
from shadho_celery.space.split import Subspace
from shadho_celery.space.tree import Value

log = logging.getLogger(__name__)


def declared_cost(cost: Cost, space: Space, subspaces: Sequence[Subspace]) -> DeclaredCost:
    """Return the setting `cost` as a function of subspace and drawn params.

    Raises UsageError for an unknown subspace, and if the cost of params drawn from the space is not a positive number.
    If a user's function fails later, the cost of a typical draw from the subspace is used.
    """
    if not callable(cost):
        return _by_name(cost, [subspace.name for subspace in subspaces])
    costs = cost
    typical = {s.name: _typical(costs, space, s) for s in subspaces}
    failed: list[str] = []

    def of_params(subspace: str, params: Params) -> float:
        try:
            return _positive(costs(space.evaluate(params)))
        except (Exception, SystemExit) as error:
            if not failed:
                log.warning("STUDY['cost'] failed and is ignored for these trials: %s: %s", type(error).__name__, error)
                failed.append(subspace)
            return typical[subspace]

    return of_params


def _by_name(costs: Mapping[str, float], names: Sequence[str]) -> DeclaredCost:
    known: dict[str, float] = {}
    for name, value in costs.items():
        if name not in names:
            raise UsageError(f"STUDY['cost'] names {name!r}, which is not a subspace; there are {', '.join(names)}")
        try:
            known[name] = _positive(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"STUDY['cost'] of {name!r} is {value!r}: {error}") from None
    middle = math.exp(float(np.mean([math.log(value) for value in known.values()]))) if known else 1.0
    return lambda subspace, params: known.get(subspace, middle)


def _typical(cost: Callable[[Value], float], space: Space, subspace: Subspace) -> float:
    params = subspace.sample(np.random.default_rng(0), 1)[0]
    try:
        return _positive(cost(space.evaluate(params)))
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(
            f"STUDY['cost'] failed for params of {subspace.name}: {reason}; it gets what the objective gets, and "
            "returns a number above 0 to which the seconds are in proportion"
        ) from error


def _positive(value: float) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{number} is not a number above 0")
    return number
