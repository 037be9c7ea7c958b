"""Several losses: the Pareto front, and its hypervolume over the course of the study."""

from __future__ import annotations

import numpy as np

from shadho_celery.charts.chart import (
    MOST,
    Array,
    Axis,
    Chart,
    Indices,
    Mark,
    Series,
    cells,
    empty_chart,
    scale_of,
    thin_points,
    thin_rows,
)
from shadho_celery.charts.columns import TrialColumns
from shadho_celery.charts.registry import StudyChart
from shadho_celery.core.trial import COUNTED
from shadho_celery.core.units import counted, digits
from shadho_celery.study.front import Coverage, coverage_of, first_front

_NO_FRONT = "A study with several objectives has a front once a feasible trial has completed."
_ONE_LOSS = "This study has one loss. A study with several objectives has a front."


def on_front(trials: TrialColumns) -> list[int]:
    """Return the numbers of the feasible COMPLETE trials that no other trial dominates, sorted by the first loss.

    Of trials with equal losses, only the first is among them. In a study of one loss there are none.
    """
    if len(trials.losses) < 2:
        return []
    places, losses = _feasible(trials)
    is_first = first_front(losses)
    places, losses = places[is_first], losses[is_first]
    order = np.lexsort(losses.T[::-1])
    return [*trials.number[places[order]].tolist()]


def _feasible(trials: TrialColumns) -> tuple[Indices, Array]:
    """Return the places of the feasible COMPLETE trials, and their minimised losses, shape (trials, losses)."""
    signs = [-1.0 if trials.objectives[name] == "maximize" else 1.0 for name in trials.losses]
    losses = np.column_stack([sign * values for sign, values in zip(signs, trials.losses.values(), strict=True)])
    places = np.flatnonzero(trials.is_complete & ~trials.is_infeasible & np.isfinite(losses).all(axis=1))
    return places, losses[places]


def _coverage(trials: TrialColumns) -> Coverage | None:
    """Return the hypervolume over time, as a study's report has it; None for one loss or without a feasible trial."""
    if len(trials.losses) < 2:
        return None
    places, losses = _feasible(trials)
    ended = np.cumsum(trials.state.is_in(*(state.value for state in COUNTED)))
    return coverage_of(np.asarray(ended[places], np.intp), losses, trials.objectives)


@StudyChart(section="Search", place=2, is_shown=lambda trials, chart: len(trials.losses) > 1)
def front(trials: TrialColumns) -> Chart:
    """Return the first two losses of all COMPLETE trials; those on the front are told apart."""
    names = [*trials.losses][:2]
    if len(names) < 2:
        return empty_chart("front", "The front of the losses", _ONE_LOSS)
    x, y = (trials.losses[name] for name in names)
    axes = tuple(
        Axis(name=f"{name} ({trials.objectives[name]})", scale=scale_of(values[trials.is_complete]))
        for name, values in zip(names, (x, y), strict=True)
    )
    is_front = np.isin(trials.number, on_front(trials)) & trials.is_complete
    series, notes = [], []
    for label, colour, form, within in (
        ("other trials", "other", "filled", trials.is_complete & ~is_front & ~trials.is_infeasible),
        ("infeasible", "other", "dash", trials.is_complete & trials.is_infeasible),
        ("front", "best", "filled", is_front),
    ):
        places = np.flatnonzero(within)
        drawn, note = thin_points(x[places], y[places], MOST // 3)
        places = places[drawn]
        notes.append(note)
        columns = {"x": cells(x[places]), "y": cells(y[places]), "number": cells(trials.number[places])}
        if len(places) or label != "infeasible":
            series.append(Series(name=label, mark=Mark.POINTS, colour=colour, form=form, columns=columns))
    if not any(map(len, series)):
        return empty_chart("front", "The front of the losses", "No trial has completed yet.", *axes)
    title = (
        f"{int(is_front.sum()):,} of {counted(int(trials.is_complete.sum()), 'trial is', 'trials are')} on the front"
    )
    return Chart(name="front", title=title, axes=axes, series=series, note=" ".join(filter(None, notes)))


@StudyChart(section="Search", place=3, is_shown=lambda trials, chart: len(trials.losses) > 1)
def hypervolume(trials: TrialColumns) -> Chart:
    """Return the hypervolume of the front after each number of ended trials."""
    axes = Axis(name="ended trials"), Axis(name="hypervolume")
    coverage = _coverage(trials)
    if coverage is None:
        return empty_chart("hypervolume", "The hypervolume of the front", _NO_FRONT, *axes)
    ended, volumes = (np.array(column, float) for column in zip(*coverage.history, strict=True))
    drawn, note = thin_rows(len(ended), MOST)
    columns = {"x": cells(ended[drawn]), "y": cells(volumes[drawn])}
    point = ", ".join(f"{name} {digits(value)}" for name, value in coverage.reference.items())
    return Chart(
        name="hypervolume",
        title=f"The front covers a hypervolume of {digits(coverage.hypervolume)}",
        axes=axes,
        series=[Series(name="hypervolume", mark=Mark.STEPS, colour="best", columns=columns)],
        note=f"{note} The reference point is {point}.".strip(),
    )
