"""Plays trials on a manual clock: a day's search in seconds, the same to the bit for the same seed."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

from shadho_celery.clock import ManualClock
from shadho_celery.context import Outcome
from shadho_celery.hardware import ComputeClass
from shadho_celery.trial import Event, Lost, Result, Started, Trial, TrialState

#: What a trial would do on a compute class: its outcome, whose `seconds` pass on the clock.
Play = Callable[[Trial, str], Outcome]


class SimulatedExecutor:
    """Classes of slots that run nothing and let the clock pass instead."""

    def __init__(self, slots: Mapping[str, int], play: Play, clock: ManualClock, ahead: int = 0) -> None:
        """`slots` by class, the strongest class first; `ahead` trials may wait in each class's queue."""
        self._slots = dict(slots)
        self._play = play
        self._clock = clock
        self._ahead = ahead
        self._queues: dict[str, deque[Trial]] = defaultdict(deque)
        self._busy: Counter[str] = Counter()
        self._cancelled: set[int] = set()
        #: (moment, counter, trial, outcome); the counter lets ties end first-in-first-out
        self._ends: list[tuple[float, int, Trial, Outcome]] = []
        self._order = count()
        self._events: list[Event] = []

    def classes(self) -> Sequence[ComputeClass]:
        return [
            ComputeClass(
                name=name, slots=slots, busy=self._busy[name], cores=len(self._slots) - place, ahead=self._ahead
            )
            for place, (name, slots) in enumerate(self._slots.items())
        ]

    def submit(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial.state is TrialState.RUNNING:
                self._events.append(Lost(number=trial.number, attempt=trial.attempt, reason="not simulated any more"))
            elif trial.compute_class not in self._slots:
                reason = f"no worker serves {trial.compute_class}"
                self._events.append(Lost(number=trial.number, attempt=trial.attempt, reason=reason, claimed=False))
            else:
                self._queues[str(trial.compute_class)].append(trial)
        for name in self._queues:
            self._start(name)

    def poll(self, seconds: float) -> Sequence[Event]:
        if not self._events:
            self._end_next(self._clock.now() + seconds)
        events, self._events = self._events, []
        return events

    def cancel(self, numbers: Iterable[int], *, running: bool) -> None:
        unwanted = set(numbers)
        for queue in self._queues.values():
            for trial in [trial for trial in queue if trial.number in unwanted]:
                queue.remove(trial)
                self._events.append(
                    Lost(number=trial.number, attempt=trial.attempt, reason="taken back", claimed=False)
                )
        if running:
            self._cancelled |= unwanted & {trial.number for _, _, trial, _ in self._ends}

    def close(self) -> None:
        self._queues.clear()
        self._ends.clear()

    def _start(self, name: str) -> None:
        """Give the class's free slots the trials that wait there."""
        queue = self._queues[name]
        while queue and self._busy[name] < self._slots.get(name, 0):
            trial = queue.popleft()
            outcome = self._play(trial, name)
            now = self._clock.now()
            self._busy[name] += 1
            heapq.heappush(self._ends, (now + outcome.seconds, next(self._order), trial, outcome))
            self._events.append(Started(number=trial.number, attempt=trial.attempt, host=name, at=now))

    def _end_next(self, deadline: float) -> None:
        """Let the clock pass to the next moment at which trials end, but not past `deadline`."""
        if not self._ends or self._ends[0][0] > deadline:
            self._clock.advance_to(deadline)
            return
        moment = self._ends[0][0]
        self._clock.advance_to(moment)
        while self._ends and self._ends[0][0] <= moment:
            _, _, trial, outcome = heapq.heappop(self._ends)
            name = str(trial.compute_class)
            self._busy[name] -= 1
            cancelled = trial.number in self._cancelled
            self._cancelled.discard(trial.number)
            self._events.append(
                Result(
                    number=trial.number,
                    attempt=trial.attempt,
                    state=TrialState.CANCELLED if cancelled else outcome.state,
                    loss=None if cancelled else outcome.loss,
                    metrics=outcome.metrics,
                    error=outcome.error,
                    host=name,
                    compute_class=name,
                    seconds=outcome.seconds,
                    at=moment,
                )
            )
            self._start(name)
