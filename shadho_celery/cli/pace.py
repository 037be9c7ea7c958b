"""Pace of a run: the trials per minute, and a prediction of the time until the limit on trials."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from shadho_celery.core.trial import TrialState
from shadho_celery.study.limits import Limits
from shadho_celery.study.state import StudyState

#: minimum seconds, and minimum number of ended trials, over which the rate is computed
PACE_SECONDS, PACE_TRIALS = 120.0, 20

#: minimum number of ended trials for a prediction of the time left, and maximum number of latest trials that it uses
LEAST_ENDED, MOST_ENDED = 20, 1000

#: number of standard deviations around the mean within which 90 % of a normal distribution lie
DEVIATIONS = 1.645

#: maximum relative error of the time left for which it is shown; it is then right within a factor of two
MOST_WRONG = 0.4

#: a running trial is late if it has run for this many times the expected seconds; and the maximum number of late
#: trials, per ended trial, with which the time left is shown
LATE, MOST_LATE = 1.5, 0.05


class _Sample(NamedTuple):
    at: float
    #: number of trials that have ended
    counted: int
    #: the same number plus the expected fraction of each running trial
    progress: float


class Durations(NamedTuple):
    """Expected seconds of trials by class, and their variance."""

    means: dict[str, float]
    #: mean over all classes
    mean: float
    #: variance within a class, divided by the square of its mean
    spread: float

    def of(self, compute_class: str | None) -> float:
        """Return the expected seconds of a trial on a class."""
        return self.means.get(str(compute_class), self.mean)


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
        self._samples.append(_Sample(now, counted, self._progress(self._durations())))
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
        """Return the seconds until the limit on trials, or None if they are not known within a factor of two.

        They are the remaining work divided by the recent rate of work. A running trial counts as the fraction of its
        class's mean seconds for which it has run. The error is the standard error of the mean seconds of the trials by
        which the rate was measured, and of those to come, and the deviation of the last trial's end. Trials that run
        longer than the mean are samples too, because otherwise quick trials would bias the mean. No time is known while
        several of them run much longer, or one of the last ones does.
        """
        left = self._limits().trials_left(self._study.counted)
        if math.isinf(left):
            return math.inf
        found = self._durations()
        if found is None or left <= 0:
            return None
        running = self._running()
        late = sum(seconds > LATE * found.of(name) for name, seconds in running)
        is_late = late > (0 if len(running) >= left else MOST_LATE * self.ended)
        now, oldest, progress = self._study.clock.now(), self._samples[0], self._progress(found)
        # Nothing runs while a server does not answer, or while no worker is there.
        is_idle = not running and self.since_last > found.mean
        if is_late or is_idle or now <= oldest.at or progress <= oldest.progress:
            return None
        rate = (progress - oldest.progress) / (now - oldest.at)
        longest = max((found.of(name) - seconds for name, seconds in running), default=0.0)
        seconds_left = max((left - (progress - self._study.counted)) / rate, longest)
        measured = max(1, self._study.counted - oldest.counted)
        last = max(found.means.values()) / seconds_left if seconds_left > 0 else 0.0
        error = math.sqrt(found.spread * (1 / measured + 1 / left + last**2))
        return seconds_left if DEVIATIONS * error <= MOST_WRONG else None

    def _durations(self) -> Durations | None:
        """Return the expected seconds of trials, or None as long as too few have ended."""
        trials = self._study.trials
        ended = trials.seconds_since(max(self._first, len(trials) - MOST_ENDED))
        if sum(map(len, ended.values())) < LEAST_ENDED:
            return None
        mean = fmean(seconds for each in ended.values() for seconds in each)
        for name, seconds in self._running():
            if seconds > (fmean(ended[name]) if name in ended else mean):
                # A running trial is expected to run as long again as it has run so far.
                ended.setdefault(name, []).append(2 * seconds)
        means = {name: fmean(each) for name, each in ended.items()}
        squares = [(seconds / means[name] - 1) ** 2 for name, each in ended.items() for seconds in each if means[name]]
        freedom = sum(map(len, ended.values())) - len(ended)
        return Durations(means, mean, sum(squares) / freedom) if freedom else None

    def _progress(self, found: Durations | None) -> float:
        """Return the number of ended trials plus the expected fractions of the running trials."""
        parts = 0.0
        if found is not None:
            parts = sum(min(1.0, seconds / max(found.of(name), 1e-9)) for name, seconds in self._running())
        return self._study.counted + parts

    def _running(self) -> list[tuple[str, float]]:
        """Return the class of each running trial, and the seconds for which it has run."""
        study, now = self._study, self._study.clock.now()
        return [
            (str(trial.compute_class), now - study.running_since(trial))
            for trial in study.sent
            if trial.state is TrialState.RUNNING
        ]
