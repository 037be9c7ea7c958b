"""How many backup replicas are worth their slots: a renewal simulation on the response times that were recorded.

A replica that missed a step is busy until its stale gradient is done or cancelled, and only then starts on the current
parameters. Order statistics of independent times leave that out and promise too much. What the simulation leaves out:
times are drawn one by one, so a replica that is slow for minutes at a stretch counts as one that is slow now and then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shadho_celery.training.strategies import check_width

Array = NDArray[np.float64]
#: (generator, runs, n) -> seconds that n replicas take for one gradient, drawn afresh for each run; shape (runs, n)
Law = Callable[[np.random.Generator, int, int], Array]

#: response times kept of each replica
RING = 500
#: runs of the simulation side by side, and steps of each; their first quarter, when all start idle, is left out
RUNS, STEPS = 32, 96
#: a backup must bring the step time at least this much nearer to the best there is
TOLERANCE = 0.05
#: steps from one choice of b to the next
EVERY = 100
#: times that a replica must have told before anything is read out of them
ENOUGH = 5


class Times:
    """The last response times of each replica: seconds from sending the parameters to the whole gradient.

    Those that were cancelled count as "at least so long": the mass of each goes to the longer ones of its replica, in
    equal parts (Efron's form of the Kaplan-Meier estimate). Where none is longer, it is thought to take twice as long.
    """

    def __init__(self, size: int = RING) -> None:
        self._size = size
        self._rings: dict[int, deque[tuple[float, bool]]] = {}

    def tell(self, replica: int, seconds: float, *, finished: bool = True) -> None:
        """Record one response; `finished` is False where it was cancelled after so many seconds."""
        if math.isfinite(seconds) and seconds >= 0:
            self._rings.setdefault(replica, deque(maxlen=self._size)).append((seconds, finished))

    def forget(self, replica: int) -> None:
        """Leave out a replica that is gone."""
        self._rings.pop(replica, None)

    def counts(self) -> dict[int, int]:
        """Times kept, by replica."""
        return {replica: len(ring) for replica, ring in self._rings.items()}

    def law(self) -> Law | None:
        """What the replicas have shown so far, as it is now; None before one has told enough.

        The k-th column is the k-th replica by number; those beyond the known ones draw from everybody's times.
        """
        known = [ring for _, ring in sorted(self._rings.items()) if len(ring) >= ENOUGH]
        if not known:
            return None
        tables = [_table(list(ring)) for ring in known]
        everybody = _table([each for ring in known for each in ring])

        def draw(generator: np.random.Generator, runs: int, n: int) -> Array:
            columns = [(tables[k] if k < len(tables) else everybody).draw(generator, runs) for k in range(n)]
            return np.stack(columns, axis=1)

        return draw


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Response times in rising order."""

    #: seconds, those finished before those cancelled where they are equal; shape (n,)
    seconds: Array
    #: which of them were finished; shape (n,)
    finished: NDArray[np.bool_]

    def draw(self, generator: np.random.Generator, runs: int) -> Array:
        last = len(self.seconds) - 1
        at = generator.integers(0, last + 1, runs)
        while (moving := ~self.finished[at] & (at < last)).any():
            # On to one of the longer ones, each as likely as the other.
            at[moving] += 1 + (generator.random(int(moving.sum())) * (last - at[moving])).astype(int)
        return np.where(self.finished[at], 1.0, 2.0) * self.seconds[at]


def _table(times: list[tuple[float, bool]]) -> _Table:
    times = sorted(times, key=lambda each: (each[0], not each[1]))
    return _Table(seconds=np.array([s for s, _ in times]), finished=np.array([f for _, f in times]))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the simulation says of one choice of N and b."""

    #: gradients that make a step, N
    replicas: int
    #: spare replicas beyond them, b
    backups: int
    #: mean seconds from one step to the next
    step_seconds: float
    #: share of the gradients that were begun and then dropped or cancelled
    dropped: float


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
    """Play N + b replicas: a step ends with its N-th gradient.

    Without `cancel_seconds` a late replica finishes its stale gradient first; with it, it abandons that so many seconds
    after the step has ended.
    """
    takes = law(generator, steps * runs, replicas + backups).reshape(steps, runs, -1)
    free = np.zeros((runs, replicas + backups))
    began = np.zeros((runs, 1))
    first, started = np.zeros((runs, 1)), 0
    for step in range(steps):
        if step == steps // 4:
            first, started = began, 0
        start = np.maximum(free, began)
        done = start + takes[step]
        ended = np.partition(done, replicas - 1, axis=1)[:, replicas - 1 : replicas]
        # Who is busy with an older gradient until after this step never begins on it.
        begun = start < ended
        started += int(begun.sum())
        if cancel_seconds is not None:
            done = np.minimum(done, ended + cancel_seconds)
        free = np.where(begun, done, free)
        began = ended
    counted = steps - steps // 4
    return Prediction(
        replicas=replicas,
        backups=backups,
        step_seconds=float((began - first).mean()) / counted,
        dropped=max(0.0, 1.0 - replicas * counted * runs / started),
    )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The number of backups that is worth most, and what every other number would bring."""

    #: N
    replicas: int
    #: b
    backups: int
    #: one for each b, from 0 on
    predictions: tuple[Prediction, ...]


def choose(
    law: Law,
    *,
    replicas: int,
    most: int,
    cancel_seconds: float | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> Choice:
    """Return the least b in 0..`most` whose step time is within `tolerance` of the best, for N `replicas`.

    With N fixed more backups never slow a step down, but each takes a slot: the last ones bring next to nothing.
    """
    check_width(replicas, most)
    # One seed for all: they differ in b, not in luck.
    predictions = tuple(
        simulate(law, replicas, b, cancel_seconds=cancel_seconds, generator=np.random.default_rng(seed))
        for b in range(most + 1)
    )
    best = min(each.step_seconds for each in predictions)
    backups = next(b for b, each in enumerate(predictions) if each.step_seconds <= (1 + tolerance) * best)
    return Choice(replicas=replicas, backups=backups, predictions=predictions)


def divide(
    law: Law,
    *,
    total: int,
    most: int,
    slope: float,
    cancel_seconds: float | None = None,
    seed: int = 0,
) -> Choice:
    """Return the b in 0..`most` with the least time to converge where N + b = `total` machines are there anyway.

    Time = seconds per step x I(N), and I(N) = I_inf (1 + c / N) with `slope` c: fewer gradients make shorter steps, but
    more of them are needed (Chen et al., arXiv 1604.00981).
    """
    check_width(total, most)
    most = min(most, total - 1)
    predictions = tuple(
        simulate(law, total - b, b, cancel_seconds=cancel_seconds, generator=np.random.default_rng(seed))
        for b in range(most + 1)
    )
    backups = min(range(most + 1), key=lambda b: to_converge(predictions[b], slope))
    return Choice(replicas=total - backups, backups=backups, predictions=predictions)


def to_converge(prediction: Prediction, slope: float) -> float:
    """Seconds to converge over I_inf: those of a step, times (1 + c / N) with `slope` c."""
    return prediction.step_seconds * (1 + slope / prediction.replicas)


class Tuner:
    """Chooses b anew every so many steps, from the response times told so far (``backups="auto"``)."""

    def __init__(
        self, replicas: int, most: int, *, cancel_seconds: float | None = None, every: int = EVERY, seed: int = 0
    ) -> None:
        check_width(replicas, most)
        self.times = Times()
        #: what was chosen last, None as long as too few times were told
        self.choice: Choice | None = None
        self._replicas, self._most, self._cancel_seconds = replicas, most, cancel_seconds
        self._every, self._seed = every, seed
        # The first one soon: a gang that starts without backups waits for every straggler.
        self._due = every // 5

    def at(self, step: int) -> Choice | None:
        """Return a new choice where one is due at this step, else None. Takes some ten milliseconds when it is."""
        if step < self._due:
            return None
        law = self.times.law()
        if law is None:
            return None
        self._due = step + self._every
        self.choice = choose(
            law, replicas=self._replicas, most=self._most, cancel_seconds=self._cancel_seconds, seed=self._seed
        )
        return self.choice
