"""How much each label changes the seconds of trials, by the cost model of placement fitted to the recorded trials.

Groups of equal or similar values of a label, and how much of the variance of other values they explain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shadho_celery.charts.chart import Array, Indices, thin_rows
from shadho_celery.charts.columns import Label, TrialColumns
from shadho_celery.core.units import digits
from shadho_celery.placement.durations import estimated
from shadho_celery.placement.effects import DRAWS, MIN_TRIALS, Basis, Regression

#: maximum number of intervals of a numeric label, and minimum number of trials in each, for its importance
INTERVALS, LEAST_TRIALS = 8, 5
#: maximum number of labels in a model: those that explain most by themselves
MOST_LABELS = 20


def explained(group: Indices, values: Array) -> float | None:
    """Return the share of the variance of values that their groups explain, from 0 to 1.

    It is the squared correlation ratio, corrected for chance: epsilon squared of Kelley, "An Unbiased Correlation
    Ratio Measure", 1935. Returns None for fewer than 2 * LEAST_TRIALS values. It is 0 if the values do not vary.
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
    """Return the labels that explain most of the values at some places by themselves, at most MOST_LABELS."""
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
    """Return numeric values of a label that vary, between the least (0) and the greatest (1); NaN unless finite."""
    # Halves, because the difference of two great numbers may be infinite.
    values = np.where(np.isfinite(values), np.log(values) if label.is_log else values / 2, np.nan)
    least, most = np.nanmin(values), np.nanmax(values)
    return np.asarray((values - least) / (most - least), float)


def groups(label: Label, places: Indices, intervals: int = INTERVALS) -> Indices:
    """Return the group of each place: the option, or the interval with about as many trials as the others."""
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
    """Return the name of each group of `groups`: an option, or the range of its values."""
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


#: maximum number of trials from which effects are learned, and of those at which they are evaluated, by subspace
MOST_TRIALS, MOST_ROWS = 2000, 500
#: variance of log seconds below which they count as equal
EQUAL = 1e-9
#: number of parts of the trials; the effects on each part are learned from the others
PARTS = 4
#: number of trials of a subspace from which on the model learns effects: those of all parts but one must be enough
NEEDED = -(-MIN_TRIALS * PARTS // (PARTS - 1))
#: steps of expectation maximisation after the last trial
STEPS = 5

METHOD = (
    "For the seconds it is the main effect in the cost model of placement, fitted to the recorded trials: the variance "
    "of the predicted log seconds over the values of one label, averaged over those of the others (Sobol 1993), "
    "divided by the variance of the log seconds within each compute class. It is measured on trials from which the "
    "model has not learned."
)


def seconds_shares(trials: TrialColumns, least: int) -> dict[str, float]:
    """Return by label the share of the variance of the log seconds that it explains by itself, from 0 to 1.

    Labels that are active in fewer than `least` completed trials are left out, and so are those of which no effect can
    be learned, because all their subspaces have fewer than `NEEDED` trials.
    """
    is_timed = trials.is_complete & (trials.seconds > 0) & np.isfinite(trials.seconds)
    is_timed &= trials.compute_class.codes >= 0
    timed = np.flatnonzero(is_timed & (trials.subspace.codes >= 0))
    timed = timed[thin_rows(len(timed), MOST_TRIALS)[0]]
    logs = np.log(trials.seconds[timed])
    # Seconds are in proportion to the budget, as far as there is no start-up.
    budget = trials.budget[timed]
    logs -= np.log(np.where(np.isfinite(budget) & (budget > 0), budget, 1.0))
    _, classes = np.unique(trials.compute_class.codes[timed], return_inverse=True)
    names, subspaces = np.unique(trials.subspace.codes[timed], return_inverse=True)
    active = {name: label.is_active[timed] for name, label in trials.labels.items()}
    active = {name: each for name, each in active.items() if each.sum() >= least}
    if not active:
        return {}
    told = zip(subspaces.tolist(), classes.tolist(), logs.tolist(), strict=True)
    centres = estimated(told, (len(names), int(classes.max()) + 1))
    sums: dict[str, float] = {}
    for subspace in range(len(names)):
        own = np.flatnonzero(subspaces == subspace)
        labels = [trials.labels[name] for name in active if varies(trials.labels[name].values[timed[own]])]
        if labels and len(own) >= NEEDED:
            labels = [*most_telling(labels, timed[own], _within(logs[own], classes[own]))]
            values = _features(labels, timed[own]), classes[own], logs[own]
            for name, part in _effects(labels, *values, centres[subspace]).items():
                sums[name] = sums.get(name, 0.0) + part
    between = centres[subspaces, classes]
    shares = {}
    for name, is_active in active.items():
        total = float(np.square(_within(logs[is_active], classes[is_active])).sum())
        divides = _divides(trials.labels[name].values[timed][is_active], subspaces[is_active])
        if not divides and name not in sums:
            continue
        part = sums.get(name, 0.0)
        if divides:
            part += _of_groups(trials.labels[name].values[timed][is_active], between[is_active], classes[is_active])
        shares[name] = min(1.0, part / total) if total > EQUAL * is_active.sum() else 0.0
    return shares


def _effects(
    labels: Sequence[Label], rows: Array, classes: Indices, logs: Array, centres: Array
) -> Mapping[str, float]:
    """Return the sum of squares of the main effect of each label over the trials of one subspace.

    The effect on each trial is that of a model that has learned from other trials. It is multiplied by what is left of
    the log seconds without the effects of the other labels. Therefore the noise of the trial's own seconds has no part
    in the sum on average, however few trials there are.
    """
    is_numeric = [not label.options for label in labels]
    basis = Basis(rows[thin_rows(len(rows), DRAWS)[0]], is_numeric)
    functions, part_of = basis.functions(rows), np.arange(len(logs)) % PARTS
    others = [part_of != part for part in range(PARTS)]
    models = [_fitted(functions[each], classes[each], logs[each], centres) for each in others]
    places = thin_rows(len(rows), MOST_ROWS)[0]
    coefficients = np.concatenate([model.coefficients.T for model in models], axis=1)
    own = np.arange(len(places)), part_of[places] * len(centres) + classes[places]
    effects = basis.main_effects(rows[places], coefficients)[own[0], :, own[1]]
    left = _within(logs[places] - (functions[places] @ coefficients)[own], classes[places])
    sums = (effects * (effects + left[:, None])).sum(axis=0) * (len(rows) / len(places))
    return dict(zip([label.name for label in labels], sums.clip(0.0).tolist(), strict=True))


def _fitted(functions: Array, classes: Indices, logs: Array, centres: Array) -> Regression:
    """Return the model that has learned from trials: basis functions of their params, classes, and log seconds.

    `centres` are the mean log seconds of the classes.
    """
    regression = Regression(functions.shape[1])
    regression.add_groups(len(centres))
    begin = 0
    while begin < len(logs):
        # In growing blocks, as during a search: late blocks are checked against what the early ones have shown.
        block = slice(begin, max(MIN_TRIALS, 2 * begin))
        regression.tell(functions[block], classes[block], logs[block])
        regression.fit(centres)
        begin = block.stop
    for _ in range(STEPS):
        regression.fit(centres)
    return regression


def _features(labels: Sequence[Label], places: Indices) -> Array:
    """Return the values of labels as features: numbers between the least (0) and the greatest (1), options as such."""
    rows = np.empty((len(places), len(labels)))
    for column, label in enumerate(labels):
        values = label.values[places]
        rows[:, column] = values if label.options else scaled(label, values)
    return rows


def _divides(values: Array, subspaces: Indices) -> bool:
    """Return whether a label has one value in each subspace, and several in all: it decides between subspaces."""
    first = np.full(int(subspaces.max()) + 1, np.nan)
    first[subspaces[::-1]] = values[::-1]
    return bool((values == first[subspaces]).all()) and varies(values)


def _within(values: Array, classes: Indices) -> Array:
    """Return values minus the mean of their compute class."""
    counts = np.maximum(np.bincount(classes), 1)
    return np.asarray(values - (np.bincount(classes, values) / counts)[classes])


def _of_groups(values: Array, predicted: Array, classes: Indices) -> float:
    """Return the sum of squares of predictions within classes that is explained by the groups of equal values."""
    departures = _within(predicted, classes)
    _, group = np.unique(values, return_inverse=True)
    sizes = np.bincount(group)
    means = np.bincount(group, departures) / sizes
    return float((sizes * np.square(means)).sum())
