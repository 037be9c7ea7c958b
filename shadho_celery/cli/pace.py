"""Pace of a run: the trials per minute, and a prediction of the time until the limit on trials."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from shadho_celery.core.trial import TrialState
from shadho_celery.study.limits import Limits
from shadho_celery.study.state import StudyState

#: minimum seconds, and minimum number of ended trials, over which the rate is computed
PACE_SECONDS, PACE_TRIALS = 120.0, 40

#: the time left is known once this many trials of the run, or this part of them, have ended
ENOUGH_ENDED, ENOUGH_PART = 20, 0.1

#: seconds without a running trial, and without the end of one, after which the time left is not known
STILL_SECONDS = 5.0


class Pace:
    """Measures the pace of one run, from the moment at which its first trial began."""

    def __init__(self, study: StudyState, limits: Callable[[], Limits]) -> None:
        """`limits` returns the limits of the study, which may change."""
        self._study = study
        self._limits = limits
        #: number of counted trials of earlier runs
        self._before = study.counted
        self._ended_at = study.clock.now()
        #: moments, and how many trials had ended by then
        self._samples = deque([(self._ended_at, self._before)])

    def note(self) -> None:
        """Record how many trials have ended by now. To be called a few times per second."""
        now, counted = self._study.clock.now(), self._study.counted
        if counted == self._before and not self._study.count(TrialState.RUNNING):
            # Workers are still starting, so this time is not representative of the pace.
            self._samples = deque([(now, counted)])
        elif counted != self._samples[-1][1]:
            self._ended_at = now
            self._samples.append((now, counted))
            while now - self._samples[1][0] > PACE_SECONDS and counted - self._samples[1][1] >= PACE_TRIALS:
                self._samples.popleft()

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
        since, before = self._samples[0]
        seconds = self._study.clock.now() - since
        return 60 * (self._study.counted - before) / seconds if seconds > 0 else 0.0

    def seconds_left(self) -> float | None:
        """Return the expected seconds until the limit on trials, or None as long as they are not known.

        They are those of the recent rate. That some slots will end later than others is not counted.
        """
        left = self._limits().trials_left(self._study.counted)
        if math.isinf(left):
            return math.inf
        is_known = self.ended >= min(ENOUGH_ENDED, ENOUGH_PART * (self.ended + left)) and self.a_minute > 0
        # Nothing runs while a server does not answer, or while no worker is there.
        is_still = self.since_last > STILL_SECONDS and not self._study.count(TrialState.RUNNING)
        return 60 * left / self.a_minute if left > 0 and is_known and not is_still else None
