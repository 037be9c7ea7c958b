"""Budgets and reports: losses by rung, and the curves of reported losses with the trials that were stopped."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from shadho_celery.charts.chart import (
    MOST,
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
)
from shadho_celery.charts.columns import INFEASIBLE, Depth, TrialColumns, points_by_class
from shadho_celery.charts.registry import StudyChart
from shadho_celery.core.trial import Report, TrialState
from shadho_celery.core.units import counted
from shadho_celery.results.study import StudyResults
from shadho_celery.study.rungs import agreements

#: maximum number of trials whose reports are drawn; the best ones and the latest ones
MOST_CURVES = 100


@StudyChart(section="Search", place=4, depth=Depth.FACTS, is_shown=lambda trials, chart: not chart.empty)
def rungs(trials: TrialColumns) -> Chart:
    """Return the losses of COMPLETE trials over their budgets. The title says whether ranks agree between rungs."""
    axes = Axis(name="budget", scale=Scale.LOG), Axis(name="loss", scale=scale_of(trials.loss[trials.is_complete]))
    found = _agreements(trials)
    if not found:
        return empty_chart("rungs", "The losses by budget", "This study has no budgets.", *axes)
    places = np.flatnonzero(trials.is_complete & (trials.rung >= 0))
    drawn, note = thin_points(trials.budget[places], trials.loss[places])
    origin = np.where(trials.origin >= 0, trials.origin, np.nan)
    series = [*points_by_class(trials, trials.budget, places[drawn], {"origin": lambda own: cells(origin[own])})]
    known = [f"{agreed:.2f} above {budget:g}" for _, budget, agreed in found if agreed is not None]
    said = f"the order of trials agrees by {', '.join(known)}" if known else "too few trials to compare their order"
    return Chart(
        name="rungs",
        title=f"Losses on {len(found)} budgets; {said}",
        axes=axes,
        series=series,
        note=f"{note} Agreement is Kendall's rank correlation of the latest promoted trials.".strip(),
    )


def _agreements(trials: TrialColumns) -> list[tuple[int, float, float | None]]:
    """Return each rung with its budget, and whether ranks agree with the next rung, as a study's report does."""
    ended = trials.state.is_in(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED) & (trials.rung >= 0)
    origins = np.where(trials.origin < 0, trials.number, trials.origin)
    is_ranked = trials.is_complete & ~trials.is_infeasible & ~np.isnan(trials.loss)
    losses = np.where(is_ranked, trials.merit, np.inf)
    return agreements(trials.rung[ended], trials.budget[ended], origins[ended], losses[ended])


def candidates(trials: TrialColumns) -> list[int]:
    """Return the numbers of the trials whose reports are drawn, if they have any: the best ones and the latest ones."""
    places = np.flatnonzero(_may_have_reports(trials))
    rated = places[trials.is_rated[places]]
    best = rated[np.argsort(trials.merit[rated], kind="stable")][: MOST_CURVES // 2]
    latest = places[-MOST_CURVES // 2 :]
    return sorted({*trials.number[best].tolist(), *trials.number[latest].tolist()})


def _may_have_reports(trials: TrialColumns) -> NDArray[np.bool_]:
    return np.isfinite(trials.started_at) | trials.is_rated


@StudyChart(section="Search", place=5, depth=Depth.FACTS, is_shown=lambda trials, chart: not chart.empty)
def curves(trials: TrialColumns, study: StudyResults) -> Chart:
    """Return the reported losses of the `candidates` by step. Trials that were pruned are told apart."""
    by_trial: defaultdict[int, list[Report]] = defaultdict(list)
    for report in study.reports(candidates(trials)):
        by_trial[report.number].append(report)
    sign = -1.0 if trials.is_maximized else 1.0
    values = sign * np.array([report.loss for each in by_trial.values() for report in each], float)
    axes = Axis(name="step"), Axis(name="reported loss", scale=scale_of(values))
    if not by_trial:
        return empty_chart(
            "curves", "The reports of trials", "No trial has reported a loss: see context.report.", *axes
        )
    place = {number: index for index, number in enumerate(trials.number.tolist())}
    chosen = sorted(number for number in by_trial if number in place)
    is_pruned = trials.state.is_in(TrialState.PRUNED)
    series = []
    for number in chosen:
        found = by_trial[number]
        last = max(report.attempt for report in found)
        own = sorted((report for report in found if report.attempt == last), key=lambda report: report.step)
        steps, losses = np.array([r.step for r in own], float), np.array([r.loss for r in own], float)
        drawn, _ = thin_points(steps, losses, max(4, MOST // (2 * len(chosen))))
        columns: dict[str, list[Cell]] = {
            "x": cells(steps[drawn]),
            "y": cells(sign * losses[drawn]),
            "number": [number] * len(drawn),
        }
        is_infeasible = bool(trials.is_infeasible[place[number]])
        stopped = bool(is_pruned[place[number]]) or is_infeasible
        name = f"trial {number}{INFEASIBLE if is_infeasible else ', pruned' if stopped else ''}"
        colour = f"class {trials.compute_class[place[number]]}"
        # A line through one point cannot be seen.
        mark = Mark.LINE if len(drawn) > 1 else Mark.POINTS
        form = ("light" if stopped else "filled") if mark is Mark.LINE else "hollow" if stopped else "filled"
        series.append(Series(name=name, mark=mark, colour=colour, form=form, columns=columns))
    left = int(_may_have_reports(trials).sum()) - len(candidates(trials))
    pruned = counted(int(is_pruned.sum()), "trial was", "trials were")
    title = f"Reported losses of {counted(len(chosen), 'trial')}; {pruned} pruned"
    note = (
        f"{counted(left, 'other trial is', 'other trials are')} left out; the best and the latest are drawn."
        if left
        else ""
    )
    return Chart(name="curves", title=title, axes=axes, series=series, note=note)
