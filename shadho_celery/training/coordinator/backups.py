"""Choice of the number of backup replicas by a renewal simulation on recorded response times.

A replica that missed a step is busy until its stale gradient is finished or cancelled. Only then does it start on the
current parameters. Order statistics of independent times neglect this and predict too great a gain. The simulation
still draws times independently: a replica that is slow for minutes is treated like a replica that is sometimes slow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shadho_celery.training.strategies import check_replicas

Array = NDArray[np.float64]
#: distribution of response times: (generator, runs, n) -> seconds of one gradient of n replicas, shape (runs, n)
Law = Callable[[np.random.Generator, int, int], Array]

#: number of response times kept for each replica
RING_SIZE = 500
#: number of parallel runs of the simulation, and steps of each; the first quarter is discarded because all replicas
#: start idle
RUNS, STEPS = 32, 96
#: relative excess over the shortest step time that is accepted to save backups
TOLERANCE = 0.05
#: steps from one choice of b to the next
TUNE_EVERY = 100
#: the report predicts step times for up to this many backups, or more if the gang has more
PREDICT_UP_TO = 4
#: minimum number of response times of a replica, without which its times are not used
MIN_TIMES = 5


class Times:
    """Last response times of each replica: seconds from sending the parameters to the arrival of the gradient.

    The times of cancelled responses are censored. The probability of a censored time is divided equally among the
    longer times of the same replica (Efron's form of the Kaplan-Meier estimate). If the longest time is censored, it
    counts as twice its seconds.
    """

    def __init__(self) -> None:
        self._rings: dict[int, deque[tuple[float, bool]]] = {}

    def record(self, replica: int, seconds: float, *, finished: bool = True) -> None:
        """Record one response. `finished` is False if it was cancelled after this many seconds."""
        if math.isfinite(seconds) and seconds >= 0:
            self._rings.setdefault(replica, deque(maxlen=RING_SIZE)).append((seconds, finished))

    def forget(self, replica: int) -> None:
        """Remove the times of a replica that is gone."""
        self._rings.pop(replica, None)

    def law(self) -> Law | None:
        """Return the distribution of the times recorded so far, or None before one replica has enough.

        Column k is replica k. Further columns draw from the times of all replicas.
        """
        known = [ring for _, ring in sorted(self._rings.items()) if len(ring) >= MIN_TIMES]
        if not known:
            return None
        tables = [_table(list(ring)) for ring in known]
        pooled = _table([each for ring in known for each in ring])

        def draw(generator: np.random.Generator, runs: int, n: int) -> Array:
            columns = [(tables[k] if k < len(tables) else pooled).draw(generator, runs) for k in range(n)]
            return np.stack(columns, axis=1)

        return draw


class Assignments:
    """Records on which step each place works. When the work ends, its time is recorded in `times`."""

    def __init__(self, times: Times, now: Callable[[], float]) -> None:
        self._times, self._now = times, now
        #: step on which a place works, and time at which it was assigned, by place
        self._current: dict[int, tuple[int, float]] = {}
        #: newest step that was sent to a place, by place
        self._sent: dict[int, int] = {}
        #: places whose vector was refused, and that wait for the next step
        self._idle: set[int] = set()

    @property
    def busy(self) -> list[int]:
        """Places at work, on the current step or on an older one."""
        return list(self._current)

    @property
    def idle(self) -> frozenset[int]:
        """Places that have no work before the next step, because their vector was refused."""
        return frozenset(self._idle)

    def clear(self, place: int) -> None:
        """Remove the entries of a place, because its replica has left or was replaced."""
        self._idle.discard(place)
        self._current.pop(place, None)
        self._sent.pop(place, None)

    def assign(self, place: int, step: int) -> None:
        """Record that a step was sent to a place. A place that still works on an older step begins this one when
        `resume` is called.
        """
        self._idle.discard(place)
        self._sent[place] = step
        self._current.setdefault(place, (step, self._now()))

    def complete(self, place: int, step: int, at: float) -> None:
        """Record that the vector of an assigned step arrived at the time `at`."""
        current = self._current.get(place)
        if current is not None and current[0] == step:
            del self._current[place]
            self._times.record(place, at - current[1])

    def resume(self, place: int, step: int) -> bool:
        """Record that a place whose vector was late works on `step` now. Return False if `step` was not sent to it."""
        if self._sent.get(place, -1) < step:
            return False
        self._current.setdefault(place, (step, self._now()))
        return True

    def set_idle(self, place: int) -> None:
        """Record that the vector from a place was refused. The place gets no work until the next step."""
        self._idle.add(place)

    def cancel_all(self) -> list[int]:
        """Cancel the work of all places, because the step has ended. Record their times, and return the places."""
        places, now = self.busy, self._now()
        for place in places:
            self._times.record(place, now - self._current.pop(place)[1], finished=False)
        return places


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Response times in ascending order."""

    #: seconds, shape (n,); of equal times, finished responses come before cancelled ones
    seconds: Array
    #: False for the times of cancelled responses, shape (n,)
    finished: NDArray[np.bool_]

    def draw(self, generator: np.random.Generator, runs: int) -> Array:
        last = len(self.seconds) - 1
        at = generator.integers(0, last + 1, runs)
        while (moving := ~self.finished[at] & (at < last)).any():
            # Replace a censored time by one of the longer times, each with the same probability.
            at[moving] += 1 + (generator.random(int(moving.sum())) * (last - at[moving])).astype(int)
        return np.where(self.finished[at], 1.0, 2.0) * self.seconds[at]


def _table(times: list[tuple[float, bool]]) -> _Table:
    times = sorted(times, key=lambda each: (each[0], not each[1]))
    return _Table(seconds=np.array([s for s, _ in times]), finished=np.array([f for _, f in times]))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted step time for one number of backups."""

    #: number of backup replicas b
    backups: int
    #: mean seconds per step
    step_seconds: float


def simulate(
    law: Law,
    replicas: int,
    backups: int,
    *,
    cancel_seconds: float | None = None,
    generator: np.random.Generator,
    runs: int = RUNS,
    steps: int = STEPS,
) -> Prediction:
    """Predict the mean step time of N + b replicas by simulation. A step ends with its N-th gradient.

    A late replica abandons its stale gradient `cancel_seconds` after the end of the step. If that is None, it finishes
    the gradient.
    """
    takes = law(generator, steps * runs, replicas + backups).reshape(steps, runs, -1)
    free = np.zeros((runs, replicas + backups))
    began = np.zeros((runs, 1))
    first = np.zeros((runs, 1))
    for step in range(steps):
        if step == steps // 4:
            first = began
        start = np.maximum(free, began)
        done = start + takes[step]
        ended = np.partition(done, replicas - 1, axis=1)[:, replicas - 1 : replicas]
        # A replica that is busy with an older gradient until this step ends never begins it.
        begun = start < ended
        if cancel_seconds is not None:
            done = np.minimum(done, ended + cancel_seconds)
        free = np.where(begun, done, free)
        began = ended
    return Prediction(backups=backups, step_seconds=float((began - first).mean()) / (steps - steps // 4))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Chosen number of backups, with the predictions for all numbers that were compared."""

    #: chosen number of backup replicas b
    backups: int
    #: prediction for each b, from 0 on
    predictions: tuple[Prediction, ...]


def choose(
    law: Law,
    *,
    replicas: int,
    max_backups: int,
    cancel_seconds: float | None = None,
    seed: int = 0,
) -> Choice:
    """Return the smallest b from 0 to `max_backups` whose step time is within TOLERANCE of the best, for N `replicas`.

    With N fixed, more backups never slow a step down. But each takes a slot, and the last backups gain almost nothing.
    """
    check_replicas(replicas, max_backups)
    # All simulations use the same seed (common random numbers), so that only b makes a difference.
    predictions = tuple(
        simulate(law, replicas, b, cancel_seconds=cancel_seconds, generator=np.random.default_rng(seed))
        for b in range(max_backups + 1)
    )
    best = min(each.step_seconds for each in predictions)
    backups = next(b for b, each in enumerate(predictions) if each.step_seconds <= (1 + TOLERANCE) * best)
    return Choice(backups=backups, predictions=predictions)


@dataclass
class Tuner:
    """Periodic choice of b from the response times recorded so far (``backups="auto"``)."""

    replicas: int
    max_backups: int
    cancel_seconds: float | None = None
    seed: int = 0
    times: Times = field(default_factory=Times, init=False)
    #: last choice; None while too few times are recorded
    choice: Choice | None = field(default=None, init=False)
    #: step of the next choice; the first choice comes soon, because until then the gang has slots for all its backups
    due: int = field(default=TUNE_EVERY // 5, init=False)

    def __post_init__(self) -> None:
        check_replicas(self.replicas, self.max_backups)

    def at(self, step: int) -> Choice | None:
        """Return a newly chosen number of backups if a choice is due at this step, else None.

        Choosing takes about ten milliseconds.
        """
        if step < self.due:
            return None
        law = self.times.law()
        if law is None:
            return None
        self.due = step + TUNE_EVERY
        self.choice = choose(
            law,
            replicas=self.replicas,
            max_backups=self.max_backups,
            cancel_seconds=self.cancel_seconds,
            seed=self.seed,
        )
        return self.choice

    def predictions(self) -> Sequence[Prediction]:
        """Return the predictions of the last choice. If there was no choice, predict from the times recorded so far.

        The result is empty if too few times are recorded.
        """
        if self.choice is not None:
            return self.choice.predictions
        law = self.times.law()
        if law is None:
            return ()
        most = max(PREDICT_UP_TO, self.max_backups)
        return choose(law, replicas=self.replicas, max_backups=most, cancel_seconds=self.cancel_seconds).predictions
