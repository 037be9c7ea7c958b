"""Predictions from repeated runs of the same params: start-up seconds, hand-over seconds, and a trial's own effect.

The hand-over is the transfer of a checkpoint from another machine. Neither start-up nor hand-over grows with the
budget.

A trial that trains u units takes s + r u seconds, where s is the start-up and r the seconds per unit. Two runs of the
same params on one class, with y seconds for u units and y' seconds for u' units, have the same r. Therefore s = (y u' -
y' u) / (u' - u). Each promotion within a class gives such an estimate. A weighted median of many estimates is robust to
stragglers. Its lower confidence bound is used, so a start-up without evidence counts as 0.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Attempt, Trial
from shadho_celery.space.features import Array

#: number of latest pairs of runs that are used, and number of pairs that a group needs for its own estimate
LATEST, ENOUGH = 64, 6
#: number of latest pairs of runs from which the correlation is computed, and minimum number of such pairs
LATEST_DEPARTURES, ENOUGH_DEPARTURES = 128, 12
#: smallest relative change of the estimate of a start-up or a hand-over that is used
NEWS = 0.2
#: for normal distributions: the standard error of the median divided by that of the mean, and the standard deviation
#: divided by the median absolute deviation
OF_MEDIAN, OF_DEVIATION = 1.2533, 1.4826


class Work(NamedTuple):
    """The part of its budget that a trial has to compute, and whether its checkpoint comes from another machine."""

    #: amount of budget that no checkpoint covered; None for a trial without a budget
    units: float | None
    #: True if the trial continued from the checkpoint of a run on another machine
    is_handed_over: bool = False


class _Run(NamedTuple):
    """Latest complete trial of a set of params."""

    budget: float
    compute_class: str
    host: str | None
    seconds: float
    units: float
    is_handed_over: bool


class _Pair(NamedTuple):
    """Estimate of the start-up seconds from two runs of the same params on one class."""

    startup: float
    #: relative standard deviation of the estimate, if the deviations of seconds are in proportion to the seconds
    deviation: float
    #: hand-over seconds that lower the start-up estimate by one second; 0 if the second run had no hand-over
    per_handover: float


class BudgetCosts:
    """Learns start-up and hand-over seconds from promoted trials, and keeps the latest run of each origin.

    The origin of a promoted trial is the number of the first trial with the same params.
    """

    def __init__(self) -> None:
        #: by origin: its latest run
        self._runs: dict[int, _Run] = {}
        #: by group: (subspace, class), ("", class), or ("", "") for all
        self._pairs: defaultdict[tuple[str, str], deque[_Pair]] = defaultdict(lambda: deque(maxlen=LATEST))
        self._startups: dict[tuple[str, str], float] = {}
        #: seconds for fetching a checkpoint from another machine
        self.handover = 0.0
        #: True if the latest promoted trial has continued from a checkpoint
        self.continues = False
        #: False if the latest promoted trial that ran on a machine with its checkpoint did not continue from the
        #: checkpoint
        self._finds = True
        #: live classes by name
        self._classes: Mapping[str, ComputeClass] = {}

    def __bool__(self) -> bool:
        """Return whether any start-up or hand-over is above 0."""
        return any(self._startups.values()) or self.handover > 0

    def see(self, classes: Iterable[ComputeClass]) -> None:
        """Update the live classes, whose machines and shared storages decide where a checkpoint can be read."""
        self._classes = {each.name: each for each in classes}

    def behind(self, origin: int | None) -> float:
        """Return the budget of the latest complete trial of an origin, or 0 if there is no such trial."""
        run = None if origin is None else self._runs.get(origin)
        return 0.0 if run is None else run.budget

    def host(self, origin: int) -> str | None:
        """Return the machine of an origin's latest complete trial, which has its checkpoint; None if it is unknown."""
        run = self._runs.get(origin)
        return None if run is None else run.host

    def work(self, trial: Trial) -> Work:
        """Return the work of a finished trial. Call this before `tell`."""
        if trial.budget is None or trial.origin is None or not trial.outcome.continued:
            return Work(trial.budget)
        return Work(self._rest(trial), self.host(trial.origin) not in (None, trial.host))

    def ahead(self, trial: Trial | Attempt, compute_class: str) -> Work:
        """Return the work of a promoted trial on a class: on the class's worst machine, or on the machine on which it
        must run.

        An executor that does not report whether trials have continued has no checkpoints.
        """
        origin = int(trial.origin or 0)
        home, known = self.host(origin), self._classes.get(compute_class)
        hosts: Collection[str | None] = () if known is None else known.hosts
        if isinstance(trial, Attempt) and trial.only_on in hosts:
            hosts = [trial.only_on]
        if known is None or not self._finds or not all(self._has_checkpoint(origin, host) for host in hosts):
            return Work(trial.budget)
        return Work(self._rest(trial), {*hosts} != {home})

    def _rest(self, trial: Trial | Attempt) -> float:
        budget = trial.budget or 1.0
        return max(budget - self.behind(trial.origin), 0.0) or budget

    def _has_checkpoint(self, origin: int, host: str | None) -> bool:
        """Return whether a machine has an origin's checkpoint, on its own disk or on shared storage."""
        home = self.host(origin)
        if home is None or host is None:
            return False
        return host == home or self._storage(host) == self._storage(home) != ""

    def _storage(self, host: str) -> str:
        """Return the storage of a machine's checkpoints; "" if no other machine is known to have it."""
        return next((each.storages[host] for each in self._classes.values() if host in each.storages), "")

    def startup(self, subspace: str, compute_class: str) -> float:
        """Return the start-up seconds of a subspace's trials on a class, or 0 if they are not known.

        Of these groups, the first one with an estimate is used: the subspace on the class, all trials of the class, all
        trials.
        """
        for key in ((subspace, compute_class), ("", compute_class), ("", "")):
            if key in self._startups:
                return self._startups[key]
        return 0.0

    def tell(self, trial: Trial, work: Work) -> bool:
        """Learn from a complete trial with a budget. Return whether an estimate has changed by more than NEWS."""
        assert trial.budget is not None
        seconds = trial.outcome.seconds
        assert seconds is not None
        assert work.units is not None
        origin = trial.folder
        if trial.origin is not None and not trial.is_repeat:
            self.continues = trial.outcome.continued is True
            if self._has_checkpoint(trial.origin, trial.host):
                self._finds = self.continues
        run = _Run(trial.budget, str(trial.compute_class), trial.host, seconds, work.units, work.is_handed_over)
        before = self._runs.get(origin)
        if before is not None and before.budget >= run.budget:
            return False
        self._runs[origin] = run
        pair = None if before is None else _pair(before, run)
        if pair is None:
            return False
        names = ((trial.subspace, run.compute_class), ("", run.compute_class), ("", ""))
        for key in names:
            self._pairs[key].append(pair)
        news = [self._update(key) for key in names]
        return any(news)

    def _update(self, key: tuple[str, str]) -> bool:
        pairs = self._pairs[key]
        if len(pairs) < ENOUGH:
            return False
        home = [pair for pair in pairs if not pair.per_handover]
        used = home if len(home) >= ENOUGH else pairs
        believed = _lower_bound([pair.startup for pair in used], [pair.deviation for pair in used])
        before = self._startups.get(key, self.startup(key[0], key[1]))
        has_changed = abs(believed - before) > NEWS * max(believed, before)
        if has_changed:
            self._startups[key] = believed
        if key == ("", ""):
            away = [pair for pair in pairs if pair.per_handover]
            if len(home) >= ENOUGH and len(away) >= ENOUGH:
                found = [(believed - p.startup) * p.per_handover for p in away]
                handover = _lower_bound(found, [p.deviation * p.per_handover for p in away])
                if abs(handover - self.handover) > NEWS * max(handover, self.handover):
                    self.handover, has_changed = handover, True
        return has_changed


def _pair(low: _Run, high: _Run) -> _Pair | None:
    """Return the start-up estimate from two runs of the same params, or None if they do not determine it."""
    more = high.units - low.units
    if low.compute_class != high.compute_class or low.is_handed_over or more <= 0:
        return None
    startup = (low.seconds * high.units - high.seconds * low.units) / more
    deviation = math.hypot(low.seconds * high.units, high.seconds * low.units) / more
    return _Pair(startup, max(deviation, 1e-9), more / low.units if high.is_handed_over else 0.0)


def _lower_bound(values: Sequence[float], deviations: Sequence[float]) -> float:
    """Return the weighted median of estimates minus its standard error, or 0 if that is negative.

    `deviations` are proportional to the standard deviations of the estimates. The factor is estimated from the spread
    of `values`.
    """
    found, spread = np.asarray(values), np.asarray(deviations)
    order = np.argsort(found)
    reached = np.cumsum((1.0 / spread)[order])
    middle = float(found[order][np.searchsorted(reached, reached[-1] / 2)])
    factor = OF_DEVIATION * float(np.median(np.abs(found - middle) / spread))
    error = OF_MEDIAN * factor / math.sqrt(float((1.0 / spread**2).sum()))
    return max(0.0, middle - error)


class OwnRuns:
    """Learns how much of a trial's departure from the expected seconds recurs in its next run.

    A departure is the log seconds of a run minus the expected log seconds. The effect of the params is learned from
    many trials. Effects that the params do not explain belong to a single trial. The first run already shows
    them. A departure is a + e, where a is the same in all runs of a trial, and e is new in each run. After n runs with
    mean departure m, the expected departure of the next run is n r m / (1 + (n - 1) r). Here r is the variance of a
    divided by that of a + e, which is the correlation of two runs of a trial (best linear prediction: Searle, Casella,
    McCulloch, "Variance Components", 1992, chapter 7). All departures are computed from the current expectation,
    because earlier expectations were based on few trials.
    """

    def __init__(self) -> None:
        #: by origin: for each run, the column of its class and its log seconds per unit of work
        self._runs: dict[int, list[tuple[int, float]]] = {}
        #: for the latest repeated runs: departure of the run, and mean departure of the trial's earlier runs
        self._pairs: deque[tuple[float, float]] = deque(maxlen=LATEST_DEPARTURES)
        self._correlation = 0.0

    def __contains__(self, origin: int) -> bool:
        """Return whether `tell` was called for a run of an origin."""
        return origin in self._runs

    def tell(self, origin: int, column: int, work: float, expected: Array | None = None) -> None:
        """Learn the log seconds per unit of work of a run on a class.

        `expected` are the log seconds predicted without the trial's own runs, by column. `expected` must be given for a
        trial that has earlier runs.
        """
        if expected is not None and origin in self._runs:
            self._pairs.append((work - float(expected[column]), self._mean(origin, expected)))
            self._correlation = self._correlated()
        self._runs.setdefault(origin, []).append((column, work))

    def departure(self, origin: int, expected: Array) -> float:
        """Return the expected departure of an origin's next run, or 0 if it has no earlier runs."""
        if origin not in self._runs:
            return 0.0
        count, correlation = len(self._runs[origin]), self._correlation
        return count * correlation * self._mean(origin, expected) / (1.0 + (count - 1) * correlation)

    def _mean(self, origin: int, expected: Array) -> float:
        runs = self._runs[origin]
        return sum(work - float(expected[column]) for column, work in runs) / len(runs)

    def _correlated(self) -> float:
        if len(self._pairs) < ENOUGH_DEPARTURES:
            return 0.0
        product = sum(one * other for one, other in self._pairs)
        squares = (sum(one * one for one, _ in self._pairs) * sum(other * other for _, other in self._pairs)) ** 0.5
        return min(max(0.0, product / squares), 1.0) if squares else 0.0
