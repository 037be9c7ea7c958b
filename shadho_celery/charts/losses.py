"""Losses over the course of a study: history, best loss so far, and the samplers that chose the trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

import numpy as np

from shadho_celery.charts.chart import (
    MOST,
    Array,
    Axis,
    Cell,
    Chart,
    Indices,
    Mark,
    Scale,
    Series,
    cells,
    empty_chart,
    scale_of,
    thin_points,
    thin_rows,
    thin_steps,
)
from shadho_celery.charts.columns import Depth, TrialColumns, points_by_class
from shadho_celery.charts.registry import StudyChart
from shadho_celery.core.trial import COUNTED, TrialState
from shadho_celery.core.units import counted, digits

#: share of the marks for the points of trials with a loss; the rest is for the failed ones and the line
_POINTS, _FAILED, _LINE = int(0.6 * MOST), int(0.2 * MOST), int(0.2 * MOST)
#: states whose trials have a loss, and how their points are drawn
FORMS = {TrialState.COMPLETE: "filled", TrialState.PRUNED: "hollow"}


class Along(str, Enum):
    """What the horizontal axis of the history measures."""

    TRIALS = "trials"
    SECONDS = "seconds"


@StudyChart(
    section="Search",
    place=1,
    depth=lambda study, along=Along.TRIALS: Depth.LOSSES if along == Along.TRIALS else Depth.FACTS,
    choice="over",
    choices=lambda trials: [each.value for each in Along],
)
def history(trials: TrialColumns, along: str = Along.TRIALS.value) -> Chart:
    """Return the losses of all trials, and the best loss so far, along "trials" or "seconds".

    A failed trial has no loss: its mark has no `y` and is drawn at the axis.
    """
    x, axis = _position(trials, Along(along))
    loss = Axis(name=_loss_name(trials), scale=scale_of(trials.loss[trials.is_complete]))
    has_loss = trials.state.is_in(*FORMS) & np.isfinite(trials.loss)
    failed = np.flatnonzero(trials.state.is_in(TrialState.FAILED) & np.isfinite(x))
    if not has_loss.any():
        said = f"{counted(len(failed), 'trial has', 'trials have')} failed, and none has a loss yet."
        empty = said if len(failed) else "No trial has ended yet."
        return empty_chart("history", "The loss of each trial", empty, axis, loss)
    drawn, note = thin_points(x[has_loss], trials.loss[has_loss], _POINTS)
    shown = np.flatnonzero(has_loss)[drawn]
    series: list[Series] = []
    more: Mapping[str, Callable[[Indices], list[Cell]]] = {"sampler": lambda own: [*trials.sampler.texts(own)]}
    for state, form in FORMS.items():
        within = shown[trials.state.is_in(state)[shown]]
        series += points_by_class(trials, x, within, more, state=f", {state.lower()}", form=form)
    if len(failed):
        drawn = failed[thin_rows(len(failed), _FAILED)[0]]
        columns = {"x": cells(x[drawn]), "number": cells(trials.number[drawn]), "sampler": more["sampler"](drawn)}
        columns["y"] = [None] * len(drawn)
        series.append(Series(name="failed", mark=Mark.POINTS, colour="state FAILED", form="cross", columns=columns))
    when, best = best_so_far(trials, x)
    if len(when):
        changes = thin_steps(when, best, _LINE)
        columns = {"x": cells(when[changes]), "y": cells(best[changes])}
        series.append(Series(name="best so far", mark=Mark.STEPS, colour="best", columns=columns))
    return Chart(name="history", title=_title(trials, best), axes=(axis, loss), series=series, note=note)


def best_so_far(trials: TrialColumns, x: Array) -> tuple[Array, Array]:
    """Return the positions of the rated trials in order, and after each of them the best loss, shapes (m,)."""
    rated = np.flatnonzero(trials.is_rated & np.isfinite(x))
    rated = rated[np.argsort(x[rated], kind="stable")]
    best = np.minimum.accumulate(trials.merit[rated]) if len(rated) else np.empty(0)
    return x[rated], -best if trials.is_maximized else best


def comparisons(studies: Mapping[str, TrialColumns]) -> list[Chart]:
    """Return a `comparison` of the studies that minimise, and one of those that maximise, if there are such."""
    groups = [{name: each for name, each in studies.items() if each.is_maximized is so} for so in (False, True)]
    return [comparison(group) for group in groups if group]


def comparison(studies: Mapping[str, TrialColumns]) -> Chart:
    """Return the best loss so far of several studies over their numbers of trials, by name of the study.

    All of them minimise, or all maximise. Each line goes on to the last trial that has ended, whether or not it has a
    loss.
    """
    series, said, values = [], [], []
    for name, trials in studies.items():
        when, best = best_so_far(trials, trials.number.astype(float))
        if len(when):
            changes = thin_steps(when, best, MOST // len(studies) - 1)
            when, steps = when[changes], best[changes]
            last = float(trials.number[trials.state.is_in(*COUNTED)].max())
            if last > when[-1]:
                when, steps = np.append(when, last), np.append(steps, best[-1])
            columns = {"x": cells(when), "y": cells(steps)}
            series.append(Series(name=name, mark=Mark.STEPS, colour=f"study {name}", columns=columns))
            said.append(f"{digits(float(best[-1]))} in {name}")
            values.append(best)
    names = {_loss_name(trials) for trials in studies.values()}
    loss = names.pop() if len(names) == 1 else "loss"
    direction = "maximize" if any(trials.is_maximized for trials in studies.values()) else "minimize"
    best_axis = Axis(name=f"best {loss} so far ({direction})", scale=scale_of(np.concatenate([*values, np.empty(0)])))
    axes = Axis(name="trial"), best_axis
    if not series:
        return empty_chart("comparison", "The best loss of each study", "No trial has completed yet.", *axes)
    return Chart(name="comparison", title=f"The best {loss} is {', '.join(said)}", axes=axes, series=series)


@StudyChart(section="Search", place=6, depth=Depth.LOSSES, is_shown=lambda trials, chart: len(trials.sampler.names) > 1)
def samplers(trials: TrialColumns) -> Chart:
    """Return which sampler chose each trial, as spans of trial numbers."""
    axes = Axis(name="trial"), Axis(name="sampler", scale=Scale.CATEGORY, categories=trials.sampler.names)
    codes = trials.sampler.codes
    if not (codes >= 0).any():
        return empty_chart("samplers", "The sampler of each trial", "The store has no samplers.", *axes)
    starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
    ends = np.append(starts[1:], len(codes))
    runs, note = thin_rows(len(starts), MOST)
    series = []
    for code, name in enumerate(trials.sampler.names):
        own = runs[codes[starts[runs]] == code]
        columns: dict[str, list[Cell]] = {
            "y": [code] * len(own),
            "start": cells(trials.number[starts[own]]),
            "end": cells(trials.number[ends[own] - 1] + 1),
        }
        series.append(Series(name=name, mark=Mark.SPANS, colour=f"sampler {name}", columns=columns))
    counts = {name: int((codes == code).sum()) for code, name in enumerate(trials.sampler.names)}
    chosen = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1]))
    return Chart(
        name="samplers", title=f"Trials by the sampler that chose them: {chosen}", axes=axes, series=series, note=note
    )


def _position(trials: TrialColumns, along: Along) -> tuple[Array, Axis]:
    if along is Along.TRIALS:
        return trials.number.astype(float), Axis(name="trial")
    return trials.finished_at - trials.began_at, Axis(name="since the first trial began", unit="s")


def _loss_name(trials: TrialColumns) -> str:
    return next(iter(trials.objectives), "loss")


def _title(trials: TrialColumns, best: Array) -> str:
    ended = int(trials.state.is_in(*COUNTED).sum())
    of = f"{ended:,} of {counted(trials.asked, 'trial')}" if trials.asked else counted(ended, "trial")
    said = (
        f"The best {_loss_name(trials)} is {digits(float(best[-1]))}" if len(best) else "No feasible trial has a loss"
    )
    return f"{said} after {of}"
