"""Speculative copies: where a slot idles, a late trial is started once more elsewhere, and the first result counts.

The copy has the params, the seed and the budget of its trial, so what is learned does not depend on which of the two
ends first: unlike going on without the late ones, this favours no kind of trial. Source: Dean and Ghemawat,
"MapReduce", OSDI 2004, section 3.6 (backup tasks).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from shadho_celery.core.trial import Trial
from shadho_celery.predictors.cost_model import CostModel

#: a trial is late once it has run so many times as long as expected, and so many seconds at least
LATE_FACTOR = 1.5
LEAST_SECONDS = 1.0

#: trials of a class that must have ended before any of its trials is late
MIN_TIMED = 5

#: share of a round that may be copied at a time; one trial in any case
MAX_SHARE = 0.1

#: seconds between two looks
LOOK_SECONDS = 1.0

#: seconds from a trial's copy to the next one, where that has come to nothing; twice as many with each one more
AGAIN_SECONDS = 2.0

#: seconds by which a timer may go off too early: times are floats
EARLY_SECONDS = 1e-3


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Slots of a class that have nothing to do."""

    compute_class: str
    #: how many the study may use
    slots: int
    #: machine -> idle slots there
    hosts: Mapping[str, int]
    #: True for a trial that is not too large for the class
    fits: Callable[[Trial], bool] = lambda trial: True


def most_copies(trials: int) -> int:
    """Return how many copies may run at a time beside a round of so many trials."""
    return max(1, int(MAX_SHARE * trials))


class Speculation:
    """Decides which trials to copy, and where to."""

    def __init__(self, cost_model: CostModel) -> None:
        self._model = cost_model
        self._looked_at = -math.inf
        #: by trial, the moment before which it is not to be copied again, and seconds from then to the one after it
        self._paused: dict[int, tuple[float, float]] = {}
        #: the moment at which to ask again although nothing has happened
        self.due = math.inf

    def ask(
        self, running: Iterable[Trial], idle: Callable[[], Sequence[Idle]], most: int, now: float
    ) -> list[tuple[Trial, str]]:
        """Return up to `most` of the `running` trials that are late at the moment `now`, each with a class for its copy.

        `running` have one attempt, which has started. No trial goes to the machine that it runs on, nor where it is
        expected to take longer than it has run already, nor again soon after a copy of it that came to nothing. `idle`
        is called where some are late.
        """
        if now + EARLY_SECONDS < self._looked_at + LOOK_SECONDS:
            self.due = self._looked_at + LOOK_SECONDS
            return []
        self._looked_at, self.due = now, math.inf
        now += EARLY_SECONDS
        found: list[tuple[Trial, str]] = []
        moments = sorted(self._moments(running), key=lambda pair: (pair[0], pair[1].number))
        late = [trial for moment, trial in moments if moment <= now]
        self.due = min((moment for moment, _ in moments[len(late) :]), default=math.inf)
        places = _IdleSlots(idle() if late and most > 0 else ())
        seconds = {name: self._expected(late, name) for name in places.classes}
        for trial in late if seconds else ():
            best = min(((seconds[name][trial.number], name) for name in places.open_to(trial)), default=(math.inf, ""))
            moment = (trial.started_at or 0.0) + best[0]
            if moment > now:
                self.due = min(self.due, moment)
            else:
                places.take(trial, best[1])
                self._pause(trial, now)
                found.append((trial, best[1]))
            if len(found) == most:
                break
        return found

    def _moments(self, running: Iterable[Trial]) -> Iterable[tuple[float, Trial]]:
        """Yield the moment from which each trial is late, as far as that can be told."""
        by_class: dict[str, list[Trial]] = defaultdict(list)
        for trial in running:
            by_class[str(trial.compute_class)].append(trial)
        for compute_class, trials in by_class.items():
            if self._model.timed(compute_class) >= MIN_TIMED:
                seconds = self._expected(trials, compute_class)
                for trial in trials:
                    late = (trial.started_at or 0.0) + max(LEAST_SECONDS, LATE_FACTOR * seconds[trial.number])
                    yield max(late, self._paused.get(trial.number, (-math.inf, 0.0))[0]), trial

    def _pause(self, trial: Trial, now: float) -> None:
        """Back off: a trial that is copied is not copied again for a while, and each time for longer."""
        _, seconds = self._paused.get(trial.number, (now, AGAIN_SECONDS))
        self._paused[trial.number] = now + seconds, 2 * seconds

    def _expected(self, trials: Sequence[Trial], compute_class: str) -> dict[int, float]:
        """Return the median of the seconds predicted for each trial on a class, by number."""

        def alike(trial: Trial) -> tuple[str, float]:
            return trial.subspace, trial.budget or 0.0

        found: dict[int, float] = {}
        for (subspace, budget), group in groupby(sorted(trials, key=alike), alike):
            # Together they take hardly longer than one.
            params = {trial.number: trial.params for trial in group}
            medians = self._model.seconds(
                subspace, compute_class, list(params.values()), quantiles=(0.5,), budget=budget or None
            )
            found.update(zip(params, medians[:, 0].tolist(), strict=True))
        return found


class _IdleSlots:
    """Idle slots that are not given a copy yet."""

    def __init__(self, idle: Sequence[Idle]) -> None:
        self._idle = {each.compute_class: each for each in idle}
        self._slots = {each.compute_class: each.slots for each in idle}
        self._hosts = {each.compute_class: dict(each.hosts) for each in idle}

    @property
    def classes(self) -> list[str]:
        return list(self._idle)

    def open_to(self, trial: Trial) -> list[str]:
        """Return the classes that have an idle slot on another machine than the trial's."""
        return [
            name
            for name, each in self._idle.items()
            if self._slots[name] > 0 and next(self._elsewhere(trial, name), None) is not None and each.fits(trial)
        ]

    def take(self, trial: Trial, compute_class: str) -> None:
        """Take one slot away, on the other machine that has most of them: which one it will be the queue decides."""
        hosts = self._hosts[compute_class]
        host = max(self._elsewhere(trial, compute_class), key=lambda each: hosts[each])
        hosts[host] -= 1
        self._slots[compute_class] -= 1

    def _elsewhere(self, trial: Trial, compute_class: str) -> Iterator[str]:
        return (host for host, slots in self._hosts[compute_class].items() if slots > 0 and host != trial.host)
