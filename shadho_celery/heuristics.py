"""Two scores of a subspace: complexity, from its domains alone, and performance, from its finished trials.

Both serve policy `paper` (see `ranking`). Source: Kinnison, Kremer-Herman, Thain, Scheirer, "SHADHO: Massively Scalable
Hardware-Aware Distributed Hyperparameter Optimization", arXiv 1707.01428, whose "priority" is our performance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shadho_celery.space.domains import Domain

Array = NDArray[np.float64]

#: the performance of a subspace about which nothing is known yet
START_VALUE = 1.0
#: with fewer losses nothing is known: a fit would call nearly every function flat, and some noise rough. Ten is also
#: the number of results after which the original refreshed its scores.
MIN_TRIALS = 10
#: what stands in a feature column where the label is inactive: the middle, so that it is far from no value
INACTIVE = 0.5
#: losses that differ by less than this share of their size are equal but for rounding
ROUNDING = 1e-12

#: what a fit may choose: ln(length scale) in sides of the unit cube, and log10(noise variance / signal variance). A
#: slope looks to a long length scale like a huge variance that is hardly seen, so the ratio must be able to fall far.
BOUNDS = ((math.log(0.05), math.log(10.0)), (-8.0, 1.0))
#: points of the first grid over the two
GRID = (6, 4)
#: how often the grid is halved around its best point; two reach steps of 0.26 in ln(length scale)
HALVINGS = 2


def complexity(domains: Iterable[Domain], mass: float = 0.999) -> float:
    """Size of a subspace: the product over its leaves of a factor for each domain; 1 for no leaves.

    A continuous domain counts 2 + |b - a|, where (a, b) is the central interval of its unscaled law that holds `mass`;
    a discrete one with n values 2 - 1/n; so a constant counts 1. No unit: it depends on the params' own units.
    Source: SHADHO, arXiv 1707.01428.
    """
    return math.prod(_factor(domain, mass) for domain in domains)


def _factor(domain: Domain, mass: float) -> float:
    values = domain.cardinality(mass)
    if values is not None:
        return 2.0 - 1.0 / values
    low, high = domain.central_interval(mass)
    return 2.0 + abs(high - low)


def features(params_list: Sequence[Mapping[str, Any]], domains: Mapping[str, Domain]) -> Array:
    """The params of n trials as an array of shape (n, d) in [0, 1]: one column per domain, in the mapping's order.

    A label that is inactive in a trial (absent from its params) gets 0.5 there. Rows do not depend on one another, so
    a caller with a long history makes each row once, when the trial ends.
    """
    columns = np.full((len(params_list), len(domains)), INACTIVE)
    for column, (label, domain) in enumerate(domains.items()):
        active = [row for row, params in enumerate(params_list) if label in params]
        if active:
            columns[active, column] = domain.to_unit([params_list[row][label] for row in active])
    return columns


class Fit(NamedTuple):
    """A Gaussian process, RBF plus white noise, as fitted to a subset of the trials."""

    #: of the RBF kernel, in units of the unit cube's side; infinite where the losses are constant
    length_scale: float
    #: signal variance / (signal + noise variance); 0 where pure noise explains the losses as well
    signal_share: float


def performance(
    features: Array, losses: Array, generator: np.random.Generator, fits: int = 10, subset: int = 80
) -> float:
    """How much the loss of a subspace varies with its params, 0 or more: high where little is known yet.

    The median over `fits` Gaussian processes, each on a random subset of the trials, of signal share / length scale.
    `features` has shape (n, d) in [0, 1], `losses` shape (n,); trials whose loss is not finite are left out. 0 for
    constant losses; 1.0 (the start value) for fewer than ten losses. A subset is 80 % of the trials and at most
    `subset` of them, so the time does not grow with the history. What varies more finely than the trials can tell is
    noise here: with 80 trials of two params, above about five periods a side. Raises ValueError for wrong shapes.

    Source: SHADHO, arXiv 1707.01428, changed: it read max - min of 1 / length scale off an unfitted kernel. See
    `performance_range`.
    """
    fitted = _fits(features, losses, generator, fits, subset)
    return float(np.median([fit.signal_share / fit.length_scale for fit in fitted])) if fitted else START_VALUE


def performance_range(
    features: Array, losses: Array, generator: np.random.Generator, fits: int = 10, subset: int = 80
) -> float:
    """The original's score on fitted kernels: max - min of 1 / length scale over the fits; arguments as above.

    Kept to compare with: it is erratic. It reads the spread of the fits and not what they agree on, and in pure noise
    any length scale fits, so noise scores highest. Source: SHADHO, arXiv 1707.01428.
    """
    fitted = _fits(features, losses, generator, fits, subset)
    return float(np.ptp([1.0 / fit.length_scale for fit in fitted])) if fitted else START_VALUE


def _fits(features: Array, losses: Array, generator: np.random.Generator, fits: int, subset: int) -> list[Fit]:
    """One fit per random subset; none where there are too few trials."""
    features, losses = np.asarray(features, dtype=float), np.asarray(losses, dtype=float)
    if features.ndim != 2 or losses.shape != features.shape[:1]:
        raise ValueError(f"features {features.shape} and losses {losses.shape} must have shapes (n, d) and (n,)")
    if fits < 1 or subset < 2:
        raise ValueError(f"{fits} fits of at most {subset} trials: at least one fit and two trials are needed")
    known = np.flatnonzero(np.isfinite(losses))
    if len(known) < MIN_TRIALS:
        return []
    size = min(subset, math.ceil(0.8 * len(known)))
    chosen = (known[generator.choice(len(known), size, replace=False)] for _ in range(fits))
    return [_fit(features[rows], losses[rows]) for rows in chosen]


def _fit(features: Array, losses: Array) -> Fit:
    """The fit of greatest marginal likelihood, shapes (m, d) and (m,): a grid, halved around its best point."""
    standardised = _standardise(losses)
    if standardised is None:
        return Fit(math.inf, 0.0)
    norms = np.square(features).sum(axis=1)
    squares = np.maximum(norms[:, None] + norms - 2.0 * features @ features.T, 0.0)  # rounding may leave -1e-16
    # Both axes descend, because the first of equals wins: in doubt the smoother and noisier one.
    axes = [np.linspace(high, low, points) for (low, high), points in zip(BOUNDS, GRID, strict=True)]
    steps = [axis[0] - axis[1] for axis in axes]
    best, gain = (axes[0][0], axes[1][0]), -math.inf
    for _ in range(1 + HALVINGS):
        gains = _gains(squares, standardised, *axes)
        row, column = divmod(int(gains.argmax()), len(axes[1]))
        if gains[row, column] > gain:
            best, gain = (axes[0][row], axes[1][column]), float(gains[row, column])
        steps = [step / 2 for step in steps]
        axes = [
            np.clip([at + step, at, at - step], *bounds) for at, step, bounds in zip(best, steps, BOUNDS, strict=True)
        ]
    # A signal costs two fitted numbers, and so must gain more than the Bayesian information criterion asks for two:
    # ln m. Without this the best of many fits to pure noise would have a short length scale and a high score.
    share = _signal_share(best[1]) if gain > math.log(len(losses)) else 0.0
    return Fit(float(np.exp(best[0])), float(share))


def _standardise(losses: Array) -> Array | None:
    """Losses with mean 0 and variance 1, or None where they are constant."""
    size = np.abs(losses).max()
    scaled = losses / (size or 1.0)  # a diverged trial's 1e300 would overflow in the variance
    if np.ptp(scaled) <= ROUNDING:
        return None
    standardised: Array = (scaled - scaled.mean()) / scaled.std()
    return standardised


def _signal_share(log_noise: Any) -> Any:
    return 1.0 / (1.0 + 10.0**log_noise)


def _gains(squares: Array, standardised: Array, log_scales: Array, log_noises: Array) -> Array:
    """Log marginal likelihood minus that of pure noise, shape (a, b), for a ln length scales and b log10 noise ratios.

    The total variance is profiled out: with the correlations C it is z' C^-1 z / m at its best.
    """
    m = len(standardised)
    diagonal = np.arange(m)
    share = _signal_share(log_noises)[:, None, None]
    # C bordered with z: the last row of its Cholesky factor is L^-1 z, so one batched call gives determinant and
    # quadratic form. The corner only has to exceed z' C^-1 z, at most m * 1e8 here. Eigenvectors would serve all noise
    # ratios at once, but cost as much as 12 factors, and as hundreds where LAPACK puts its threads to work on them.
    bordered = np.empty((len(log_noises), m + 1, m + 1))
    gains = np.empty((len(log_scales), len(log_noises)))
    for row, log_scale in enumerate(log_scales):
        np.multiply(share, np.exp(squares * (-0.5 * math.exp(-2.0 * log_scale))), out=bordered[:, :m, :m])
        bordered[:, diagonal, diagonal] = 1.0
        bordered[:, m, :m] = standardised
        bordered[:, m, m] = 1e12
        factor = np.linalg.cholesky(bordered)  # reads the lower triangle only
        variance = np.square(factor[:, m, :m]).sum(axis=1) / m
        log_determinant = 2.0 * np.log(factor[:, diagonal, diagonal]).sum(axis=1)
        gains[row] = -0.5 * (m * np.log(variance) + log_determinant)
    return gains
