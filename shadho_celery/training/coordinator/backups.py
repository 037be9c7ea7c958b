"""Choice of the number of backup replicas by a renewal simulation on recorded response times.

A replica that missed a step is busy until its stale gradient is finished or cancelled. Only then does it start to
compute on the current parameters. Order statistics of independent times neglect this, and predict too great a gain. The
simulation draws the times of successive steps independently, so it does not distinguish a replica that is slow for
minutes from a replica that is sometimes slow.

The time of a cancelled gradient is right-censored: only a lower bound of it is known. The distribution is therefore
estimated by the product-limit estimate of Kaplan and Meier (*Nonparametric estimation from incomplete observations*,
JASA 53, 1958). The estimate is valid here, because the end of a step depends only on the past. It also needs uncensored
late times, so occasionally a late replica may finish its gradient (`Tuner.probe`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
#: distribution of response times: (generator, runs, n) -> random seconds of a gradient of each of n replicas, shape
#: (runs, n)
Law = Callable[[np.random.Generator, int, int], Array]

#: number of latest response times kept for each replica
RING_SIZE = 500
#: number of parallel runs of the simulation, and of steps in each run; the first quarter of the steps is discarded,
#: because all replicas start idle
RUNS, STEPS = 32, 96
#: fraction by which each backup replica must shorten the step
WORTH = 0.03
#: steps from one choice of b to the next
TUNE_EVERY = 100
#: the report predicts step times for up to this many backups, or more if the gang has more
PREDICT_UP_TO = 4
#: the times of a replica are used only if there are at least this many
MIN_TIMES = 5
#: the rate of the distribution's tail is estimated from this many longest finished times
TAIL_EVENTS = 10
#: a replica gets a distribution of its own times only if its number of finished responses differs by more standard
#: deviations than this from the number that the other replicas' times predict
SEPARATE = 4.0
#: maximum number of late gradients that may be finished within RING_SIZE steps (probes)
PROBES = 30


class Times:
    """The latest response times of each replica: seconds from sending the parameters to the arrival of the gradient.

    The times of cancelled responses are censored.
    """

    def __init__(self) -> None:
        self._rings: dict[int, deque[tuple[float, bool]]] = {}

    def record(self, replica: int, seconds: float, *, finished: bool = True) -> None:
        """Record a response of a replica. `finished` is False if the gradient was cancelled after this many seconds."""
        if math.isfinite(seconds) and seconds >= 0:
            self._rings.setdefault(replica, deque(maxlen=RING_SIZE)).append((seconds, finished))

    def forget(self, replica: int) -> None:
        """Remove the times of a replica that is gone."""
        self._rings.pop(replica, None)

    def law(self, running: Mapping[int, float] | None = None) -> Law | None:
        """Return the distribution of the recorded times, or None if no replica has enough times yet.

        Column k stands for the k-th replica. If its times differ clearly from those of the other replicas (one-sample
        log-rank test), they are drawn from its own times only. All other replicas share one distribution. Further
        columns, for replicas without times, draw from all times. `running` has the seconds so far of responses that
        have not ended, by replica.
        """
        rings = {place: list(ring) for place, ring in self._rings.items() if len(ring) >= MIN_TIMES}
        if not rings:
            return None
        for place, seconds in (running or {}).items():
            rings.setdefault(place, []).append((seconds, False))
        apart = {place for place in rings if _differs(place, rings)}
        alike = Survival([each for place, ring in rings.items() if place not in apart for each in ring])
        every = Survival([each for ring in rings.values() for each in ring])
        own = [Survival(ring) if place in apart else alike for place, ring in sorted(rings.items())]

        def draw(generator: np.random.Generator, runs: int, n: int) -> Array:
            return np.stack([each.draw(generator, runs) for each in (own + [every] * n)[:n]], axis=1)

        return draw


class Survival:
    """Product-limit estimate S(t) of the probability that a response takes longer than t (Kaplan and Meier, 1958).

    Beyond the longest finished time, the estimate continues with an exponential tail (Brown, Hollander and Korwar, in
    *Reliability and Biometry*, SIAM, 1974). The rate of the tail is its maximum likelihood estimate: the number of the
    longest finished times (TAIL_EVENTS), divided by the seconds that all responses spent beyond the time before these.
    """

    def __init__(self, times: Sequence[tuple[float, bool]]) -> None:
        seconds = np.sort([s for s, _ in times])
        finished = np.sort([s for s, is_finished in times if is_finished])
        #: finished times in ascending order without repetition, shape (m,)
        self.events, deaths = np.unique(finished, return_counts=True)
        # If times are equal, finished responses come before cancelled ones.
        hazard = deaths / (len(seconds) - np.searchsorted(seconds, self.events))
        #: S just after each event, shape (m,)
        self.survival = np.cumprod(1.0 - hazard)
        self._hazards = np.concatenate([[0.0], np.cumsum(hazard)])
        start = finished[-TAIL_EVENTS - 1] if len(finished) > TAIL_EVENTS else 0.0
        exposure = float(np.maximum(seconds - start, 0.0).sum())
        # If no response has finished, assume half a response (Jeffreys' prior).
        self._tail_seconds = exposure / max(0.5, float((finished > start).sum()))

    def expected(self, times: Sequence[tuple[float, bool]]) -> float:
        """Return the expected number of finished responses among `times`: the sum of their cumulative hazards."""
        return float(self._hazards[np.searchsorted(self.events, [s for s, _ in times], side="right")].sum())

    def draw(self, generator: np.random.Generator, runs: int) -> Array:
        """Return random times, shape (runs,). The number of random draws does not depend on the times."""
        level, beyond = generator.random((2, runs))
        last = self.events[-1] if len(self.events) else 0.0
        values = np.append(self.events, last)
        at = np.searchsorted(1.0 - self.survival, level)
        drawn: Array = np.where(at < len(self.events), values[at], last - self._tail_seconds * np.log1p(-beyond))
        return drawn


def _differs(place: int, rings: Mapping[int, Sequence[tuple[float, bool]]]) -> bool:
    """Return True if a replica's times differ clearly from the other replicas' times (one-sample log-rank test)."""
    others = [each for other, ring in rings.items() if other != place for each in ring]
    if not others:
        return False
    observed = sum(finished for _, finished in rings[place])
    expected = Survival(others).expected(rings[place])
    return abs(observed - expected) > SEPARATE * math.sqrt(max(1.0, expected))


class Assignments:
    """Records which step each place works on, and adds the time of the work to `times` when the work ends."""

    def __init__(self, times: Times, now: Callable[[], float]) -> None:
        self._times, self._now = times, now
        #: place -> the step that it works on, and the time at which it began
        self._current: dict[int, tuple[int, float]] = {}
        #: place -> newest step that was sent to it
        self._sent: dict[int, int] = {}
        #: places whose vector was refused, so that they have no work until the next step
        self.idle: set[int] = set()

    @property
    def busy(self) -> list[int]:
        """Places that work on the current step or on an older one."""
        return list(self._current)

    def clear(self, place: int) -> None:
        """Remove the entries of a place, because its replica has left or was replaced."""
        self.idle.discard(place)
        self._current.pop(place, None)
        self._sent.pop(place, None)

    def assign(self, place: int, step: int) -> None:
        """Record that a step was sent to a place. If the place still works on an older step, it begins this step when
        `resume` is called.
        """
        self.idle.discard(place)
        self._sent[place] = step
        self._current.setdefault(place, (step, self._now()))

    def complete(self, place: int, step: int, at: float) -> None:
        """Record that a place's vector for `step` arrived at the time `at`."""
        current = self._current.get(place)
        if current is not None and current[0] == step:
            del self._current[place]
            self._times.record(place, at - current[1])

    def resume(self, place: int, step: int) -> bool:
        """Record that a place whose vector was late now works on `step`. Return False if `step` was not sent to it."""
        if self._sent.get(place, -1) < step:
            return False
        self._current.setdefault(place, (step, self._now()))
        return True

    def seconds(self, place: int) -> float:
        """Return the seconds for which a busy place has worked so far."""
        return self._now() - self._current[place][1]

    def cancel(self, places: Iterable[int]) -> list[int]:
        """Cancel the work of busy places, because the step has ended. Record their times, and return the places."""
        places, now = list(places), self._now()
        for place in places:
            self._times.record(place, now - self._current.pop(place)[1], finished=False)
        return places


def simulate(
    law: Law,
    replicas: int,
    backups: int,
    *,
    cancel_seconds: float | None = None,
    generator: np.random.Generator,
    runs: int = RUNS,
    steps: int = STEPS,
) -> float:
    """Predict the mean seconds per step of N + b replicas by simulation. A step ends with its N-th gradient.

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
        # A replica that is busy with an older gradient until this step ends never begins this step.
        begun = start < ended
        if cancel_seconds is not None:
            done = np.minimum(done, ended + cancel_seconds)
        free = np.where(begun, done, free)
        began = ended
    return float((began - first).mean()) / (steps - steps // 4)


def predict(
    law: Law, *, replicas: int, max_backups: int, cancel_seconds: float | None = None, seed: int = 0
) -> tuple[float, ...]:
    """Predict the mean seconds per step of N `replicas` for each number b of backups from 0 to `max_backups`."""
    # All simulations use the same seed (common random numbers), so that their results differ only because of b.
    return tuple(
        simulate(law, replicas, b, cancel_seconds=cancel_seconds, generator=np.random.default_rng(seed))
        for b in range(max_backups + 1)
    )


def best(predictions: Sequence[float]) -> int:
    """Return the best b. `predictions` are the seconds per step for each b; each backup must shorten the step by WORTH.

    If N is fixed, more backups never make a step slower. But each takes a slot, and the last ones gain almost nothing.
    """
    return min(range(len(predictions)), key=lambda b: predictions[b] * (1 + WORTH * b))


@dataclass
class Tuner:
    """Chooses b periodically from the recorded response times (``backups="auto"``)."""

    replicas: int
    max_backups: int
    cancel_seconds: float | None = None
    seed: int = 0
    times: Times = field(default_factory=Times, init=False)
    #: step of the next choice; the first choice is early, because until then all backups take slots
    due: int = field(default=TUNE_EVERY // 5, init=False)
    #: seconds per step predicted for each b at the last choice; empty before it
    _predictions: tuple[float, ...] = field(default=(), init=False)
    #: steps of the latest probes
    _probes: deque[int] = field(default_factory=lambda: deque(maxlen=PROBES), init=False)

    def probe(self, step: int, late: Sequence[int]) -> int | None:
        """Return one of the `late` places, which may then finish its gradient of the ended `step`, or None.

        So the time of this gradient becomes known. The choice does not depend on how late a place is, because that
        would bias the times.
        """
        if not late or (len(self._probes) == PROBES and self._probes[0] > step - RING_SIZE):
            return None
        self._probes.append(step)
        return late[step % len(late)]

    def at(self, step: int, running: Mapping[int, float] | None = None) -> int | None:
        """Return the best number of backups if a choice is due at this step, else None.

        `running` has the seconds that probes have taken so far, by place. A choice takes about ten milliseconds.
        """
        if step < self.due or (law := self.times.law(running)) is None:
            return None
        self.due = step + TUNE_EVERY
        self._predictions = self._predict(law, self.max_backups)
        return best(self._predictions)

    def predictions(self) -> tuple[float, ...]:
        """Return the seconds per step predicted for each b: those of the last choice, or else those from the times so
        far.

        The result is empty if too few times are recorded.
        """
        law = None if self._predictions else self.times.law()
        return self._predictions if law is None else self._predict(law, max(PREDICT_UP_TO, self.max_backups))

    def _predict(self, law: Law, most: int) -> tuple[float, ...]:
        return predict(
            law, replicas=self.replicas, max_backups=most, cancel_seconds=self.cancel_seconds, seed=self.seed
        )
