"""Charts of params: parallel coordinates, slices, contour and importance; and the model that measures importance.

The share of the variance that a label explains is measured by an additive model of all labels, on held-out trials.

Adaptive samplers draw late trials near the best trials, in all labels at once. So even a label without any effect has
different values in good and bad trials. If labels were compared one by one, this would look like an effect. Therefore
one model has all labels: value = sum over labels of f(label) + noise. Each f is a Gaussian process with its own
variance, written in a few basis functions. The variances are estimated from the trials (automatic relevance
determination), so a label gets no effect if other labels explain the values. Source: Bishop, "Pattern Recognition and
Machine Learning", 2006, sections 3.5 and 7.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from shadho_celery.charts.chart import (
    MOST,
    MOST_CATEGORIES,
    Array,
    Axis,
    Chart,
    Indices,
    Mark,
    Scale,
    Series,
    thin_points,
    thin_rows,
)
from shadho_celery.charts.columns import Label, TrialColumns, points_by_class
from shadho_celery.charts.registry import StudyChart
from shadho_celery.core.checks import listed, short
from shadho_celery.core.system import one_blas_thread
from shadho_celery.core.trial import COUNTED
from shadho_celery.core.units import counted, digits
from shadho_celery.errors import UsageError
from shadho_celery.results.study import StudyResults
from shadho_celery.samplers.gaussian_process import GaussianProcess

#: maximum number of intervals into which a numeric label is divided, and minimum number of trials in each interval
INTERVALS, LEAST_TRIALS = 8, 5
#: maximum number of labels in a model; if there are more, the labels that explain most by themselves are used
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
    """Return at most MOST_LABELS labels, those that each explain most of the values at these places by themselves."""
    if len(labels) <= MOST_LABELS:
        return labels
    shares = []
    for label in labels:
        own = label.is_active[places]
        shares.append(explained(groups(label, places[own]), values[own]) or 0.0)
    return [labels[place] for place in np.argsort(shares, kind="stable")[::-1][:MOST_LABELS]]


def varies(values: Array) -> bool:
    """Return whether the finite values are not all equal."""
    known = values[np.isfinite(values)]
    return bool(len(known) and (known != known[0]).any())


def scaled(label: Label, values: Array) -> Array:
    """Return the values of a numeric label scaled to [0, 1], so that the least is 0 and the greatest 1.

    Values that are not finite become NaN. The values must not all be equal.
    """
    # Values are halved, because the difference of two very large numbers may be infinite.
    values = np.where(np.isfinite(values), np.log(values) if label.is_log else values / 2, np.nan)
    least, most = np.nanmin(values), np.nanmax(values)
    return np.asarray((values - least) / (most - least), float)


def groups(label: Label, places: Indices, intervals: int = INTERVALS) -> Indices:
    """Return the group of the value at each place: its option, or one of at most `intervals` intervals.

    The intervals have about equally many trials.
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
        ends = [digits(float(end)) for end in (own.min(), own.max())] if len(own) else []
        names.append(" to ".join(dict.fromkeys(ends)))
    return names


#: minimum number of trials for shares; maximum number of trials from which effects are learned
LEAST, MOST_TRIALS = 10, 2000
#: minimum number of trials in which a label is active, for a share of this label
LEAST_ACTIVE = 10
#: number of parts into which trials are divided: the effects on each part are learned from the other parts
#: (cross-validation)
PARTS = 5
#: maximum number of basis functions of a numeric label; length scale of the kernel, for values scaled to [0, 1]
FUNCTIONS, LENGTH = 6, 0.3
#: steps of the estimation of the variances; minimum variance of a label, and of the noise, for values of variance 1
STEPS, NO_VARIANCE, LEAST_NOISE = 30, 1e-6, 1e-3
#: a share counts as above 0, or above another share, if the difference is more than this many standard errors
CLEAR = 2.5
#: half of the width of an interval of 95 % in standard errors
INTERVAL = 1.96
#: a label with a smaller share is never said to matter
NAMED_SHARE = 0.05
#: shares that differ by at most this, and values with at most this standard deviation, count as equal (rounding)
EQUAL = 1e-6


class Shares(NamedTuple):
    """Shares of the variance of values that labels explain."""

    #: share by label, from 0 to 1; the sum is at most 1. Labels that are active in too few trials are missing
    shares: dict[str, float]
    #: labels whose shares are clearly above 0 and not clearly below the greatest share, the greatest first
    leaders: tuple[str, ...]
    #: half of the width of each share's interval of 95 %
    errors: dict[str, float]


_NO_SHARES = Shares({}, (), {})


def loss_shares(trials: TrialColumns) -> Shares:
    """Return the shares of the variance of the losses' ranks that labels explain, over the completed trials."""
    places = np.flatnonzero(trials.is_complete & np.isfinite(trials.loss))
    return shares_of([*trials.labels.values()], places, _ranks(trials.loss[places]))


def seconds_shares(trials: TrialColumns) -> Shares:
    """Return the shares of the variance of the log seconds within compute classes that labels explain.

    Only completed trials are used. Their seconds are divided by their budgets.
    """
    classes = trials.compute_class.codes
    is_timed = trials.is_complete & (trials.seconds > 0) & np.isfinite(trials.seconds) & (classes >= 0)
    places = np.flatnonzero(is_timed)
    budget = np.where(np.isfinite(trials.budget) & (trials.budget > 0), trials.budget, 1.0)
    logs = np.log(trials.seconds[places] / budget[places])
    own = classes[places]
    means = np.bincount(own, logs) / np.maximum(np.bincount(own), 1)
    return shares_of([*trials.labels.values()], places, logs - means[own])


@one_blas_thread()
def shares_of(labels: Sequence[Label], places: Indices, values: Array) -> Shares:
    """Return the shares of the variance of `values` that labels explain. `values` has one value for each of `places`.

    For fewer than `LEAST` trials, the result is empty.
    """
    if len(places) < LEAST:
        return _NO_SHARES
    some = thin_rows(len(places), MOST_TRIALS)[0]
    places, values = places[some], values[some]
    shares = {each.name: 0.0 for each in labels if each.is_active[places].sum() >= LEAST_ACTIVE}
    labels = _modelled(labels, places, values)
    if not labels or values.std() <= EQUAL:
        return Shares(shares, (), dict.fromkeys(shares, 0.0))
    parts = _attributed([_functions(label, places) for label in labels], (values - values.mean()) / values.std())
    found = parts.mean(axis=0).clip(0.0)
    # Shares may sum to more than 1, because effects that cancel one another have greater variances than their sum.
    whole = max(1.0, float(found.sum()))
    names, errors = [label.name for label in labels], INTERVAL / whole * parts.std(axis=0) / math.sqrt(len(parts))
    shares |= dict(zip(names, (found / whole).tolist(), strict=True))
    leaders = tuple(names[place] for place in _leaders(parts, found / whole))
    return Shares(shares, leaders, dict.fromkeys(shares, 0.0) | dict(zip(names, errors.tolist(), strict=True)))


def _modelled(labels: Sequence[Label], places: Indices, values: Array) -> Sequence[Label]:
    """Return the labels that the model has: those that vary and are active in enough trials."""
    rated = [each for each in labels if each.is_active[places].sum() >= LEAST_ACTIVE and varies(each.values[places])]
    return most_telling(rated, places, values)


@one_blas_thread()
def mean_losses(trials: TrialColumns, label: Label) -> tuple[Array, Array]:
    """Return values of a label, sorted, and the model's mean of the loss at each; empty with too few trials.

    The model has the ranks of the losses. The loss with the mean rank is returned, so that few very bad losses do not
    decide it.
    """
    places = np.flatnonzero(trials.is_complete & np.isfinite(trials.loss))
    places = places[thin_rows(len(places), MOST_TRIALS)[0]]
    ranks = _ranks(trials.loss[places])
    labels = _modelled([*trials.labels.values()], places, ranks)
    at = next((place for place, each in enumerate(labels) if each.name == label.name), None)
    if len(places) < LEAST or at is None or ranks.std() <= EQUAL:
        return np.empty(0), np.empty(0)
    functions = [_functions(each, places) for each in labels]
    of = np.repeat(np.arange(len(functions)), [each.shape[1] for each in functions])
    weights = _fitted(np.concatenate(functions, axis=1), (ranks - ranks.mean()) / ranks.std(), of)
    is_active = label.is_active[places]
    x, first = np.unique(label.values[places][is_active], return_index=True)
    effect = (functions[at] @ weights[of == at])[is_active][first]
    share = (ranks[is_active].mean() + ranks.std() * effect) / len(places)
    return x, np.quantile(trials.loss[places], share.clip(0.0, 1.0))


def _attributed(functions: Sequence[Array], values: Array) -> Array:
    """Return for each trial the part of its squared value that each label explains, shape (trials, labels).

    The mean over trials is half of a label's permutation importance, which is the mean increase of the squared error
    over all exchanges of the label's values between two trials.
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
    """Return the weights of the basis functions. `of` is the index of the label of each function.

    The variance of each label's weights and the variance of the noise are re-estimated by MacKay's fixed-point
    iteration (Bishop, eqs. 7.87 and 7.88, with a variance for each group of functions).
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
    """Return the basis functions of a label, shape (trials, functions).

    Their mean is 0, and they are 0 where the label is inactive.
    """
    values = label.values[places]
    is_active = np.isfinite(values)
    own = values[is_active]
    if label.options:
        found = (own[:, None] == np.unique(own)).astype(float)
    else:
        own = scaled(label, own)
        knots = np.unique(np.quantile(own, np.linspace(0.0, 1.0, FUNCTIONS)))
        # The products of these functions sum to the kernel (Nyström approximation).
        eigenvalues, vectors = np.linalg.eigh(_kernel(knots, knots))
        is_used = eigenvalues > 1e-6
        found = _kernel(own, knots) @ (vectors[:, is_used] / np.sqrt(eigenvalues[is_used]))
    rows = np.zeros((len(values), found.shape[1]))
    rows[is_active] = found - found.mean(axis=0)
    return rows


def _kernel(left: Array, right: Array) -> Array:
    return np.asarray(np.exp(-0.5 * ((left[:, None] - right) / LENGTH) ** 2))


def _leaders(parts: Array, shares: Array) -> list[int]:
    """Return the indices of the labels in `Shares.leaders`, the greatest share first."""
    order = np.argsort(-shares, kind="stable").tolist()
    found = [label for label in order if shares[label] >= NAMED_SHARE and _is_above_zero(parts[:, label])]
    return [label for label in found if label == found[0] or not _is_above_zero(parts[:, found[0]] - parts[:, label])]


def _is_above_zero(values: Array) -> bool:
    """Return whether the mean of values is above 0 by more than CLEAR standard errors."""
    return bool(values.mean() > max(EQUAL, CLEAR * values.std() / math.sqrt(len(values))))


def _ranks(values: Array) -> Array:
    """Return the ranks of values. Equal values get the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2.0)[group], float)


#: number of best trials that parallel coordinates always keep
BEST = 50
#: maximum number of labels in parallel coordinates; maximum number of labels for which a page shows slices
MOST_AXES, SLICES = 12, 12
#: maximum numbers of points of a slice, of which a page has many, and of the model's mean
MOST_SLICED, MOST_MEANS = 1500, 100
#: share of the trials to whose losses the axis of a slice is fitted
SLICED = 0.8
#: number of cells of a contour along an axis; maximum number of trials from which its model learns
CELLS, MOST_LEARNED = 24, 150

#: maximum number of labels that a title names
MOST_NAMED = 3

_MEAN = (
    "The line is the mean of the additive model of all labels that also measures importance. The model has the ranks "
    "of the losses; the line is the loss with the mean rank."
)
_CONTOUR = (
    "The mean is that of a Gaussian process of both labels, which has the ranks of the losses; it is the loss with the "
    "mean rank. Other labels count as noise, and far from all trials the mean is that of all of them."
)
_IMPORTANCE = (
    "Importance is the share of the variance that a label explains by itself in the trials so far, most of which an "
    "adaptive sampler draws near the best. It is the part that one additive model of all labels attributes to the "
    "label, of the ranks of the losses and of the log seconds within each compute class: half the increase of the "
    "squared error when the label's values are exchanged between trials (permutation importance, Breiman 2001), on "
    "trials from which the model has not learned. A line is the interval of 95 % over the trials; that of a pale bar "
    "holds 0."
)


class Importance(Struct, frozen=True, kw_only=True):
    """Importance of a label: the shares of the variance that it explains, from 0 to 1; None with too few trials.

    The shares of all labels sum to at most 1, both for the loss and for the seconds.
    """

    label: str
    loss: float | None
    seconds: float | None
    #: number of trials in which the label is active
    trials: int
    #: half of the width of each share's interval of 95 %; the share is not clearly above 0 if it is less than this
    loss_error: float | None = None
    seconds_error: float | None = None


@StudyChart(section="Params", place=4)
def parallel(trials: TrialColumns) -> Chart:
    """Return a line for each COMPLETE trial over its labels and its loss, from the worst trial to the best.

    The most important labels come first. A label that is active only with some options of a choice follows this choice.
    """
    shown = [each.label for each in importances(trials, with_seconds=False)][:MOST_AXES]
    places = np.flatnonzero(trials.is_complete & np.isfinite(trials.loss))
    if not shown or not len(places):
        return Chart(title="The params of each trial", axes=(), empty="No trial has completed yet.")
    shown = _grouped(trials, places, shown)
    axes = [*(_axis(trials.labels[label]) for label in shown), trials.loss_axis()]
    # A line counts as one mark per axis, so at most MOST divided by the number of axes are drawn.
    is_best = np.zeros(len(places), bool)
    is_best[np.argsort(trials.merit[places], kind="stable")[:BEST]] = True
    drawn, note = thin_rows(len(places), MOST // len(axes), is_best)
    places = places[drawn[np.argsort(-trials.merit[places[drawn]], kind="stable")]]
    is_infeasible, series = trials.is_infeasible[places], []
    kinds = (("infeasible", "state infeasible", "dash", is_infeasible), ("complete", "rank", "filled", ~is_infeasible))
    for name, colour, form, within in kinds:
        own = places[within]
        # Columns are named by the index of the axis, because a label may have any name.
        values = [*(trials.labels[label].values for label in shown), trials.loss]
        columns = {**{f"axis {index}": each[own] for index, each in enumerate(values)}, "number": trials.number[own]}
        if len(own):
            series.append(Series.of(name, Mark.POLYLINES, colour, form, **columns))
    if note:
        note = f"{note} The best {BEST} trials are among them. "
    how = "The bluer a line, the better its trial, by the rank of the loss. "
    if not all(trials.labels[label].is_active[places].all() for label in shown):
        how += "Trials without a label pass its axis at the place marked inactive."
    more = len(trials.labels) - len(shown)
    title = f"The params of {counted(len(places), 'complete trial')}" + (
        f"; {counted(more, 'label that matters less is', 'labels that matter less are')} left out" if more else ""
    )
    return Chart(title=title, axes=axes, series=series, note=note.strip(), how=how.strip())


def _grouped(trials: TrialColumns, places: Indices, names: Sequence[str]) -> list[str]:
    """Return the names of labels, such that each label follows the choice that decides whether it is active."""
    values = {name: np.nan_to_num(trials.labels[name].values[places], nan=-math.inf) for name in names}
    keys: dict[str, tuple[float, ...]] = {}
    # A choice is active in more trials than what it decides.
    for name in sorted(names, key=lambda each: -np.isfinite(values[each]).sum()):
        is_active = np.isfinite(values[name])
        keys[name] = (float(names.index(name)),)
        for choice in [*keys][:-1] if is_active.any() and not is_active.all() else ():
            own, other = values[choice][is_active], values[choice][~is_active]
            if trials.labels[choice].options and not np.isin(own, [-math.inf, *other]).any():
                keys[name] = (*keys[choice], float(own.min()), *keys[name])
                break
    return sorted(names, key=keys.__getitem__)


@StudyChart(section="Params", place=2)
def contour(trials: TrialColumns) -> Chart:
    """Return the trials over the two numeric params that matter most, and the mean loss in the cells of a grid.

    The model of the slices has no interactions, so the mean is that of a Gaussian process of the two params.
    """
    clear = [each for each in importances(trials, with_seconds=False) if (each.loss or 0.0) > (each.loss_error or 0.0)]
    numeric = [label for each in clear if not (label := trials.labels[each.label]).options]
    for pair in combinations(numeric, 2):
        is_known = trials.is_complete & np.isfinite([trials.loss, *(label.values for label in pair)]).all(axis=0)
        drawn, note = thin_rows(int(is_known.sum()), MOST_LEARNED)
        places = np.flatnonzero(is_known)[drawn]
        losses, *values = (each[places] for each in (trials.loss, *(label.values for label in pair)))
        if len(places) >= LEAST and all(map(varies, [losses, *values])):
            break
    else:
        return Chart(title="The params that matter most", axes=(), empty="No two numeric params clearly matter so far.")
    spaces = [np.geomspace if label.is_log else np.linspace for label in pair]
    edges = [space(own.min(), own.max(), 2 * CELLS + 1) for space, own in zip(spaces, values, strict=True)]
    grid = np.array([*product(*(each[1::2] for each in edges))])
    rows = np.column_stack([*map(scaled, pair, np.append(np.column_stack(values), grid, axis=0).T)])
    mean = _joint_mean(rows, losses)
    # The best cells come last.
    order = np.argsort(mean if trials.is_maximized else -mean, kind="stable")
    x, y = grid[order].T
    series = [Series.of("mean of the model", Mark.CELLS, "rank", x=x, y=y, loss=mean[order])]
    is_infeasible = trials.is_infeasible[places]
    for name, form, own in (("trial", "filled", ~is_infeasible), ("infeasible trial", "dash", is_infeasible)):
        points = {"x": values[0][own], "y": values[1][own], "loss": losses[own], "number": trials.number[places[own]]}
        series += [Series.of(name, Mark.POINTS, "best", form, **points)] * bool(own.any())
    best = f"{pair[0].name} {digits(float(x[-1]))} and {pair[1].name} {digits(float(y[-1]))}"
    title, note = f"The mean {trials.loss_name} is best near {best}", f"Bluer is better. {note}".strip()
    return Chart(title=title, axes=[*map(_axis, pair)], series=series, note=note, how=_CONTOUR)


@one_blas_thread()
def _joint_mean(rows: Array, losses: Array) -> Array:
    """Return the mean loss at the last rows. The `losses` are those at the first rows. Rows are scaled to [0, 1]."""
    ranks, known = _ranks(losses), rows[: len(losses)]
    model, values = GaussianProcess([True, True]), (ranks - ranks.mean()) / ranks.std()
    model.fit(known, values)
    model.learn(known, values)
    share = (ranks.mean() + ranks.std() * model.predict(rows[len(losses) :])[0]) / len(ranks)
    return np.asarray(np.quantile(losses, share.clip(0.0, 1.0)))


def _most_important(trials: TrialColumns) -> list[str]:
    return [each.label for each in importances(trials, with_seconds=False)[:SLICES]]


@StudyChart(name="slice", section="Params", place=3, choice="param", choices=_most_important)
def slice_of(trials: TrialColumns, study: StudyResults, label: str) -> Chart:
    """Return the loss over one label, for the trials in which it is active."""
    found = trials.labels.get(label)
    if found is None and label not in study.space:
        raise UsageError(f"the study has no param {short(label)}")
    title = f"The {trials.loss_name} over {label if found is None else _where(trials, found)}"
    if found is None or not (trials.is_complete & found.is_active).any():
        return Chart(title=title, axes=(), empty="No trial with this label has completed yet.")
    places = np.flatnonzero(trials.is_complete & found.is_active)
    drawn, note = thin_points(found.values[places], trials.loss[places], MOST_SLICED)
    x, mean = mean_losses(trials, found)
    values, axis = found.values, _axis(found)
    if found.options:
        # Only options that have been drawn have a place on the axis.
        used = np.unique(values[places])
        values, x = (np.searchsorted(used, each).astype(float) for each in (values, x))
        axis = replace(axis, categories=[found.options[int(option)] for option in used])
    series = [*points_by_class(trials, values, places[drawn])]
    if len(x):
        some = thin_rows(len(x), MOST_MEANS)[0]
        mark, form = (Mark.POINTS, "mean") if found.options else (Mark.LINE, "filled")
        series.append(Series.of("mean of the model", mark, "best", form, x=x[some], y=mean[some]))
    ended = int((trials.state.is_in(*COUNTED) & found.is_active).sum())
    how = f"{len(places):,} of {counted(ended, 'ended trial')} are complete. {_MEAN if len(x) else ''}".strip()
    return Chart(title=title, axes=(axis, trials.loss_axis(SLICED)), series=series, has_states=True, note=note, how=how)


@StudyChart(section="Params", place=1)
def importance(trials: TrialColumns) -> Chart:
    """Return two bars for each label: its importance for the loss, and its importance for the seconds."""
    losses, seconds = loss_shares(trials), seconds_shares(trials)
    rated = _rated(trials, losses, seconds)
    found = [each for each in rated if each.loss is not None or each.seconds is not None]
    axes = (
        Axis(name="share of the variance", most=1.0),
        Axis(name="label", scale=Scale.CATEGORY, categories=[each.label for each in found[:MOST_CATEGORIES]]),
    )
    if not found:
        return Chart(title="Which params matter", axes=axes, empty=f"This takes {LEAST} completed trials.")
    found = found[:MOST_CATEGORIES]
    series = []
    for name in ("loss", "seconds"):
        x, error = ([getattr(each, f"{name}{end}") for each in found] for end in ("", "_error"))
        if any(value is not None for value in x):
            label = trials.loss_name if name == "loss" else name
            series.append(Series.of(label, Mark.BARS, name, x=x, y=range(len(found)), error=error))
    is_missing = any(None in (each.loss, each.seconds) for each in rated)
    note = f"Missing bars need {LEAST_ACTIVE} completed trials with the label." if is_missing else ""
    title = _important((trials.loss_name, "seconds"), (losses, seconds))
    return Chart(title=title, axes=axes, series=series, note=note, how=_IMPORTANCE)


def importances(trials: TrialColumns, *, with_seconds: bool = True) -> list[Importance]:
    """Return the importance of each label; the labels that matter most for the loss come first."""
    return _rated(trials, loss_shares(trials), seconds_shares(trials) if with_seconds else _NO_SHARES)


def _rated(trials: TrialColumns, losses: Shares, seconds: Shares) -> list[Importance]:
    found = [
        Importance(
            label=label.name,
            loss=losses.shares.get(label.name),
            seconds=seconds.shares.get(label.name),
            trials=int(label.is_active.sum()),
            loss_error=losses.errors.get(label.name),
            seconds_error=seconds.errors.get(label.name),
        )
        for label in trials.labels.values()
    ]
    return sorted(found, key=lambda each: (-(each.loss or 0.0), -(each.seconds or 0.0), each.label))


def _axis(label: Label) -> Axis:
    if label.options:
        return Axis(name=label.name, scale=Scale.CATEGORY, categories=label.options)
    return Axis(name=label.name, scale=Scale.LOG if label.is_log else Scale.LINEAR)


def _where(trials: TrialColumns, label: Label) -> str:
    """Return the label's name, and the subspaces in which it is active unless it is active in all."""
    within = [name for name, _ in trials.subspace.places(label.is_active)]
    subspaces = len(trials.subspace.names)
    if len(within) == subspaces:
        return label.name
    return f"{label.name}, in {within[0] if len(within) == 1 else f'{len(within)} of {subspaces} subspaces'}"


def _important(names: Sequence[str], shares: Sequence[Shares]) -> str:
    """Return a title with the labels that matter most for the loss and for the seconds, which have these names."""
    found = []
    for name, each in zip(names, shares, strict=True):
        labels = " and ".join(each.leaders) if len(each.leaders) <= 2 else listed(each.leaders, MOST_NAMED)
        if each.leaders:
            found.append(f"{labels} {'matters' if len(each.leaders) == 1 else 'matter'} most for the {name}")
    none = [] if shares[0].leaders else [f"No param clearly explains the {names[0]} by itself so far"]
    return "; ".join([*none, *found])
