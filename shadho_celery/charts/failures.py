"""Failures: how many of each kind, and where in the space they occur."""

from __future__ import annotations

import numpy as np

from shadho_celery.charts.chart import (
    MOST_CATEGORIES,
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
)
from shadho_celery.charts.columns import TrialColumns
from shadho_celery.charts.explained import groups, interval_names
from shadho_celery.charts.registry import StudyChart
from shadho_celery.core.trial import COUNTED, TrialState
from shadho_celery.core.units import counted

#: probability, over all places that are looked at, at which failures still count as the work of chance
CHANCE = 0.05
_NONE, _NONE_NOW = "No trial has failed.", "No trial has failed under the present code."


@StudyChart(section="Failures", place=1, is_shown=lambda trials, chart: not chart.empty)
def failures(trials: TrialColumns) -> Chart:
    """Return the number of failed trials by kind of failure, the most frequent first, as `study.failures` counts them.

    A kind is shown without the values in which its failures differ. Trials under earlier code do not count, because
    their failures may be fixed.
    """
    is_failed = trials.failure_kind.codes >= 0
    failed, earlier = np.flatnonzero(is_failed & trials.is_current), int((is_failed & ~trials.is_current).sum())
    before = f"{counted(earlier, 'trial')} failed under earlier code." if earlier else ""
    kinds, firsts, sizes = np.unique(trials.failure_kind.codes[failed], return_index=True, return_counts=True)
    shown = np.lexsort((firsts, -sizes))[:MOST_CATEGORIES]
    names = [_words(trials, int(kind)) for kind in kinds[shown]]
    axes = Axis(name="trials"), Axis(name="failure", scale=Scale.CATEGORY, categories=names)
    if not names:
        return empty_chart("failures", "Failures by kind", f"{_NONE_NOW} {before}" if before else _NONE, *axes)
    numbers = cells(trials.number[failed[firsts[shown]]])
    columns: dict[str, list[Cell]] = {"x": cells(sizes[shown]), "y": [*range(len(shown))], "number": numbers}
    most = int(sizes.max())
    share = "all" if most == len(failed) else f"{most:,}"
    like = f", {share} of them like trial {numbers[0]}" if len(failed) > 1 else ""
    left = len(kinds) - len(shown)
    rarer = f"{counted(left, 'rarer kind is', 'rarer kinds are')} left out." if left else ""
    return Chart(
        name="failures",
        title=f"{len(failed):,} of {counted(int(trials.is_current.sum()), 'trial')} failed{like}: {names[0]}",
        axes=axes,
        series=[Series(name="failed", mark=Mark.BARS, colour="state FAILED", columns=columns)],
        note=f"{rarer} {before}".strip(),
    )


def _words(trials: TrialColumns, kind: int) -> str:
    """Return the failure of the trials of a kind, without values if these differ."""
    failures = np.unique(trials.failure.codes[trials.failure_kind.codes == kind])
    return trials.failure.names[failures[0]] if len(failures) == 1 else trials.failure_kind.names[kind]


@StudyChart(section="Failures", place=2, is_shown=lambda trials, chart: not chart.empty)
def failures_by_label(trials: TrialColumns) -> Chart:
    """Return the share of failed trials over the values of the label that best tells failed trials from others.

    It is the label with a group of values that has more failures than chance would most rarely put there. Fisher's
    exact test gives the probability ("Statistical Methods for Research Workers", 1934), times the number of groups of
    all labels (Bonferroni). No label is named if that is above `CHANCE`. Trials under earlier code do not count.
    """
    name, title = "failures by label", "Where in the space trials fail"
    is_failed = trials.state.is_in(TrialState.FAILED)
    is_ended = trials.state.is_in(*COUNTED) & trials.is_current
    axes = Axis(name="share of failed trials", most=1.0), Axis(name="label", scale=Scale.CATEGORY)
    if not (is_failed & is_ended).any():
        return empty_chart(name, title, _NONE_NOW if is_failed.any() else _NONE, *axes)
    found, looked_at = [], 0
    for label in trials.labels.values():
        places = np.flatnonzero(is_ended & label.is_active)
        group = groups(label, places)
        looked_at += len(np.unique(group))
        found.append((_chance(group, is_failed[places].astype(float)), label, places, group))
    if not found or looked_at * min(chance for chance, *_ in found) > CHANCE:
        return empty_chart(name, title, "No param clearly explains the failures so far.", *axes)
    _, label, places, group = min(found, key=lambda each: each[0])
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
        note="The label is the one whose failures are least likely by chance; other params may have a part in them.",
    )


def _chance(group: Indices, is_failed: Array) -> float:
    """Return the least probability of the groups with which chance puts so many of the failures into the group."""
    from scipy.special import gammaln

    def ways(of: Array, taken: Array) -> Array:
        """Return the log of the number of ways to take some of a number of trials."""
        return np.asarray(gammaln(of + 1.0) - gammaln(taken + 1.0) - gammaln(of - taken + 1.0))

    count, failed = np.float64(len(group)), np.float64(is_failed.sum())
    least = 1.0
    for size, own in zip(np.bincount(group), np.bincount(group, is_failed), strict=True):
        more = np.arange(max(own, size + failed - count), min(size, failed) + 1)
        log = ways(failed, more) + ways(count - failed, size - more) - ways(count, np.float64(size))
        least = min(least, float(np.exp(log).sum()))
    return least
