"""Charts of machines: throughput and its bound, predicted and actual seconds, and reasons for a placement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from shadho_celery.charts.chart import (
    MOST,
    MOST_CATEGORIES,
    Array,
    Axis,
    Chart,
    Mark,
    Scale,
    Series,
    thin_points,
)
from shadho_celery.charts.columns import AttemptColumns, Depth, TrialColumns
from shadho_celery.charts.registry import StudyChart
from shadho_celery.charts.timeline import busy_words
from shadho_celery.core.checks import listed, short
from shadho_celery.core.records import Placed
from shadho_celery.core.trial import COUNTED, TrialState
from shadho_celery.core.units import counted, digits, took
from shadho_celery.errors import UsageError
from shadho_celery.placement.bound import throughput_bound
from shadho_celery.placement.durations import filled
from shadho_celery.results.study import StudyResults

#: maximum number of intervals in charts over time; and mean number of trials per interval if there are fewer intervals
INTERVALS, PER_INTERVAL = 60, 10
#: predicted seconds count as exact if they differ from the actual seconds by less than this factor
EXACT = 1.01
#: trials with fewer seconds are short: sending such a trial takes longer than running it
SHORT_SECONDS = 0.1
#: minimum number of completed trials, and minimum seconds with live workers, for statements about the use of machines
TELLING_TRIALS, TELLING_SECONDS = 20, 60.0
_HOUR = 3600.0
_BOUND = (
    "The bound is what a linear program allows with the mean slot seconds of each subspace on each class, the slots of "
    "the live workers without those that ran trials of other studies, and the mix of subspaces as it was."
)
_SHARED = " Other studies take as large a part of one more worker as of the others of its class."
_SHORT = "Sending one of these short trials takes longer than running it, which the bound leaves out."
_UNTRIED = "No trial has completed on {}: its speed is estimated as that of a mean class."
_FEW = (
    f"This takes {TELLING_TRIALS} completed trials, most of which take {took(SHORT_SECONDS)}, and "
    f"{took(TELLING_SECONDS)} in which trials run."
)
_NO_TIMES = "No trial has completed yet whose recorded times show which slots there were."


@StudyChart(section="Machines", place=2, depth=Depth.FACTS)
def throughput(trials: TrialColumns, attempts: AttemptColumns) -> Chart:
    """Return the completed trials per hour by class over time, and the maximum that the fleet could complete."""
    axes = Axis(name="time", scale=Scale.TIME), Axis(name="trials", unit="an hour")
    seconds, mix = mean_seconds(trials, attempts), _mix(trials)
    if not seconds or not _slots(trials, attempts):
        return Chart(title="Completed trials an hour", axes=axes, empty=_NO_TIMES)
    edges = _edges(*_extent(trials, attempts), int(trials.is_complete.sum()))
    hours = np.diff(edges) / _HOUR
    series = []
    total = np.zeros(len(hours))
    for name, places in trials.compute_class.places(trials.is_complete):
        rate = np.histogram(trials.finished_at[places], edges)[0] / hours
        series.append(_stacked(name, edges, total, total + rate))
        total = total + rate
    bounds = []
    slots = live_slots(trials, attempts, edges)
    # Bounds are reused, because a linear program takes milliseconds, and most intervals have the same numbers of slots.
    known: dict[tuple[float, ...], float] = {}
    for counts in zip(*(counts.tolist() for counts in slots.values()), strict=True):
        key = tuple(float(f"{count:.3g}") for count in counts)
        if key not in known:
            free = dict(zip(slots, counts, strict=True))
            known[key] = _HOUR * throughput_bound(seconds, free, mix).rate if any(key) else 0.0
        bounds.append(known[key])
    series.append(Series.of("bound", Mark.STEPS, "bound", x=edges, y=np.array([*bounds, bounds[-1]])))
    completed, possible = int(trials.is_complete.sum()), float((np.array(bounds) * hours).sum())
    title = f"{counted(completed, 'trial')} completed in {took(_live_seconds(trials, attempts))}"
    if possible and are_telling(trials, attempts):
        title = f"{100 * completed / possible:.0f} % of the trials that this fleet could have completed"
        title += " beside those of other studies" * attempts.has_others
    how = f"The dashed line is the bound. {_BOUND}"
    if (total > EXACT * np.array(bounds)).any():
        how += (
            " Bars are higher than the bound where trials took less than the mean seconds, as those of fast subspaces "
            "do, where fewer were pruned or failed, or where trials began in the bar before."
        )
    return Chart(title=title, axes=axes, series=series, note=_bound_note(trials, attempts), how=how)


def _stacked(name: str, edges: Array, base: Array, top: Array) -> Series:
    """Return the bars of a class between `edges`, stacked on the bars of earlier classes."""
    return Series.of(name, Mark.BARS, f"class {name}", x=edges[:-1], width=np.diff(edges), base=base, y=top)


@StudyChart(section="Machines", place=3, depth=Depth.FACTS)
def one_more_worker(trials: TrialColumns, attempts: AttemptColumns) -> Chart:
    """Return how many more trials an hour one more worker of each class would complete."""
    seconds, slots, mix = mean_seconds(trials, attempts), _slots(trials, attempts), _mix(trials)
    axes = Axis(name="more trials", unit="an hour"), Axis(name="class", scale=Scale.CATEGORY)
    title = "What one more worker of each class would complete"
    if not seconds or not slots:
        return Chart(title=title, axes=axes, empty=_NO_TIMES)
    if not are_telling(trials, attempts):
        return Chart(title=title, axes=axes, empty=_FEW)
    found = throughput_bound(seconds, slots, mix)
    sizes = {**dict.fromkeys(slots, 1.0), **_worker_slots(attempts)}
    if attempts.has_others:
        whole = _slots(trials, attempts, with_others=True)
        sizes = {each: sizes[each] * slots[each] / (whole[each] or 1.0) for each in slots}
    larger = {each: throughput_bound(seconds, {**slots, each: slots[each] + sizes[each]}, mix) for each in slots}
    gains = {each: _HOUR * (more.rate - found.rate) for each, more in larger.items()}
    shown = sorted(gains, key=lambda each: -gains[each])[:MOST_CATEGORIES]
    slots_of = {"slots": [sizes[n] for n in shown], "first slot": [_HOUR * found.per_slot[n] for n in shown]}
    bars = Series.of("gain", Mark.BARS, "bound", x=[gains[n] for n in shown], y=range(len(shown)), **slots_of)
    title = (
        f"One more {shown[0]} worker adds {digits(gains[shown[0]])} completed trials an hour to the "
        f"{digits(_HOUR * found.rate)} of this fleet at full use"
    )
    if (busy := busy_words(attempts)) is not None:
        title += f"; its slots {busy}"
    return Chart(
        title=title,
        axes=(axes[0], Axis(name="class", scale=Scale.CATEGORY, categories=shown)),
        series=[bars],
        note=_bound_note(trials, attempts),
        how=f"{_BOUND}{_SHARED * attempts.has_others} A gain is the difference to the bound with the slots of one more "
        "worker. For a small part of a slot it is the dual value of the class's slots. Trials that are pruned or fail "
        "do not count, but their time does.",
    )


@StudyChart(section="Machines", place=4, depth=Depth.FACTS)
def predictions(trials: TrialColumns, attempts: AttemptColumns) -> Chart:
    """Return the predicted seconds of each completed attempt over x, and its actual seconds over y, by class."""
    axes = [Axis(name=name, unit="s", scale=Scale.LOG) for name in ("predicted", "actual")]
    is_done = attempts.end.is_in("complete")
    predicted, seconds = attempts.predicted, _actual(trials, attempts)
    is_known = is_done & (predicted > 0) & (seconds > 0) & np.isfinite(seconds)
    places = np.flatnonzero(is_known)
    if len(places) < TELLING_TRIALS or not are_telling(trials, attempts):
        return Chart(title="Predicted and actual seconds", axes=axes, empty=_FEW)
    drawn, note = thin_points(predicted[places], seconds[places], MOST - 2)
    series = []
    for name, own in attempts.compute_class.places(places[drawn]):
        columns = {"x": predicted[own], "y": seconds[own], "number": attempts.number[own]}
        series.append(Series.of(name, Mark.POINTS, f"class {name}", **columns))
    ends = np.array([predicted[places].min(), predicted[places].max()])
    series.append(Series.of("as predicted", Mark.LINE, "bound", x=ends, y=ends))
    # For half of the trials, predicted and actual seconds differ by at most this factor.
    factor = float(np.exp(np.median(np.abs(np.log(seconds[places] / predicted[places])))))
    within = "1 %" if factor < EXACT else f"a factor of {factor:.2f}"
    title = f"Half of {counted(len(places), 'trial')} took their predicted seconds, to within {within}"
    return Chart(title=title, axes=axes, series=series, note=note)


@StudyChart()
def why_here(study: StudyResults, attempts: AttemptColumns, number: int, attempt: int = 1) -> Chart:
    """Return the predicted seconds of a trial on each class at the time when an attempt of it was placed."""
    trial = study.trial(number)
    found = [each for each in study.records.of_trial(number) if each["attempt"] == attempt]
    if not found:
        raise UsageError(f"the store has no attempt {short(attempt)} of trial {number}")
    seconds = trial.seconds if trial.state == TrialState.COMPLETE and trial.attempts == attempt else None
    free = free_slots(attempts, number, attempt)
    return costs(found[0]["placed"], found[0]["compute_class"], (number, attempt), seconds, free)


def costs(
    placed: Mapping[str, Placed],
    chosen: str | None,
    key: tuple[int, int],
    seconds: float | None,
    free: Mapping[str, int],
) -> Chart:
    """Return the predicted seconds of a trial on each class at the time when an attempt was placed on the class
    `chosen`.

    `key` has the numbers of the trial and of its attempt. `placed` has the scheduler's predictions by class. `seconds`
    are the actual seconds of the trial, None if they are not known. `free` has the number of free slots at that time by
    class; classes for which it is not known are missing.
    """
    title = f"Trial {key[0]}, attempt {key[1]}, went to {chosen}"
    axes = Axis(name="time", unit="s"), Axis(name="class", scale=Scale.CATEGORY)
    if not placed:
        return Chart(title=title, axes=axes, empty="No prediction was recorded for this attempt.")
    shown = sorted(placed, key=lambda each: _key(placed[each].seconds))[:MOST_CATEGORIES]
    rows, predicted, backlog = range(len(shown)), [placed[n].seconds for n in shown], [placed[n].backlog for n in shown]
    facts = {"shadow price": [placed[n].price for n in shown], "chosen": [int(n == chosen) for n in shown]}
    series = [
        Series.of("predicted seconds", Mark.BARS, "predicted seconds", x=predicted, y=rows, **facts),
        Series.of("backlog", Mark.BARS, "backlog", x=backlog, y=rows),
    ]
    if seconds is not None and chosen in shown:
        series.append(Series.of("actual seconds", Mark.POINTS, "best", x=[seconds], y=[shown.index(chosen)]))
    own = placed.get(str(chosen))
    if own is not None and own.seconds is not None:
        title += f", where it was expected to take {took(own.seconds)}"
    why, *more = [*reasons(placed, chosen, free), ""]
    if why:
        title += f", because {why}"
    if len(placed) == 1:
        return Chart(title=title, axes=axes, empty="There was no choice of a class.")
    return Chart(
        title=title,
        axes=(axes[0], Axis(name="class", scale=Scale.CATEGORY, categories=shown)),
        series=series,
        note=" ".join(f"{each[0].upper()}{each[1:]}." for each in more if each),
    )


def reasons(placed: Mapping[str, Placed], chosen: str | None, free: Mapping[str, int]) -> Iterator[str]:
    """Yield reasons for the choice of a class, as clauses that follow "because". The arguments are as in `costs`."""
    own = None if chosen is None or chosen not in placed else placed[chosen].seconds
    if own is None:
        return
    if len(placed) == 1:
        yield "no other class was live"
        return
    faster = [name for name, each in placed.items() if _key(each.seconds) < own]
    if not faster:
        yield "no class was expected to be faster"
    elif full := sorted(name for name in faster if name in free and not free[name]):
        yield f"no slot was free on {listed(full, 5)}"
    if faster and has_shadow_prices(placed):
        yield "a class with a high shadow price is kept for trials that it runs comparatively fast"


def has_shadow_prices(placed: Mapping[str, Placed]) -> bool:
    """Return whether the shadow prices of the classes differ. Equal prices do not explain a placement."""
    return len({each.price for each in placed.values()} - {None}) > 1


def free_slots(attempts: AttemptColumns, number: int, attempt: int) -> dict[str, int]:
    """Return by class the number of slots that were free when an attempt was queued.

    Slots are not free if an earlier attempt of the study ran on them or waited for them, or if they ran trials of other
    studies. An attempt with several slots counts as one slot. Returns {} if the time or the workers are not known.
    """
    place = np.flatnonzero((attempts.number == number) & (attempts.attempt == attempt))
    if not len(place) or not attempts.sessions or not math.isfinite(at := float(attempts.queued_at[place[0]])):
        return {}
    is_held = (attempts.queued_at < at) & ~(attempts.ended_at <= at)
    held = {name: len(places) for name, places in attempts.compute_class.places(is_held)}
    found: dict[str, int] = {}
    for session in attempts.sessions:
        if session.since <= at and (session.until is None or at < session.until):
            others = next((slots for since, slots in reversed(session.others) if since <= at), 0.0)
            found[session.compute_class] = found.get(session.compute_class, 0) + session.slots - round(others)
    return {name: max(0, slots - held.get(name, 0)) for name, slots in found.items()}


def _actual(trials: TrialColumns, attempts: AttemptColumns) -> Array:
    """Return for each attempt the actual seconds of its trial, NaN if they are not known, shape (attempts,)."""
    if not len(trials):
        return np.full(len(attempts), math.nan)
    places = np.minimum(np.searchsorted(trials.number, attempts.number), len(trials) - 1)
    return np.where(trials.number[places] == attempts.number, trials.seconds[places], math.nan)


def mean_seconds(trials: TrialColumns, attempts: AttemptColumns) -> dict[str, dict[str, float]]:
    """Return the mean slot seconds (seconds times slots) that a completed trial takes, by subspace and class.

    The time of failed and pruned trials is included, divided among the completed trials. Pairs of subspace and class
    without a completed trial are estimated from other pairs (`placement.durations`). A class without a completed trial
    counts as an average class.
    """
    subspaces, classes = trials.subspace, trials.compute_class
    is_timed = np.isfinite(trials.seconds) & (trials.seconds > 0) & (subspaces.codes >= 0) & (classes.codes >= 0)
    ended, done = is_timed & trials.state.is_in(*COUNTED), is_timed & trials.is_complete
    pairs = subspaces.codes * len(classes.names) + classes.codes
    seconds, counts = np.bincount(pairs[ended], trials.slot_seconds[ended]), np.bincount(pairs[done])
    means = {}
    for pair in np.flatnonzero(counts).tolist():
        row, column = divmod(pair, len(classes.names))
        means[subspaces.names[row], classes.names[column]] = float(seconds[pair] / counts[pair])
    return filled(means, dict.fromkeys(name for name, _ in means), _classes(trials, attempts)) if means else {}


def _classes(trials: TrialColumns, attempts: AttemptColumns) -> list[str]:
    """Return the names of the classes: those with trials in the order of their codes, then those with workers only."""
    return [*dict.fromkeys([*trials.compute_class.names, *attempts.classes])]


def _bound_note(trials: TrialColumns, attempts: AttemptColumns) -> str:
    """Return a sentence about what the bound leaves out or estimates, or ""."""
    tried = {name for name, _ in trials.compute_class.places(trials.is_complete)}
    untried = [name for name in _classes(trials, attempts) if name not in tried]
    return _UNTRIED.format(listed(untried, 5)) if untried else _SHORT * are_short(trials)


def are_short(trials: TrialColumns) -> bool:
    """Return True if most completed trials take less than SHORT_SECONDS."""
    seconds = trials.seconds[trials.is_complete & np.isfinite(trials.seconds)]
    return bool(len(seconds)) and float(np.median(seconds)) < SHORT_SECONDS


def are_telling(trials: TrialColumns, attempts: AttemptColumns) -> bool:
    """Return True if enough trials have completed, in enough time, to judge the use of machines and the predictions.

    In a shorter study, the start of processes takes most of the time.
    """
    is_enough = int(trials.is_complete.sum()) >= TELLING_TRIALS and not are_short(trials)
    return is_enough and _live_seconds(trials, attempts) >= TELLING_SECONDS


def _mix(trials: TrialColumns) -> dict[str, float]:
    codes = trials.subspace.codes[trials.is_complete & (trials.seconds > 0) & (trials.subspace.codes >= 0)]
    counts = np.bincount(codes, minlength=len(trials.subspace.names))
    return {name: float(counts[code]) for code, name in enumerate(trials.subspace.names) if counts[code]}


def live_slots(
    trials: TrialColumns, attempts: AttemptColumns, edges: Array, *, with_others: bool = False
) -> dict[str, Array]:
    """Return the mean number of live slots of each class in each interval between `edges`, shape (edges - 1,).

    Slots that ran trials of other studies count only `with_others`.
    """
    found = {name: np.zeros(len(edges) - 1) for name in _classes(trials, attempts)}
    for session in attempts.sessions:
        seconds = session.slots * session.seconds(edges, attempts.now)
        if not with_others:
            seconds = np.maximum(seconds - session.others_seconds(edges, attempts.now), 0.0)
        found[session.compute_class] += seconds / np.maximum(np.diff(edges), 1e-9)
    return found


def _slots(trials: TrialColumns, attempts: AttemptColumns, *, with_others: bool = False) -> dict[str, float]:
    """Return the mean number of live slots of each class while any worker was live; {} if there was no worker."""
    began, ended = _extent(trials, attempts)
    if not math.isfinite(began):
        return {}
    slots = live_slots(trials, attempts, np.array([began, ended]), with_others=with_others)
    # Pauses between the runs of a resumed study, without workers, are excluded.
    share = _live_share(attempts, began, ended)
    return {name: float(count[0]) / share for name, count in slots.items()} if any(slots.values()) else {}


def _live_seconds(trials: TrialColumns, attempts: AttemptColumns) -> float:
    """Return the seconds from the first start to the last end of a trial, except the time without any worker."""
    began, ended = _extent(trials, attempts)
    return _live_share(attempts, began, ended) * max(0.0, ended - began)


def _live_share(attempts: AttemptColumns, start: float, end: float) -> float:
    """Return the share of the time from `start` to `end` in which there was at least one worker."""
    seconds, reached = 0.0, start
    for session in sorted(attempts.sessions, key=lambda each: each.since):
        until = min(end, attempts.now if session.until is None else session.until)
        seconds += max(0.0, until - max(reached, session.since))
        reached = max(reached, until)
    return seconds / max(end - start, 1e-9)


def _worker_slots(attempts: AttemptColumns) -> Mapping[str, float]:
    """Return the mean number of slots of a worker by class."""
    slots: dict[str, list[int]] = {}
    for session in attempts.sessions:
        slots.setdefault(session.compute_class, []).append(session.slots)
    return {name: sum(each) / len(each) for name, each in slots.items()}


def _extent(trials: TrialColumns, attempts: AttemptColumns) -> tuple[float, float]:
    """Return the first start of a trial, and the last end of a trial, or while trials run the time of reading."""
    is_running = bool(trials.state.is_in(TrialState.RUNNING, TrialState.QUEUED).any())
    ends = trials.finished_at[np.isfinite(trials.finished_at)]
    return trials.began_at, attempts.now if is_running or not len(ends) else float(ends.max())


def _edges(began: float, ended: float, count: int) -> Array:
    """Return the edges of equal intervals from `began` to `ended`, for a chart of `count` trials or attempts."""
    return np.linspace(began, max(ended, began + 1e-3), min(INTERVALS, max(1, count // PER_INTERVAL)) + 1)


def _key(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
