"""Failures: how many of each kind, and where in the space they occur."""

from __future__ import annotations

import numpy as np

from shadho_celery.charts.chart import MOST_CATEGORIES, Axis, Cell, Chart, Mark, Scale, Series, cells, empty_chart
from shadho_celery.charts.columns import TrialColumns
from shadho_celery.charts.explained import explained, groups, interval_names
from shadho_celery.core.trial import TrialState
from shadho_celery.core.units import counted

_NONE = "No trial has failed."


def failures(trials: TrialColumns) -> Chart:
    """Return the number of failed trials by kind of failure, the most frequent first, as `study.failures` counts them.

    A kind is shown as the failure of its first trial.
    """
    counts = sorted((-len(places), int(places[0])) for _, places in trials.failure_kind.places())
    shown = counts[:MOST_CATEGORIES]
    names = trials.failure.texts(np.array([place for _, place in shown], np.intp))
    axes = Axis(name="trials"), Axis(name="failure", scale=Scale.CATEGORY, categories=names)
    if not counts:
        return empty_chart("failures", "Failures by kind", _NONE, *axes)
    columns: dict[str, list[Cell]] = {
        "x": [-less for less, _ in shown],
        "y": [*range(len(shown))],
        "number": cells(trials.number[[place for _, place in shown]]),
    }
    failed, most, first = -sum(less for less, _ in counts), -shown[0][0], trials.number[shown[0][1]]
    like = "" if failed == 1 else f", {'all' if most == failed else f'{most:,}'} of them like trial {first}"
    left = len(counts) - len(shown)
    return Chart(
        name="failures",
        title=f"{failed:,} of {counted(len(trials), 'trial')} failed{like}: {names[0]}",
        axes=axes,
        series=[Series(name="failed", mark=Mark.BARS, colour="state FAILED", columns=columns)],
        note=f"{counted(left, 'rarer kind is', 'rarer kinds are')} left out." if left else "",
    )


def failures_by_label(trials: TrialColumns) -> Chart:
    """Return the share of failed trials over the values of the label that best explains the failures."""
    name, title = "failures by label", "Where in the space trials fail"
    is_failed = trials.state.is_in(TrialState.FAILED)
    is_ended = is_failed | trials.is_complete
    axes = Axis(name="share of failed trials", most=1.0), Axis(name="label", scale=Scale.CATEGORY)
    if not is_failed.any():
        return empty_chart(name, title, _NONE, *axes)
    found = []
    for label in trials.labels.values():
        places = np.flatnonzero(is_ended & label.is_active)
        group = groups(label, places)
        strength = explained(group, is_failed[places].astype(float))
        if strength:
            found.append((strength, label, places, group))
    if not found:
        return empty_chart(name, title, "No param explains the failures so far.", *axes)
    _, label, places, group = max(found, key=lambda each: each[0])
    sizes = np.bincount(group)
    shares = np.bincount(group, is_failed[places]) / np.maximum(sizes, 1)
    used = np.flatnonzero(sizes)[:MOST_CATEGORIES]
    names = interval_names(label, places, group)
    worst = int(used[shares[used].argmax()])
    columns: dict[str, list[Cell]] = {
        "x": shares[used].tolist(),
        "y": [*range(len(used))],
        "trials": sizes[used].tolist(),
    }
    return Chart(
        name=name,
        title=f"{100 * shares[worst]:.0f} % of the trials with {label.name} {names[worst]} fail",
        axes=(axes[0], Axis(name=label.name, scale=Scale.CATEGORY, categories=[names[place] for place in used])),
        series=[Series(name="failed", mark=Mark.BARS, colour="state FAILED", columns=columns)],
        note="The label is the one that explains the most variance of failing; other params may have a part in it.",
    )
