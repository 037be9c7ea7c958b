"""Speculative copies of late trials, the record of placement decisions, and the pauses of declined trials.

A late trial is started again in an idle slot of another machine (`Speculation`), and the first result counts.

The copy has the params, the seed and the budget of its trial, so the result does not depend on which of the two ends
first. If late trials were dropped instead, the results would favour fast params. Source: Dean and Ghemawat,
"MapReduce", OSDI 2004, section 3.6 (backup tasks).

`record_placements` records why attempts went to their classes: what each live class would have cost at that moment. A
worker with limited time may decline a trial that it cannot end. The trial is then not sent to the worker's class for a
pause (`Declined`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shadho_celery.core.records import Placed
from shadho_celery.core.trial import Attempt, Trial
from shadho_celery.placement.model import CostModel
from shadho_celery.study.recorder import Recorder

#: a trial is late after this multiple of its expected time, and at least this many seconds
LATE_FACTOR = 1.5
LEAST_SECONDS = 1.0

#: number of trials of a class that must have ended before a trial of the class can count as late
MIN_TIMED = 5

#: fraction of a round's trials that may be copied at a time; at least one trial
MAX_SHARE = 0.1

#: seconds between two checks
LOOK_SECONDS = 1.0

#: seconds from a trial's first copy to the earliest time of its next one; doubled with each further copy
AGAIN_SECONDS = 2.0

#: tolerance of a timer in seconds, because times are floats
EARLY_SECONDS = 1e-3


@dataclass(kw_only=True)
class Idle:
    """Idle slots of a class in which copies may start."""

    compute_class: str
    #: number of idle slots that the study may use
    slots: int
    #: machine -> idle slots there
    hosts: dict[str, int]
    #: returns True for a trial that is not too large for the class
    fits: Callable[[Trial], bool] = lambda trial: True

    def is_open_to(self, trial: Trial) -> bool:
        """Return True if the trial fits and a slot is idle on a machine other than the trial's."""
        return self.slots > 0 and bool(self._elsewhere(trial)) and self.fits(trial)

    def take(self, trial: Trial) -> None:
        """Take one idle slot for a copy, on the machine with the most idle slots except the trial's own.

        The machine is a guess: the copy runs on the machine that takes it from the queue.
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
        #: by trial number: the earliest time of its next copy, and the pause in seconds after that copy
        self._paused: dict[int, tuple[float, float]] = {}
        #: the time at which `ask` should be called again even if no event arrives
        self.due = math.inf

    def ask(
        self, running: Iterable[tuple[Trial, float]], idle: Callable[[], Sequence[Idle]], most: int, now: float
    ) -> list[tuple[Trial, str]]:
        """Return up to `most` of the `running` trials that are late at the time `now`, and a class for each copy.

        `running` has trials with one attempt each, and their start times on the clock of `now`. A trial is copied only
        to a class with an idle slot on another machine, whose expected seconds are fewer than the trial has already
        run. The next copy of the same trial has to wait for a pause. `idle` is called only if a trial is late.
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
        if not places:
            return []
        for (trial, since), seconds in zip(late, self._expected(late, [*places]), strict=True):
            known = zip(seconds, places, strict=True)
            best = min((each for each in known if places[each[1]].is_open_to(trial)), default=(math.inf, ""))
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
        """Yield for each trial: the time from which it is late, the trial, and its start time.

        Classes with fewer than MIN_TIMED ended trials are left out.
        """
        known = [each for each in running if self._model.timed(str(each[0].compute_class)) >= MIN_TIMED]
        classes = [*dict.fromkeys(str(trial.compute_class) for trial, _ in known)]
        for (trial, since), seconds in zip(known, self._expected(known, classes), strict=True):
            late = since + max(LEAST_SECONDS, LATE_FACTOR * seconds[classes.index(str(trial.compute_class))])
            yield max(late, self._paused.get(trial.number, (-math.inf, 0.0))[0]), trial, since

    def _expected(self, known: Sequence[tuple[Trial, float]], classes: Sequence[str]) -> list[list[float]]:
        """Return the median of the predicted seconds of each trial on each class."""
        found: list[list[float]] = np.exp(self._model.predict([trial for trial, _ in known], classes).mean).tolist()
        return found


#: trials of a subspace are short if their typical seconds are below this
SHORT_SECONDS = 0.1


def record_placements(
    placed: Sequence[tuple[Attempt, Mapping[str, float]]],
    classes: Sequence[str],
    model: CostModel,
    recorder: Recorder,
) -> list[Attempt]:
    """Record what placement knew about the live `classes` when it placed these attempts.

    `placed` has the attempts in the order of placement, each with the prices of the classes, if the policy has any.
    Return the attempts, with their predicted seconds if these are one or more. The predictions are those that placement
    compared. They are computed for all attempts together, which is faster.
    """
    found, predicted = [], _predicted([attempt for attempt, _ in placed], classes, model)
    for (attempt, prices), seconds in zip(placed, predicted, strict=True):
        known = dict(zip(classes, seconds, strict=True))
        recorder.note_placement(
            attempt, {n: Placed(each, recorder.backlog(n), prices.get(n)) for n, each in known.items()}
        )
        # The class may have no worker any more, if the store was not available for a time.
        own = known.get(str(attempt.compute_class))
        found.append(attempt if own is None or own < 1.0 else attempt.evolve(expected=own))
    return found


def _predicted(attempts: Sequence[Attempt], classes: Sequence[str], model: CostModel) -> list[Sequence[float | None]]:
    """Return the predicted seconds of each attempt on each class. They are None before the model has learned from a
    trial, and for a subspace that the study no longer has.

    With a single class there is nothing to compare. In subspaces with short trials, the effect of the params is then
    left out, because its prediction would take a noticeable part of the trial's time.
    """
    found: list[Sequence[float | None]] = [(None,) * len(classes)] * len(attempts)
    if not model.has_learned:
        return found
    known = [place for place, attempt in enumerate(attempts) if attempt.subspace in model.row_of]
    if len(classes) == 1:
        typical = model.typical_seconds(classes[0])
        for place in known:
            if attempts[place].budget is None and (seconds := typical[attempts[place].subspace]) < SHORT_SECONDS:
                found[place] = (seconds,)
        known = [place for place in known if found[place] == (None,)]
    if known:
        predicted = np.exp(model.predict([attempts[place] for place in known], classes).mean).tolist()
        for place, seconds in zip(known, predicted, strict=True):
            found[place] = seconds
    return found


#: seconds from the first time that a class declines a trial until it is sent there again; doubled each further time
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 600.0


@dataclass
class Declined:
    """Pauses of declined trials, by class.

    Without pauses, a trial that no worker of a class can end in time would be sent to the same workers again and again,
    and would keep shorter trials from being sent.
    """

    #: by number of the trial and class: the time at which the pause ends, and its seconds
    _pauses: dict[int, dict[str, tuple[float, float]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return True if there are declined trials."""
        return bool(self._pauses)

    def add(self, number: int, compute_class: str, now: float) -> None:
        """Record that a worker of a class has declined a trial."""
        known = self._pauses.setdefault(number, {})
        _, last = known.get(compute_class, (0.0, FIRST_PAUSE / 2))
        pause = min(2 * last, LONGEST_PAUSE)
        known[compute_class] = now + pause, pause

    def end(self, number: int) -> None:
        """Forget a trial, because a worker has taken it or it has ended."""
        self._pauses.pop(number, None)

    def is_paused(self, number: int, compute_class: str, now: float) -> bool:
        """Return whether a trial should not be sent to a class now."""
        until, _ = self._pauses.get(number, {}).get(compute_class, (-math.inf, 0.0))
        return now < until

    def due(self, now: float) -> float:
        """Return the time at which the next pause ends."""
        ends = [until for by_class in self._pauses.values() for until, _ in by_class.values() if until > now]
        return min(ends, default=math.inf)
