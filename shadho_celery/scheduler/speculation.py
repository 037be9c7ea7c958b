"""Speculative copies: a late trial is started again in an idle slot elsewhere, and the first result counts.

The copy has the params, the seed and the budget of its trial, so the result does not depend on which of the two ends
first. Unlike continuing without the late trials, this favours no kind of trial. Source: Dean and Ghemawat, "MapReduce",
OSDI 2004, section 3.6 (backup tasks).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from shadho_celery.core.trial import Trial
from shadho_celery.predictors.cost_model import CostModel

#: a trial is late after this multiple of its expected time, and at least this many seconds
LATE_FACTOR = 1.5
LEAST_SECONDS = 1.0

#: number of trials of a class that must have ended before any of its trials is late
MIN_TIMED = 5

#: part of a round that may be copied at a time; at least one trial
MAX_SHARE = 0.1

#: seconds between two checks
LOOK_SECONDS = 1.0

#: seconds from a trial's lost copy to the next one; doubled with each further copy
AGAIN_SECONDS = 2.0

#: tolerance of a timer in seconds, because times are floats
EARLY_SECONDS = 1e-3


@dataclass(kw_only=True)
class Idle:
    """Idle slots of a class that have no copy yet."""

    compute_class: str
    #: number of them for the study
    slots: int
    #: machine -> idle slots there
    hosts: dict[str, int]
    #: returns True for a trial that is not too large for the class
    fits: Callable[[Trial], bool] = lambda trial: True

    def is_open_to(self, trial: Trial) -> bool:
        """Return True if a slot is idle on another machine than the trial's, and the trial fits."""
        return self.slots > 0 and bool(self._elsewhere(trial)) and self.fits(trial)

    def take(self, trial: Trial) -> None:
        """Take one slot on the other machine with most of them. This is an estimate: the queue decides on the
        machine.
        """
        host = max(self._elsewhere(trial), key=lambda each: self.hosts[each])
        self.hosts[host] -= 1
        self.slots -= 1

    def _elsewhere(self, trial: Trial) -> list[str]:
        return [host for host, slots in self.hosts.items() if slots > 0 and host != trial.host]


def most_copies(trials: int) -> int:
    """Return the maximum number of copies at a time for a round of this many trials."""
    return max(1, int(MAX_SHARE * trials))


class Speculation:
    """Chooses the trials to copy, and a class for each copy."""

    def __init__(self, cost_model: CostModel) -> None:
        self._model = cost_model
        self._looked_at = -math.inf
        #: by trial: the earliest time of its next copy, and the seconds from then to the one after it
        self._paused: dict[int, tuple[float, float]] = {}
        #: the time at which to ask again even without an event
        self.due = math.inf

    def ask(
        self, running: Iterable[tuple[Trial, float]], idle: Callable[[], Sequence[Idle]], most: int, now: float
    ) -> list[tuple[Trial, str]]:
        """Return up to `most` of the `running` trials that are late at the time `now`, and a class for each copy.

        `running` have one attempt; beside each is its start time on the clock of `now`. A copy goes to another machine
        than its trial's, to a class whose expected time is below the trial's current run time, and not soon after a
        lost copy of the same trial. `idle` is called only if some trials are late.
        """
        if now + EARLY_SECONDS < self._looked_at + LOOK_SECONDS:
            self.due = self._looked_at + LOOK_SECONDS
            return []
        self._looked_at, self.due = now, math.inf
        now += EARLY_SECONDS
        found: list[tuple[Trial, str]] = []
        moments = sorted(self._moments(running), key=lambda known: (known[0], known[1].number))
        late = [(trial, since) for moment, trial, since in moments if moment <= now]
        self.due = min((moment for moment, *_ in moments[len(late) :]), default=math.inf)
        places = {each.compute_class: each for each in (idle() if late and most > 0 else ())}
        seconds = {name: self._expected([trial for trial, _ in late], name) for name in places}
        for trial, since in late if seconds else ():
            names = [name for name, place in places.items() if place.is_open_to(trial)]
            best = min(((seconds[name][trial.number], name) for name in names), default=(math.inf, ""))
            moment = since + best[0]
            if moment > now:
                self.due = min(self.due, moment)
            else:
                places[best[1]].take(trial)
                # Back off: the pause before the next copy doubles each time.
                _, pause = self._paused.get(trial.number, (now, AGAIN_SECONDS))
                self._paused[trial.number] = now + pause, 2 * pause
                found.append((trial, best[1]))
            if len(found) == most:
                break
        return found

    def _moments(self, running: Iterable[tuple[Trial, float]]) -> Iterable[tuple[float, Trial, float]]:
        """Yield the time from which each trial is late, before the trial, if the times of its class are known."""
        by_class: dict[str, list[tuple[Trial, float]]] = defaultdict(list)
        for trial, since in running:
            by_class[str(trial.compute_class)].append((trial, since))
        for compute_class, known in by_class.items():
            if self._model.timed(compute_class) >= MIN_TIMED:
                seconds = self._expected([trial for trial, _ in known], compute_class)
                for trial, since in known:
                    late = since + max(LEAST_SECONDS, LATE_FACTOR * seconds[trial.number])
                    yield max(late, self._paused.get(trial.number, (-math.inf, 0.0))[0]), trial, since

    def _expected(self, trials: Sequence[Trial], compute_class: str) -> dict[int, float]:
        """Return the median of the predicted seconds of each trial on a class, by number."""

        def alike(trial: Trial) -> tuple[str, float]:
            return trial.subspace, trial.budget or 0.0

        found: dict[int, float] = {}
        for (subspace, budget), group in groupby(sorted(trials, key=alike), alike):
            # Predicting many takes hardly longer than predicting one.
            params = {trial.number: trial.params for trial in group}
            medians = self._model.seconds(
                subspace, compute_class, list(params.values()), quantiles=(0.5,), budget=budget or None
            )
            found.update(zip(params, medians[:, 0].tolist(), strict=True))
        return found
