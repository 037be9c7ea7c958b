"""Params as rows of numeric features, their similarity, and the complexity of a subspace.

`likeness` is the kernel of models that learn a function of params as a sum of functions of single labels and of pairs
of labels. Therefore the effect of one label is learned as fast among ten labels as among three. An effect of the
product of two labels is found, too. Source: Duvenaud, Nickisch, Rasmussen, "Additive Gaussian Processes", NeurIPS 2011.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.trial import Params
from shadho_celery.space.domains import Domain

Array = NDArray[np.float64]

#: feature of an inactive label: the middle of [0, 1], which is not far from other values
INACTIVE = 0.5
#: a label contributes to the complexity by the central interval with this probability
MASS = 0.999
#: length scale of the function of a numeric label, as a fraction of the label's range; weight of the function's linear
#: part
LENGTH, STRAIGHT = 0.2, 0.5
#: maximum number of similarities of single labels that are computed at a time
CELLS = 2**20


def complexity(domains: Iterable[Domain]) -> float:
    """Return SHADHO's complexity of a subspace: the product of a factor for each of its domains; 1 without domains.

    The factor of a continuous domain is 2 + |b - a|, where (a, b) is the central interval of its latent variable with
    probability MASS. The factor of a domain with n values is 2 - 1/n, so that of a constant is 1. The complexity
    depends on the units of the params. Source: SHADHO, arXiv 1707.01428.
    """
    size = 1.0
    for domain in domains:
        if (values := domain.cardinality(MASS)) is not None:
            size *= 2.0 - 1.0 / values
        else:
            low, high = domain.central_interval(MASS)
            size *= 2.0 + abs(high - low)
    return size


def features(params_list: Sequence[Params], domains: Mapping[str, Domain], inactive: float = INACTIVE) -> Array:
    """Return the params of n trials as an array of shape (n, d) in [0, 1]: one column per domain, in order.

    A label that is inactive in a trial, and so missing in its params, has the value `inactive`. A row depends only on
    its own trial, so it can be computed once.
    """
    columns = np.full((len(params_list), len(domains)), inactive)
    for column, (label, domain) in enumerate(domains.items()):
        active = [row for row, params in enumerate(params_list) if label in params]
        if active:
            columns[active, column] = domain.to_unit([params_list[row][label] for row in active])
    return columns


def likeness(left: Array, right: Array, is_numeric: Sequence[bool]) -> tuple[Array, Array]:
    """Return the similarities of trials: the mean over single labels, and the mean over pairs of labels.

    `left` and `right` are rows of features, shapes (n, labels) and (m, labels), with NaN for inactive labels. Both
    results have shape (n, m).
    """
    labels = len(is_numeric)
    single, squares = np.zeros((2, len(left), len(right)))
    # Only a few labels are computed at a time, because all together would need too much memory.
    step = max(1, CELLS // max(1, single.size))
    for first in range(0, labels, step):
        some = slice(first, first + step)
        alike = _alike(left[:, None, some], right[None, :, some], is_numeric[some])
        single += alike.sum(axis=2)
        squares += np.square(alike).sum(axis=2)
    pairs = (single**2 - squares) / 2.0  # Newton's identity: the sum of the products of all pairs
    return single / max(labels, 1), pairs / max(math.comb(labels, 2), 1)


def _alike(left: Array, right: Array, is_numeric: Sequence[bool]) -> Array:
    """Return the similarity of each label: 1 for equal options, and for a label that is inactive in both trials."""
    if all(is_numeric):
        alike = _near(left, right)
    else:
        alike = (left == right).astype(float)
        if any(is_numeric):
            alike = np.where(is_numeric, _near(left, right), alike)
    inactive = np.isnan(left), np.isnan(right)
    if inactive[0].any() or inactive[1].any():
        alike = np.where(inactive[0] | inactive[1], inactive[0] & inactive[1], alike)
    return alike


def _near(left: Array, right: Array) -> Array:
    """Return the similarity of numbers in [0, 1]: a Gaussian function of their distance plus a linear
    kernel, weighted.
    """
    curve = np.exp(-0.5 * ((left - right) / LENGTH) ** 2)
    line = 4.0 * (left - 0.5) * (right - 0.5)
    return np.asarray((1.0 - STRAIGHT) * curve + STRAIGHT * line)
