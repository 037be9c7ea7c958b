"""Charts of losses and of failures.

The losses: their history, the comparison of studies, the front and its hypervolume, rungs, and reports. The
failures: their kinds, and the params with which trials fail.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

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
    scale_of,
    thin_points,
    thin_rows,
    thin_steps,
)
from shadho_celery.charts.columns import INFEASIBLE, Depth, TrialColumns, points_by_class
from shadho_celery.charts.params import groups, interval_names
from shadho_celery.charts.registry import StudyChart
from shadho_celery.core.checks import short
from shadho_celery.core.trial import COUNTED, TrialState, shown_limit
from shadho_celery.core.units import counted, digits
from shadho_celery.errors import UsageError
from shadho_celery.results.study import StudyResults
from shadho_celery.study.front import Coverage, coverage, first_front

#: maximum numbers of marks for trials with a loss, for failed trials, and for the line of the best loss
_POINTS, _FAILED, _LINE = int(0.6 * MOST), int(0.2 * MOST), int(0.2 * MOST)
#: by state of trials with a loss: the form of their points
FORMS = {TrialState.COMPLETE: "filled", TrialState.PRUNED: "hollow"}
#: quantities on the horizontal axis of the history
TRIALS, SECONDS = "trials", "seconds"


@StudyChart(
    section="Search",
    place=1,
    depth=Depth.LOSSES,
    choice="over",
    choices=lambda trials: (TRIALS, SECONDS),
    is_shown=lambda trials, chart: True,
)
def history(trials: TrialColumns, along: str = TRIALS) -> Chart:
    """Return the losses of all trials, and the best loss so far, along "trials" or "seconds".

    A failed trial has no loss, so its mark has no `y` and is drawn at the horizontal axis.
    """
    x, axis = _position(trials, along)
    loss = trials.loss_axis()
    has_loss = trials.state.is_in(*FORMS) & np.isfinite(trials.loss)
    failed = np.flatnonzero(trials.state.is_in(TrialState.FAILED) & np.isfinite(x))
    if not has_loss.any():
        said = f"{counted(len(failed), 'trial has', 'trials have')} failed, and none has a loss yet."
        empty = said if len(failed) else "No trial has ended yet."
        return Chart(title="The loss of each trial", axes=(axis, loss), empty=empty)
    drawn, note = thin_points(x[has_loss], trials.loss[has_loss], _POINTS)
    shown = np.flatnonzero(has_loss)[drawn]
    series: list[Series] = []
    for state, form in FORMS.items():
        within = shown[trials.state.is_in(state)[shown]]
        series += points_by_class(trials, x, within, state=f", {state.lower()}", form=form)
    if len(failed):
        drawn = failed[thin_rows(len(failed), _FAILED)[0]]
        columns = {"x": x[drawn], "y": [None] * len(drawn), "number": trials.number[drawn]}
        series.append(Series.of("failed", Mark.POINTS, "state FAILED", "cross", **columns))
    when, best = best_so_far(trials, x)
    if len(when):
        changes = thin_steps(when, best, _LINE)
        series.append(Series.of("best so far", Mark.STEPS, "best", x=when[changes], y=best[changes]))
    return Chart(title=_title(trials, best), axes=(axis, loss), series=series, note=note, has_states=True)


def best_so_far(trials: TrialColumns, x: Array) -> tuple[Array, Array]:
    """Return the sorted positions `x` of the rated trials, and the best loss up to each of them, shapes (m,)."""
    rated = np.flatnonzero(trials.is_rated & np.isfinite(x))
    rated = rated[np.argsort(x[rated], kind="stable")]
    best = np.minimum.accumulate(trials.merit[rated]) if len(rated) else np.empty(0)
    return x[rated], -best if trials.is_maximized else best


def comparisons(studies: Mapping[str, TrialColumns]) -> list[Chart]:
    """Return a `comparison` of the studies that minimise, and another one of the studies that maximise.

    A chart without studies is left out.
    """
    groups = [{name: each for name, each in studies.items() if each.is_maximized is so} for so in (False, True)]
    return [comparison(group) for group in groups if group]


def comparison(studies: Mapping[str, TrialColumns]) -> Chart:
    """Return the best loss so far over the number of the trial, with a line for each study. `studies` are by name.

    All studies minimise, or all maximise. A line ends at the last trial that has ended, even if this trial has no loss.
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
            series.append(Series.of(name, Mark.STEPS, f"study {name}", x=when, y=steps))
            said.append(f"{digits(float(best[-1]))} in {name}")
            values.append(best)
    names = {trials.loss_name for trials in studies.values()}
    loss = names.pop() if len(names) == 1 else "loss"
    direction = "maximize" if any(trials.is_maximized for trials in studies.values()) else "minimize"
    best_axis = Axis(name=f"best {loss} so far ({direction})", scale=scale_of(np.concatenate([*values, np.empty(0)])))
    axes = Axis(name="trial"), best_axis
    title = f"The best {loss} is {', '.join(said)}" if series else "The best loss of each study"
    empty = "" if series else "No trial has completed yet."
    return Chart(name="comparison", title=title, axes=axes, series=series, empty=empty)


def _position(trials: TrialColumns, along: str) -> tuple[Array, Axis]:
    if along not in (TRIALS, SECONDS):
        raise UsageError(f"the history is along {TRIALS} or {SECONDS}, not {short(along)}")
    if along == TRIALS:
        return trials.number.astype(float), Axis(name="trial")
    return trials.finished_at - trials.began_at, Axis(name="since the first trial began", unit="s")


def _title(trials: TrialColumns, best: Array) -> str:
    ended = int(trials.state.is_in(*COUNTED).sum())
    limit = shown_limit(trials.asked, ended)
    of = f"{ended:,} of {counted(limit, 'trial')}" if limit else counted(ended, "trial")
    said = f"The best {trials.loss_name} is {digits(float(best[-1]))}" if len(best) else "No feasible trial has a loss"
    return f"{said} after {of}"


_NO_FRONT = "A study with several objectives has a front once a feasible trial has completed."


def on_front(trials: TrialColumns) -> list[int]:
    """Return the numbers of the `_feasible` trials that no other one dominates, sorted by the first loss.

    Of trials with equal losses, only the first one is returned. In a study with one loss, the list is empty.
    """
    if len(trials.losses) < 2:
        return []
    places, losses = _feasible(trials)
    is_first = first_front(losses)
    places, losses = places[is_first], losses[is_first]
    order = np.lexsort(losses.T[::-1])
    return [*trials.number[places[order]].tolist()]


def _feasible(trials: TrialColumns) -> tuple[Indices, Array]:
    """Return the places of the feasible COMPLETE trials with their highest budget, and their losses, negated if
    maximised, shape (trials, losses).
    """
    signs = [-1.0 if trials.objectives[name] == "maximize" else 1.0 for name in trials.losses]
    losses = np.column_stack([sign * values for sign, values in zip(signs, trials.losses.values(), strict=True)])
    places = np.flatnonzero(trials.is_complete & ~trials.is_infeasible & np.isfinite(losses).all(axis=1))
    budgets = np.where(np.isnan(trials.budget), math.inf, trials.budget)[places]
    places = places[budgets == budgets.max(initial=-math.inf)]
    return places, losses[places]


def _coverage(trials: TrialColumns) -> Coverage | None:
    """Return the hypervolume over the ended trials, as in a study's report.

    Returns None for a study with one loss, or without a feasible trial.
    """
    if len(trials.losses) < 2:
        return None
    places, losses = _feasible(trials)
    ended = np.cumsum(trials.state.is_in(*(state.value for state in COUNTED)))
    return coverage(np.asarray(ended[places], np.intp), losses, trials.objectives)


@StudyChart(section="Search", place=2)
def front(trials: TrialColumns) -> Chart:
    """Return the first two losses of all COMPLETE trials, with the trials on the front in a series of their own."""
    names = [*trials.losses][:2]
    if len(names) < 2:
        return Chart(title="The front of the losses", axes=(), empty=_NO_FRONT)
    x, y = (trials.losses[name] for name in names)
    axes = tuple(
        Axis(name=f"{name} ({trials.objectives[name]})", scale=scale_of(values[trials.is_complete]))
        for name, values in zip(names, (x, y), strict=True)
    )
    is_front = np.isin(trials.number, on_front(trials)) & trials.is_complete
    is_shown = np.isin(np.arange(len(trials)), _feasible(trials)[0])
    series, notes = [], []
    for label, colour, form, within in (
        ("other trials", "other", "filled", is_shown & ~is_front),
        ("infeasible", "other", "dash", trials.is_complete & trials.is_infeasible),
        ("front", "rank", "filled", is_front),
    ):
        places = np.flatnonzero(within)
        drawn, note = thin_points(x[places], y[places], MOST // 3)
        places = places[drawn]
        notes.append(note)
        if len(places) or label != "infeasible":
            found = {"x": x[places], "y": y[places], "number": trials.number[places]}
            series.append(Series.of(label, Mark.POINTS, colour, form, **found))
    if not any(map(len, series)):
        return Chart(title="The front of the losses", axes=axes, empty="No trial has completed yet.")
    complete = counted(int(trials.is_complete.sum()), "trial is", "trials are")
    title = f"{int(is_front.sum()):,} of {complete} on the front"
    return Chart(title=title, axes=axes, series=series, note=" ".join(filter(None, notes)))


@StudyChart(section="Search", place=3)
def hypervolume(trials: TrialColumns) -> Chart:
    """Return the hypervolume of the front after each number of ended trials."""
    axes = Axis(name="ended trials"), Axis(name="hypervolume")
    covered = _coverage(trials)
    if covered is None:
        return Chart(title="The hypervolume of the front", axes=axes, empty=_NO_FRONT)
    ended, volumes = (np.array(column, float) for column in zip(*covered.history, strict=True))
    drawn, note = thin_rows(len(ended), MOST)
    point = ", ".join(f"{name} {digits(value)}" for name, value in covered.reference.items())
    return Chart(
        title=f"The front covers a hypervolume of {digits(covered.hypervolume)}",
        axes=axes,
        series=[Series.of("hypervolume", Mark.STEPS, "best", x=ended[drawn], y=volumes[drawn])],
        note=note,
        how=f"The reference point is {point}.",
    )


#: maximum p-value, corrected for the number of groups, at which a label is said to explain failures
CHANCE = 0.05
_NONE, _NONE_NOW = "No trial has failed.", "No trial has failed under the present code."


@StudyChart(section="Failures", place=1, is_shown=lambda trials, _: bool(trials.state.is_in(TrialState.FAILED).any()))
def failures(trials: TrialColumns) -> Chart:
    """Return the number of failed trials by kind of failure, the most frequent first, as `core.failures` defines kinds.

    If failures of a kind differ in values, the text of the kind is without these values. Trials under earlier versions
    of the code do not count, because their failures may be fixed.
    """
    is_failed = trials.failure_kind.codes >= 0
    failed, earlier = np.flatnonzero(is_failed & trials.is_current), int((is_failed & ~trials.is_current).sum())
    before = f"{counted(earlier, 'trial')} failed under earlier code." if earlier else ""
    kinds, firsts, sizes = np.unique(trials.failure_kind.codes[failed], return_index=True, return_counts=True)
    shown = np.lexsort((firsts, -sizes))[:MOST_CATEGORIES]
    names = [_words(trials, int(kind)) for kind in kinds[shown]]
    axes = Axis(name="trials"), Axis(name="failure", scale=Scale.CATEGORY, categories=names)
    if not names:
        return Chart(title="Failures by kind", axes=axes, empty=f"{_NONE_NOW} {before}" if before else _NONE)
    numbers = trials.number[failed[firsts[shown]]]
    most = int(sizes.max())
    share = "all" if most == len(failed) else f"{most:,}"
    like = f", {share} of them like trial {numbers[0]}" if len(failed) > 1 else ""
    title = f"{len(failed):,} of {counted(int(trials.is_current.sum()), 'trial')} failed{like}: {names[0]}"
    if len(names) == 1:
        # One bar would only repeat the title.
        return Chart(title=title, axes=axes, empty=f"Trial {numbers[0]} has the traceback. {before}".strip())
    left = len(kinds) - len(shown)
    rarer = f"{counted(left, 'rarer kind is', 'rarer kinds are')} left out." if left else ""
    return Chart(
        title=title,
        axes=axes,
        series=[_failed(sizes[shown], number=numbers)],
        note=f"{rarer} {before}".strip(),
    )


def _failed(x: Array | Indices, **columns: Array | Indices) -> Series:
    """Return bars about failed trials, one in each row."""
    return Series.of("failed", Mark.BARS, "state FAILED", x=x, y=range(len(x)), **columns)


def _words(trials: TrialColumns, kind: int) -> str:
    """Return the text of a kind of failure, without the values if they differ between trials."""
    failures = np.unique(trials.failure.codes[trials.failure_kind.codes == kind])
    return trials.failure.names[failures[0]] if len(failures) == 1 else trials.failure_kind.names[kind]


@StudyChart(section="Failures", place=2)
def failures_by_label(trials: TrialColumns) -> Chart:
    """Return the share of failed trials over the values of the label that best separates failed trials from others.

    It is the label with the group of values whose failures are the least likely by chance. Their p-value is that of
    Fisher's exact test ("Statistical Methods for Research Workers", 1934), times the number of groups of all labels
    (Bonferroni). No label is named if the p-value is above `CHANCE`. Trials under earlier code do not count.
    """
    title = "Where in the space trials fail"
    is_failed = trials.state.is_in(TrialState.FAILED)
    is_ended = trials.state.is_in(*COUNTED) & trials.is_current
    axes = Axis(name="share of failed trials", most=1.0), Axis(name="label", scale=Scale.CATEGORY)
    if not (is_failed & is_ended).any():
        return Chart(title=title, axes=axes, empty=_NONE_NOW if is_failed.any() else _NONE)
    found, looked_at = [], 0
    for label in trials.labels.values():
        places = np.flatnonzero(is_ended & label.is_active)
        group = groups(label, places)
        looked_at += len(np.unique(group))
        found.append((_chance(group, is_failed[places].astype(float)), label, places, group))
    if not found or looked_at * min(chance for chance, *_ in found) > CHANCE:
        return Chart(title=title, axes=axes, empty="No param clearly explains the failures so far.")
    _, label, places, group = min(found, key=lambda each: each[0])
    sizes = np.bincount(group)
    shares = np.bincount(group, is_failed[places]) / np.maximum(sizes, 1)
    used = np.flatnonzero(sizes)[:MOST_CATEGORIES]
    names = interval_names(label, places, group)
    worst = int(used[shares[used].argmax()])
    return Chart(
        title=f"{100 * shares[worst]:.0f} % of the trials with {label.name} {names[worst]} fail",
        axes=(axes[0], Axis(name=label.name, scale=Scale.CATEGORY, categories=[names[place] for place in used])),
        series=[_failed(shares[used], trials=sizes[used])],
        how="The label is the one whose failures are least likely by chance; other params may have a part in them.",
    )


def _chance(group: Indices, is_failed: Array) -> float:
    """Return the least p-value of the groups: the probability of at least as many failures in the group by chance."""
    from scipy.stats import hypergeom  # slow to import

    own, sizes = np.bincount(group, is_failed), np.bincount(group)
    return float(hypergeom.sf(own - 1, len(group), is_failed.sum(), sizes).min(initial=1.0))


#: maximum number of trials whose reports are drawn, half of them the best and half the latest
MOST_CURVES = 100


@StudyChart(section="Search", place=4, depth=Depth.FACTS)
def rungs(trials: TrialColumns) -> Chart:
    """Return the losses of COMPLETE trials over their budgets."""
    axes = Axis(name="budget", scale=Scale.LOG), trials.loss_axis()
    places = np.flatnonzero(trials.is_complete & (trials.rung >= 0))
    if not len(places):
        return Chart(title="The losses by budget", axes=axes, empty="No trial with a budget has completed yet.")
    drawn, note = thin_points(trials.budget[places], trials.loss[places])
    series = [*points_by_class(trials, trials.budget, places[drawn])]
    title = f"The {trials.loss_name} of {counted(len(places), 'trial')} by budget"
    return Chart(title=title, axes=axes, series=series, has_states=True, note=note)


def candidates(trials: TrialColumns) -> list[int]:
    """Return the numbers of the trials whose reports are drawn: the best and latest trials that may have reports."""
    places = np.flatnonzero(_may_have_reports(trials))
    rated = places[trials.is_rated[places]]
    best = rated[np.argsort(trials.merit[rated], kind="stable")][: MOST_CURVES // 2]
    latest = places[-MOST_CURVES // 2 :]
    return sorted({*trials.number[best].tolist(), *trials.number[latest].tolist()})


def _may_have_reports(trials: TrialColumns) -> NDArray[np.bool_]:
    return np.isfinite(trials.started_at) | trials.is_rated


@StudyChart(section="Search", place=5, depth=Depth.FACTS)
def curves(trials: TrialColumns, study: StudyResults) -> Chart:
    """Return the reported losses of the `candidates` by step. Pruned trials are drawn in another form."""
    by_trial = _reported(trials, study, candidates(trials))
    values = np.array([loss for each in by_trial.values() for loss in each.values()])
    axes = Axis(name="step"), Axis(name=f"reported {trials.loss_axis().name}", scale=scale_of(values))
    if not by_trial:
        return Chart(title="The reports of trials", axes=axes, empty="No trial has reported a loss (context.report).")
    place = {number: index for index, number in enumerate(trials.number.tolist())}
    is_pruned = trials.state.is_in(TrialState.PRUNED)
    series = []
    for number, losses in by_trial.items():
        is_infeasible = bool(trials.is_infeasible[place[number]])
        stopped = bool(is_pruned[place[number]]) or is_infeasible
        name = f"trial {number}{INFEASIBLE if is_infeasible else ', pruned' if stopped else ''}"
        colour = f"class {trials.compute_class[place[number]]}"
        series.append(_curve(name, colour, losses, number, len(by_trial), pale=stopped))
    left = int(_may_have_reports(trials).sum()) - len(candidates(trials))
    pruned = counted(int(is_pruned.sum()), "trial was", "trials were")
    title = f"Reported losses of {counted(len(by_trial), 'trial')}; {pruned} pruned"
    others = counted(left, "other trial is", "other trials are")
    note = f"{others} left out; the best and the latest are drawn." if left else ""
    return Chart(title=title, axes=axes, series=series, note=note, has_states=True)


@StudyChart(depth=Depth.FACTS)
def learning_curve(trials: TrialColumns, study: StudyResults, number: int) -> Chart:
    """Return the reported losses of a trial, those of the best trial, and the medians of the other `candidates`."""
    study.trial(number)
    found = _reported(trials, study, {*candidates(trials), number})
    own = found.pop(number, {})
    by_step: defaultdict[int, list[float]] = defaultdict(list)
    for step, loss in (each for losses in found.values() for each in losses.items()):
        by_step[step].append(loss)
    medians = {step: float(np.median(by_step[step])) for step in sorted(by_step)}
    lines = [
        (f"median of {counted(len(found), 'other trial')}", "bound", medians, None),
        (f"best, trial {trials.best}", "best", found.get(-1 if trials.best is None else trials.best, {}), trials.best),
        (f"trial {number}", "state complete", own, number),
    ]
    series = [_curve(*line, len(lines), pale=False) for line in lines if line[2]]
    values = np.array([*own.values(), *medians.values()])
    axes = Axis(name="step"), Axis(name=f"reported {trials.loss_axis().name}", scale=scale_of(values))
    if not own:
        return Chart(title=f"The reports of trial {number}", axes=axes, empty="This trial has reported no loss.")
    last = max(own)
    more = f"; the median of the others is {digits(medians[last])}" if last in medians else ""
    title = f"Trial {number} reported {digits(own[last])} at step {last}{more}"
    return Chart(title=title, axes=axes, series=series, how="The others are the best and the latest trials.")


def _reported(trials: TrialColumns, study: StudyResults, numbers: Collection[int]) -> dict[int, dict[int, float]]:
    """Return the losses of each trial's last attempt by step, as pages show them. Trials without any are missing."""
    found: dict[int, dict[int, float]] = {}
    attempts: dict[int, int] = {}
    for each in study.reports(numbers):
        if attempts.get(each.number) != each.attempt:
            found[each.number], attempts[each.number] = {}, each.attempt
        found[each.number][each.step] = -each.loss if trials.is_maximized else each.loss
    return found


def _curve(name: str, colour: str, losses: Mapping[int, float], number: int | None, of: int, *, pale: bool) -> Series:
    """Return one of `of` curves of losses by step."""
    steps, values = np.array([*losses], float), np.array([*losses.values()])
    drawn, _ = thin_points(steps, values, max(4, MOST // (2 * of)))
    # A line through one point cannot be seen.
    mark, light = (Mark.LINE, "light") if len(drawn) > 1 else (Mark.POINTS, "hollow")
    columns = {"x": steps[drawn], "y": values[drawn], "number": [number] * len(drawn)}
    return Series.of(name, mark, colour, light if pale else "filled", **columns)
