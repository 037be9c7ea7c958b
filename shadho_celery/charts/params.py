"""Params: parallel coordinates, slices, and how much each label matters for the loss and for the seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from shadho_celery.charts import additive, param_seconds
from shadho_celery.charts.additive import Shares, loss_shares
from shadho_celery.charts.chart import (
    MOST,
    MOST_CATEGORIES,
    Axis,
    Cell,
    Chart,
    Mark,
    Scale,
    Series,
    cells,
    empty_chart,
    scale_of,
    thin_points,
    thin_rows,
)
from shadho_celery.charts.columns import INFEASIBLE, Label, TrialColumns, points_by_class
from shadho_celery.charts.param_seconds import NEEDED, seconds_shares
from shadho_celery.charts.registry import StudyChart
from shadho_celery.core.checks import listed, short
from shadho_celery.core.trial import COUNTED
from shadho_celery.core.units import counted
from shadho_celery.errors import UsageError
from shadho_celery.results.study import StudyResults

#: number of best trials that parallel coordinates always keep
BEST = 50
#: maximum number of labels of parallel coordinates, and of those whose slices a page shows
MOST_AXES, SLICES = 12, 12

#: share of the variance of the seconds below which a label is not said to matter, and from which on it matters most
#: while other labels have no share yet; and factor of two shares from which on one is greater
NAMED, MOST_OF_ALL, GREATER = 0.1, 0.5, 1.25
#: maximum number of labels that a title names
MOST_NAMED = 3

_IMPORTANCE = (
    "Importance is the share of the variance that a label explains by itself in the trials so far, most of which an "
    f"adaptive sampler draws near the best. {additive.METHOD}{param_seconds.METHOD}"
)


class Importance(Struct, frozen=True, kw_only=True):
    """How much one label matters: shares of explained variance from 0 to 1; None if there are too few trials."""

    label: str
    #: share among all completed trials; those of all labels sum to at most 1
    loss: float | None
    #: share among the completed trials in which the label is active
    seconds: float | None
    #: number of trials in which it is active
    trials: int


@StudyChart(section="Params", place=3)
def parallel(trials: TrialColumns) -> Chart:
    """Return a line for each COMPLETE trial over its labels and its loss; the most important labels come first."""
    shown = [each.label for each in importances(trials, with_seconds=False)][:MOST_AXES]
    places = np.flatnonzero(trials.is_complete & np.isfinite(trials.loss))
    if not shown or not len(places):
        return empty_chart("parallel", "The params of each trial", "No trial has completed yet.")
    loss = Axis(name=next(iter(trials.objectives), "loss"), scale=scale_of(trials.loss[places]))
    axes = [*(_axis(trials.labels[label]) for label in shown), loss]
    # Each line counts as one mark per axis.
    is_best = np.zeros(len(places), bool)
    is_best[np.argsort(trials.merit[places], kind="stable")[:BEST]] = True
    drawn, note = thin_rows(len(places), MOST // len(axes), is_best)
    places = places[drawn]
    series = []
    for name, is_infeasible, own in trials.by_class(places):
        # Named by the place of the axis, because a label may have any name.
        values = [*(trials.labels[label].values for label in shown), trials.loss]
        columns: dict[str, list[Cell]] = {f"axis {index}": cells(each[own]) for index, each in enumerate(values)}
        columns["number"] = cells(trials.number[own])
        look = {"name": f"{name}{INFEASIBLE}", "form": "dash"} if is_infeasible else {"name": name}
        series.append(Series(mark=Mark.POLYLINES, colour=f"class {name}", columns=columns, **look))
    if note:
        note = f"{note} The best {BEST} trials are among them. "
    if not all(trials.labels[label].is_active[places].all() for label in shown):
        note += "Trials without a label pass its axis at the place marked inactive."
    more = len(trials.labels) - len(shown)
    title = f"The params of {counted(len(places), 'complete trial')}" + (
        f"; {counted(more, 'label that matters less is', 'labels that matter less are')} left out" if more else ""
    )
    return Chart(name="parallel", title=title, axes=axes, series=series, note=note.strip())


def _most_important(trials: TrialColumns) -> list[str]:
    return [each.label for each in importances(trials, with_seconds=False)[:SLICES]]


@StudyChart(name="slice", section="Params", place=2, choice="param", choices=_most_important)
def slice_of(trials: TrialColumns, study: StudyResults, label: str) -> Chart:
    """Return the loss over one label, for the trials in which it is active."""
    found = trials.labels.get(label)
    if found is None and label not in study.space:
        raise UsageError(f"the study has no param {short(label)}")
    name, title = f"slice {label}", f"The loss over {label}"
    if found is None or not (trials.is_complete & found.is_active).any():
        return empty_chart(name, title, "No trial with this label has completed yet.")
    axes = (
        _axis(found),
        Axis(name=next(iter(trials.objectives), "loss"), scale=scale_of(trials.loss[trials.is_complete])),
    )
    places = np.flatnonzero(trials.is_complete & found.is_active)
    drawn, note = thin_points(found.values[places], trials.loss[places])
    series = [*points_by_class(trials, found.values, places[drawn])]
    return Chart(name=name, title=f"{title}{_where(trials, found)}", axes=axes, series=series, note=note)


@StudyChart(section="Params", place=1)
def importance(trials: TrialColumns) -> Chart:
    """Return two bars for each label: how much it matters for the loss, and how much for the seconds."""
    by_loss = loss_shares(trials)
    rated = _rated(trials, by_loss, seconds_shares(trials, additive.LEAST_ACTIVE))
    found = [each for each in rated if each.loss is not None or each.seconds is not None]
    axes = (
        Axis(name="share of the variance", most=1.0),
        Axis(name="label", scale=Scale.CATEGORY, categories=[each.label for each in found[:MOST_CATEGORIES]]),
    )
    if not found:
        empty = f"This takes {additive.LEAST} completed trials."
        return empty_chart("importance", "Which params matter", empty, *axes)
    found = found[:MOST_CATEGORIES]
    rows: list[Cell] = [*range(len(found))]
    bars = {"loss": [each.loss for each in found], "seconds": [each.seconds for each in found]}
    series = [
        Series(name=name, mark=Mark.BARS, colour=name, columns={"x": [*values], "y": rows})
        for name, values in bars.items()
        if any(value is not None for value in values)
    ]
    note = " ".join([*_lacking(bars), _IMPORTANCE])
    return Chart(name="importance", title=_important(by_loss, rated), axes=axes, series=series, note=note)


def _lacking(bars: Mapping[str, Sequence[float | None]]) -> Iterator[str]:
    """Yield sentences on the bars that are not there yet."""
    least = f"{additive.LEAST} completed trials, and {additive.LEAST_ACTIVE}"
    needs = {"loss": least, "seconds": f"{NEEDED} completed trials of one subspace"}
    for name, values in bars.items():
        if lacking := sum(value is None for value in values):
            which = "Bars" if lacking == len(values) else "Missing bars"
            yield f"{which} for the {name} need {needs[name]} in which the label is active."


def importances(trials: TrialColumns, *, with_seconds: bool = True) -> list[Importance]:
    """Return how much each label matters, those that matter most for the loss first."""
    seconds = seconds_shares(trials, additive.LEAST_ACTIVE) if with_seconds else {}
    return _rated(trials, loss_shares(trials), seconds)


def _rated(trials: TrialColumns, losses: Shares, seconds: Mapping[str, float]) -> list[Importance]:
    found = [
        Importance(
            label=label.name,
            loss=losses.shares.get(label.name),
            seconds=seconds.get(label.name),
            trials=int(label.is_active.sum()),
        )
        for label in trials.labels.values()
    ]
    return sorted(found, key=lambda each: (-(each.loss or 0.0), -(each.seconds or 0.0), each.label))


def _axis(label: Label) -> Axis:
    if label.options:
        return Axis(name=label.name, scale=Scale.CATEGORY, categories=label.options[:MOST_CATEGORIES])
    return Axis(name=label.name, scale=Scale.LOG if label.is_log else Scale.LINEAR)


def _where(trials: TrialColumns, label: Label) -> str:
    """Return in which subspaces a label is active, and how many of its ended trials are complete if not all are."""
    within = [name for name, _ in trials.subspace.places(label.is_active)]
    subspaces = len(trials.subspace.names)
    where = ""
    if len(within) < subspaces:
        where = f", in {within[0]}" if len(within) == 1 else f", in {len(within)} of {subspaces} subspaces"
    complete = int((trials.is_complete & label.is_active).sum())
    ended = int((trials.state.is_in(*COUNTED) & label.is_active).sum())
    if complete < ended:
        return f"{where}, in {complete:,} of {counted(ended, 'trial')}: the others were pruned or failed"
    return where or ", in all trials"


def _important(losses: Shares, rated: Sequence[Importance]) -> str:
    """Return which labels matter, as far as the trials tell the labels apart."""
    leaders, for_seconds = losses.leaders, _for_seconds(rated)
    if not losses.shares:
        for_loss = "Too few trials to say what matters for the loss"
    elif not leaders:
        for_loss = "No param clearly explains the loss by itself so far"
    elif len(leaders) == 1:
        for_loss = f"{leaders[0]} matters most for the loss"
    else:
        for_loss = f"{_named(leaders)} matter most for the loss (which of them more is uncertain)"
    if len(leaders) == 1 and leaders == for_seconds:
        return f"{leaders[0]} matters most, for the loss and for the seconds"
    known = [each for each in rated if each.seconds is not None]
    if not known:
        return for_loss
    if for_seconds and len(leaders) == 1:
        return f"{for_loss}, {_named(for_seconds)} for the seconds"
    if for_seconds:
        return (
            f"{for_loss}; {_named(for_seconds)} {'matters' if len(for_seconds) == 1 else 'matter'} most for the seconds"
        )
    # The note says which bars are missing.
    if len(known) < len(rated):
        return for_loss
    return f"{for_loss}; none matters much for the seconds"


def _for_seconds(rated: Sequence[Importance]) -> tuple[str, ...]:
    """Return the labels that matter most for the seconds, if they matter much and no other one may matter more."""
    shares = {each.label: each.seconds for each in rated if each.seconds is not None}
    most = max(shares.values(), default=0.0)
    if most < (MOST_OF_ALL if len(shares) < len(rated) else NAMED):
        return ()
    # Labels of two subspaces may both explain nearly all in their own.
    return tuple(sorted((name for name, share in shares.items() if GREATER * share > most), key=lambda n: -shares[n]))


def _named(labels: Sequence[str]) -> str:
    return " and ".join(labels) if len(labels) <= 2 else listed(labels, MOST_NAMED)
