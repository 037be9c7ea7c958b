"""Groups of equal or similar values of a label, and the share of the variance of other values that they explain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shadho_celery.charts.chart import Array, Indices
from shadho_celery.charts.columns import Label
from shadho_celery.core.units import digits

#: maximum number of intervals of a numeric label, and minimum number of trials in each, for its importance
INTERVALS, LEAST_TRIALS = 8, 5
#: maximum number of labels in a model; those that explain most by themselves are used
MOST_LABELS = 20


def explained(group: Indices, values: Array) -> float | None:
    """Return the share of the variance of values that their groups explain, from 0 to 1.

    It is the squared correlation ratio, corrected for chance: epsilon squared of Kelley, "An Unbiased Correlation Ratio
    Measure", 1935. Returns None for fewer than 2 * LEAST_TRIALS values, and 0 if the values do not vary.
    """
    count = len(values)
    if count < 2 * LEAST_TRIALS:
        return None
    total = float(np.square(values - values.mean()).sum())
    sizes = np.bincount(group)
    used = int((sizes > 0).sum())
    if total <= 0 or used < 2 or used >= count:
        return 0.0
    means = np.bincount(group, values) / np.maximum(sizes, 1)
    within = float(np.square(values - means[group]).sum())
    return max(0.0, 1.0 - (within / (count - used)) / (total / (count - 1)))


def most_telling(labels: Sequence[Label], places: Indices, values: Array) -> Sequence[Label]:
    """Return the labels that explain most of the values at these places, each by itself; at most MOST_LABELS."""
    if len(labels) <= MOST_LABELS:
        return labels
    shares = []
    for label in labels:
        own = label.is_active[places]
        shares.append(explained(groups(label, places[own]), values[own]) or 0.0)
    return [labels[place] for place in np.argsort(shares, kind="stable")[::-1][:MOST_LABELS]]


def varies(values: Array) -> bool:
    """Return whether there are different values among the finite ones."""
    known = values[np.isfinite(values)]
    return bool(len(known) and (known != known[0]).any())


def scaled(label: Label, values: Array) -> Array:
    """Return the values of a numeric label scaled to [0, 1], from the least to the greatest; NaN for values that are
    not finite.

    The values must not all be equal.
    """
    # Values are halved, because the difference of two very large numbers may be infinite.
    values = np.where(np.isfinite(values), np.log(values) if label.is_log else values / 2, np.nan)
    least, most = np.nanmin(values), np.nanmax(values)
    return np.asarray((values - least) / (most - least), float)


def groups(label: Label, places: Indices, intervals: int = INTERVALS) -> Indices:
    """Return the group of the value at each place: its option, or one of at most `intervals` intervals with about
    equally many trials.
    """
    values = label.values[places]
    if label.options or not len(values):
        return values.astype(np.intp)
    distinct, group = np.unique(values, return_inverse=True)
    count = max(2, min(intervals, len(values) // LEAST_TRIALS))
    if len(distinct) <= count:
        return np.asarray(group, np.intp)
    edges = np.quantile(values, np.arange(1, count) / count)
    return np.searchsorted(edges, values, side="right")


def interval_names(label: Label, places: Indices, group: Indices) -> list[str]:
    """Return the name of each group that `groups` returned: an option, or the range of its values."""
    if label.options:
        return [*label.options]
    values = label.values[places]
    names = []
    for index in range(int(group.max(initial=-1)) + 1):
        own = values[group == index]
        if not len(own):
            names.append("")
            continue
        least, most = digits(float(own.min())), digits(float(own.max()))
        names.append(least if least == most else f"{least} to {most}")
    return names
