"""Pace of a run: the trials per minute, and a prediction of the time until the limit on trials."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.trial import TrialState
from shadho_celery.study.limits import Limits
from shadho_celery.study.state import StudyState

Array = NDArray[np.float64]

#: minimum seconds, and minimum number of ended trials, over which the rate is computed
PACE_SECONDS, PACE_TRIALS = 120.0, 40

#: the time left is known once this many trials of the run, or this part of them, have ended
ENOUGH_ENDED, ENOUGH_PART = 20, 0.1

#: maximum number of latest trials that show how long trials take
MOST_ENDED = 1000

#: number of times at which the probability is computed that all trials have ended
TIMES = 200


class _Sample(NamedTuple):
    at: float
    #: number of trials that have ended
    counted: int
    #: the same number plus the part of each running trial that is done
    progress: float


class Lengths(NamedTuple):
    """Distribution of the seconds of trials."""

    #: seconds in rising order, and the probability of each
    values: Array
    parts: Array

    @property
    def mean(self) -> float:
        """Mean seconds of a trial."""
        return max(float(self.values @ self.parts), 1e-9)

    def rest(self, age: float) -> float:
        """Return the mean further seconds of a trial that has run for `age` seconds.

        One that has run for longer than all others is expected to run as long again.
        """
        first = int(np.searchsorted(self.values, age, side="right"))
        parts = self.parts[first:]
        return float(self.values[first:] @ parts / parts.sum()) - age if parts.sum() > 0 else age

    def ended(self, age: float, times: Array) -> Array:
        """Return the probabilities that a trial that has run for `age` seconds ends within `times`, shape (times,)."""
        first = int(np.searchsorted(self.values, age, side="right"))
        sums = np.concatenate([[0.0], np.cumsum(self.parts[first:])])
        if not sums[-1] > 0:
            return np.asarray(times >= age, dtype=float)
        return np.asarray(sums[np.searchsorted(self.values[first:], age + times, side="right")] / sums[-1])


def lengths_of(ended: Sequence[float], running: Sequence[float]) -> Lengths:
    """Return the distribution of the seconds of trials, from those of ended ones and those of running ones so far.

    Without the running ones it would be biased, because short trials end first. It is the estimate of Kaplan and Meier:
    the probability of a running trial is shared by all longer ones (Efron, Proc. 5th Berkeley Symposium, 1967). If
    there is none, the trial is expected to run as long again.
    """
    known = sorted([*((seconds, True) for seconds in ended), *((seconds, False) for seconds in running)])
    values, parts, each = [], [], 1.0 / max(1, len(known))
    for longer, (seconds, has_ended) in zip(range(len(known) - 1, -1, -1), known, strict=True):
        if has_ended or not longer:
            values.append(seconds if has_ended else 2 * seconds)
            parts.append(each)
        else:
            each *= (longer + 1) / longer
    return Lengths(np.array(values), np.array(parts))


class Pace:
    """Measures the pace of one run, from the moment at which its first trial began."""

    def __init__(self, study: StudyState, limits: Callable[[], Limits]) -> None:
        """`limits` returns the limits of the study, which may change."""
        self._study = study
        self._limits = limits
        #: moment of the start; and the numbers of results and of counted trials of earlier runs
        self._began = study.clock.now()
        self._first, self._before = len(study.trials), study.counted
        self._ended_at = self._began
        self._samples = deque([_Sample(self._began, self._before, self._before)])

    def note(self) -> None:
        """Record how many trials have ended by now. To be called a few times per second."""
        now, counted = self._study.clock.now(), self._study.counted
        if counted == self._before and not self._study.count(TrialState.RUNNING):
            # Workers are still starting, so this time is not representative of the pace.
            self._samples = deque([_Sample(now, counted, counted)])
            return
        if counted == self._samples[-1].counted:
            return
        self._ended_at = now
        running = self._running()
        self._samples.append(_Sample(now, counted, self._done(self._known(running), running)))
        second = self._samples[1]
        while now - second.at > PACE_SECONDS and counted - second.counted >= PACE_TRIALS:
            self._samples.popleft()
            second = self._samples[1]

    @property
    def ended(self) -> int:
        """Number of trials that have ended in this run."""
        return self._study.counted - self._before

    @property
    def since_last(self) -> float:
        """Seconds since a trial ended last, or since the start."""
        return self._study.clock.now() - self._ended_at

    @property
    def a_minute(self) -> float:
        """Recent number of trials per minute; 0 before the first trial has ended."""
        oldest, seconds = self._samples[0], self._study.clock.now() - self._samples[0].at
        return 60 * (self._study.counted - oldest.counted) / seconds if seconds > 0 else 0.0

    def seconds_left(self) -> float | None:
        """Return the expected seconds until the limit on trials, or None as long as they are not known.

        Trials are expected to take as long as those of this run so far. If the sampler goes on to prefer longer trials,
        the real time is longer. That some slots will end later than others counts once all trials have begun.
        """
        left, running = self._limits().trials_left(self._study.counted), self._running()
        if math.isinf(left):
            return math.inf
        known = self._known(running)
        # Nothing runs while a server does not answer, or while no worker is there.
        if not known or left <= 0 or (not running and self.since_last > known[None].mean):
            return None
        last = _last_end(known, running)
        if left <= len(running):
            return last
        done, oldest = self._done(known, running), self._samples[0]
        rate = (done - oldest.progress) / max(self._study.clock.now() - oldest.at, 1e-9)
        if done - oldest.progress < 1.0:
            # Most of the trials that have begun are long ones.
            rate = sum(1 / known[name].mean for name, _ in running) or 1 / known[None].mean
        return max(last, (left - (done - self._study.counted)) / rate)

    def _known(self, running: Sequence[tuple[str, float]]) -> Mapping[str | None, Lengths]:
        """Return how long trials take on each class of running ones, and on all together (None).

        The result is empty as long as too few trials have ended.
        """
        trials, total = self._study.trials, self.ended + self._limits().trials_left(self._study.counted)
        ended = trials.seconds_since(max(self._first, len(trials) - MOST_ENDED))
        if not ended or self.ended < min(ENOUGH_ENDED, ENOUGH_PART * total):
            return {}
        so_far: defaultdict[str, list[float]] = defaultdict(list)
        for name, seconds in running:
            so_far[name].append(seconds)
        whole = lengths_of([*chain(*ended.values())], [*chain(*so_far.values())])
        known: dict[str | None, Lengths] = {None: whole}
        for name, seconds_so_far in so_far.items():
            known[name] = lengths_of(ended[name], seconds_so_far) if name in ended else whole
        return known

    def _done(self, known: Mapping[str | None, Lengths], running: Sequence[tuple[str, float]]) -> float:
        """Return the number of ended trials plus the part of each running trial that is done.

        It is below 0 for a trial whose rest is expected to be longer than a mean trial. So all slots together do on
        average one mean trial in its mean seconds (Wald's equation).
        """
        parts = (1 - known[name].rest(seconds) / known[name].mean for name, seconds in running if known)
        return self._study.counted + sum(parts)

    def _running(self) -> list[tuple[str, float]]:
        """Return the class of each running trial, and the seconds for which it has run."""
        study, now = self._study, self._study.clock.now()
        return [
            (str(trial.compute_class), now - study.running_since(trial))
            for trial in study.sent
            if trial.state is TrialState.RUNNING
        ]


def _last_end(known: Mapping[str | None, Lengths], running: Sequence[tuple[str, float]]) -> float:
    """Return the expected seconds until all running trials have ended."""
    longest = max((max(float(known[name].values[-1]) - age, age) for name, age in running), default=0.0)
    times = longest * (np.arange(TIMES) + 0.5) / TIMES
    all_ended = np.prod([known[name].ended(age, times) for name, age in running], axis=0, initial=1.0)
    return longest * float(1 - all_ended.mean())
