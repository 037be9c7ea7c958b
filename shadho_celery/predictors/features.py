"""Params as rows of numeric features, and the complexity of a subspace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.trial import Params
from shadho_celery.space.domains import Domain

Array = NDArray[np.float64]

#: feature of an inactive label: the middle of [0, 1], which is not far from any value
INACTIVE = 0.5


def complexity(domains: Iterable[Domain], mass: float = 0.999) -> float:
    """Return the size of a subspace: the product over its leaves of a factor for each domain; 1 without leaves.

    A continuous domain has the factor 2 + |b - a|, where (a, b) is the central interval of its unscaled distribution
    that holds `mass`. A discrete domain with n values has 2 - 1/n, so a constant has 1. The size has no unit, but
    depends on the units of the params. Source: SHADHO, arXiv 1707.01428.
    """
    size = 1.0
    for domain in domains:
        if (values := domain.cardinality(mass)) is not None:
            size *= 2.0 - 1.0 / values
        else:
            low, high = domain.central_interval(mass)
            size *= 2.0 + abs(high - low)
    return size


def features(params_list: Sequence[Params], domains: Mapping[str, Domain], inactive: float = INACTIVE) -> Array:
    """Return the params of n trials as an array of shape (n, d) in [0, 1]: one column per domain, in order.

    A label that is not active in a trial (missing in its params) has the value `inactive`. Rows are independent, so
    with a long history each row can be computed once, when the trial ends.
    """
    columns = np.full((len(params_list), len(domains)), inactive)
    for column, (label, domain) in enumerate(domains.items()):
        active = [row for row, params in enumerate(params_list) if label in params]
        if active:
            columns[active, column] = domain.to_unit([params_list[row][label] for row in active])
    return columns
