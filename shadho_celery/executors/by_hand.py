"""Executor for ask/tell loops: the caller fetches each attempt, runs it, and returns its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from shadho_celery.core.clock import Clock
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Attempt, Event, Lost, Outcome, Report, Result, Started, TrialState
from shadho_celery.executors.base import take
from shadho_celery.executors.inline import HOST, INLINE_CLASS, STORAGES


class ByHandExecutor:
    """One class, `local`, with a slot for each fetched attempt, and one more while one is asked for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: deque[Attempt] = deque()
        #: attempts that were fetched but have no result yet, by trial
        self.fetched: dict[int, Attempt] = {}
        self._events: list[Event] = []
        self._is_asked = False

    def classes(self) -> Sequence[ComputeClass]:
        slots = len(self.fetched) + len(self._queue) + (self._is_asked and not self._queue)
        return [ComputeClass(name=INLINE_CLASS, slots=slots, cores=1, storages=STORAGES)] if slots else []

    def submit(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if attempt.state is TrialState.QUEUED:
                self._queue.append(attempt)
            elif attempt.number not in self.fetched:
                self._lose(attempt, "the process that asked for it is gone")

    def poll(self, seconds: float) -> Sequence[Event]:
        events, self._events = self._events, []
        return events

    def keep(self) -> None:
        pass

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        for attempt in take(self._queue, numbers):
            self._lose(attempt, "taken back")
        for number in self.fetched.keys() & set(numbers) if running else ():
            self.bring(number, Outcome(state=TrialState.CANCELLED, error="cancelled"))

    def close(self) -> None:
        self._queue.clear()

    def ask_for_one(self, *, is_asked: bool) -> None:
        """Offer a free slot, or stop offering one."""
        self._is_asked = is_asked

    def fetch(self) -> Attempt | None:
        """Return an attempt for the caller to run, or None."""
        if not self._queue:
            return None
        attempt = self._queue.popleft()
        self.fetched[attempt.number] = attempt
        started = Started(number=attempt.number, attempt=attempt.attempt, host=HOST, at=self._clock.wall())
        self._events.append(started)
        return attempt

    def bring(self, number: int, outcome: Outcome) -> None:
        """End a fetched attempt. Raises KeyError if it was not fetched."""
        attempt = self.fetched.pop(number)
        at, which = self._clock.wall(), attempt.attempt
        result = Result(number=number, attempt=which, outcome=outcome, compute_class=INLINE_CLASS, host=HOST, at=at)
        self._events.append(result)

    def report(self, number: int, step: int, loss: float) -> None:
        """Report an intermediate loss of a fetched attempt. Raises KeyError if it was not fetched."""
        which = self.fetched[number].attempt
        self._events.append(Report(number=number, attempt=which, step=step, loss=loss, at=self._clock.wall()))

    def give_back(self) -> None:
        """Give up all fetched attempts. Their trials wait to be asked for again."""
        for attempt in self.fetched.values():
            self._lose(attempt, "it was asked for but never told")
        self.fetched.clear()

    def _lose(self, attempt: Attempt, reason: str) -> None:
        self._events.append(Lost(number=attempt.number, attempt=attempt.attempt, reason=reason, claimed=False))
