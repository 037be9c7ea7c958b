"""How much each label explains of values of trials: one additive model of all labels, measured on held-out trials.

Adaptive samplers draw the late trials near the best ones in all labels at once. Therefore a label without any effect
has other values in good trials than in bad ones, and a comparison label by label takes this for an effect. The model
has all labels at once: value = sum over labels of f(label) + noise. Each f is a Gaussian process with a variance of
its own, written in a few basis functions. The variances are estimated from the trials (automatic relevance
determination), so that a label has no effect where the others explain the values. Source: Bishop, "Pattern Recognition
and Machine Learning", 2006, sections 3.5 and 7.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shadho_celery.charts.chart import Array, Indices, thin_rows
from shadho_celery.charts.columns import Label, TrialColumns
from shadho_celery.charts.explained import most_telling, scaled, varies

#: minimum number of trials; maximum number from which effects are learned
LEAST, MOST_TRIALS = 20, 2000
#: minimum number of trials in which a label is active
LEAST_ACTIVE = 10
#: number of parts of the trials: the effects on each part are learned from the others
PARTS = 5
#: maximum number of basis functions of a label, and length of the kernel where the label's range is 1
FUNCTIONS, LENGTH = 6, 0.3
#: steps of the estimation of the variances; least variance of a label, and of the noise, where that of the values is 1
STEPS, NO_VARIANCE, LEAST_NOISE = 30, 1e-6, 1e-3
#: number of standard errors from which on a difference between labels, or from 0, counts as real
CLEAR = 2.5
#: share below which a label is not said to matter
NAMED = 0.05
#: difference of shares up to which they count as equal, because of rounding
EQUAL = 1e-6

METHOD = (
    "For the loss it is the share of the variance of the ranks of all losses that one additive model of all labels "
    "attributes to the label: half the increase of the squared error when the label's values are exchanged between "
    "trials (permutation importance, Breiman 2001), on trials from which the model has not learned. "
)


class Shares(NamedTuple):
    """How much labels explain of the variance of values."""

    #: by label, from 0 to 1; the sum is at most 1. Labels that are active in too few trials are left out
    shares: dict[str, float]
    #: labels that explain more than nothing beyond chance, and of which none is clearly behind the first
    leaders: tuple[str, ...]


def loss_shares(trials: TrialColumns) -> Shares:
    """Return how much each label explains of the ranks of the losses of the completed trials."""
    places = np.flatnonzero(trials.is_complete & np.isfinite(trials.loss))
    return shares_of([*trials.labels.values()], places, _ranks(trials.loss[places]))


def shares_of(labels: Sequence[Label], places: Indices, values: Array) -> Shares:
    """Return how much labels explain of the values of the trials at some places; nothing for fewer than `LEAST`."""
    if len(places) < LEAST:
        return Shares({}, ())
    some = thin_rows(len(places), MOST_TRIALS)[0]
    places, values = places[some], values[some]
    rated = [each for each in labels if each.is_active[places].sum() >= LEAST_ACTIVE]
    shares = dict.fromkeys((label.name for label in rated), 0.0)
    labels = most_telling([each for each in rated if varies(each.values[places])], places, values)
    if not labels or values.std() <= 0:
        return Shares(shares, ())
    parts = _attributed([_functions(label, places) for label in labels], (values - values.mean()) / values.std())
    found = parts.mean(axis=0).clip(0.0)
    # Effects that cancel one another have more variance than their sum.
    found /= max(1.0, float(found.sum()))
    shares |= dict(zip([label.name for label in labels], found.tolist(), strict=True))
    return Shares(shares, tuple(labels[place].name for place in _leaders(parts, found)))


def _attributed(functions: Sequence[Array], values: Array) -> Array:
    """Return for each trial the part of its squared value that each label explains, shape (trials, labels).

    The mean over trials is half the mean increase of the squared error over all exchanges of the label's values
    between two trials.
    """
    of = np.repeat(np.arange(len(functions)), [each.shape[1] for each in functions])
    rows = np.concatenate(functions, axis=1)
    part_of = np.arange(len(values)) % PARTS
    effects = np.zeros((len(values), len(functions)))
    for part in range(PARTS):
        own = part_of == part
        weights = _fitted(rows[~own], values[~own], of)
        effects[own] = np.stack(
            [rows[own][:, of == label] @ weights[of == label] for label in range(len(functions))], axis=1
        )
    left = values - effects.sum(axis=1)
    effects -= effects.mean(axis=0)
    return np.asarray(effects * (effects + left[:, None]))


def _fitted(rows: Array, values: Array, of: Indices) -> Array:
    """Return the weights of basis functions. `of` is the label of each function.

    The variance of each label's weights and that of the noise are re-estimated by MacKay's fixed point (Bishop, eqs.
    7.87 and 7.88, with a variance for each group of functions).
    """
    products, sums, square = rows.T @ rows, rows.T @ values, float(values @ values)
    sizes = np.bincount(of).astype(float)
    variances, noise = np.full(len(sizes), 1.0 / len(sizes)), 0.5
    for _ in range(STEPS):
        spread = np.linalg.inv(products / noise + np.diag(1.0 / variances[of]))
        weights = spread @ sums / noise
        known = (sizes - np.bincount(of, spread.diagonal()) / variances).clip(1e-6)
        variances = (np.bincount(of, weights**2) / known).clip(NO_VARIANCE, None)
        error = square - 2.0 * float(weights @ sums) + float(weights @ products @ weights)
        noise = max(LEAST_NOISE, error / max(1.0, len(values) - float(known.sum())))
    return np.asarray(weights)


def _functions(label: Label, places: Indices) -> Array:
    """Return the basis functions of a label, 0 where it is inactive and on average, shape (trials, functions)."""
    values = label.values[places]
    is_active = np.isfinite(values)
    own = values[is_active]
    if label.options:
        found = (own[:, None] == np.unique(own)).astype(float)
    else:
        own = scaled(label, own)
        knots = np.unique(np.quantile(own, np.linspace(0.0, 1.0, FUNCTIONS)))
        # Functions of this factor have the kernel as their sum of products (Nyström).
        eigenvalues, vectors = np.linalg.eigh(_kernel(knots, knots))
        is_used = eigenvalues > 1e-6
        found = _kernel(own, knots) @ (vectors[:, is_used] / np.sqrt(eigenvalues[is_used]))
    rows = np.zeros((len(values), found.shape[1]))
    rows[is_active] = found - found.mean(axis=0)
    return rows


def _kernel(left: Array, right: Array) -> Array:
    return np.asarray(np.exp(-0.5 * ((left[:, None] - right) / LENGTH) ** 2))


def _leaders(parts: Array, shares: Array) -> list[int]:
    """Return the labels with a share beyond chance that are not clearly behind the first, by falling share."""
    order = np.argsort(-shares, kind="stable").tolist()
    found = [label for label in order if shares[label] >= NAMED and _is_above_zero(parts[:, label])]
    return [label for label in found if label == found[0] or not _is_above_zero(parts[:, found[0]] - parts[:, label])]


def _is_above_zero(values: Array) -> bool:
    """Return whether the mean of values is above 0 beyond chance."""
    return bool(values.mean() > max(EQUAL, CLEAR * values.std() / math.sqrt(len(values))))


def _ranks(values: Array) -> Array:
    """Return the ranks of values; equal values have the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2.0)[group], float)
