"""Executor for ask/tell loops: the caller fetches each attempt, runs it, and returns its result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shadho_celery.core.clock import Clock
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.executors.inline import INLINE_CLASS, STORAGES, LocalExecutor


class ByHandExecutor(LocalExecutor):
    """One class, `local`, with a slot for each fetched attempt, and one more while one is asked for."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        #: attempts that were fetched but have no result yet, by trial
        self.fetched: dict[int, Attempt] = {}
        #: True while the caller asks for an attempt
        self.is_asked = False

    def classes(self) -> Sequence[ComputeClass]:
        slots = len(self.fetched) + len(self._queue) + (self.is_asked and not self._queue)
        return [ComputeClass(name=INLINE_CLASS, slots=slots, cores=1, storages=STORAGES)] if slots else []

    def submit(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if attempt.state is TrialState.QUEUED:
                self._queue.append(attempt)
            elif attempt.number not in self.fetched:
                self._lose(attempt, "the process that asked for it is gone")

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        super().cancel(numbers, running=running, pruned=pruned)
        for number in self.fetched.keys() & set(numbers) if running else ():
            self.bring(number, Outcome(state=TrialState.CANCELLED, error="cancelled"))

    def fetch(self) -> Attempt | None:
        """Return an attempt for the caller to run, or None."""
        if not self._queue:
            return None
        attempt = self._queue.popleft()
        self.fetched[attempt.number] = attempt
        self._start(attempt)
        return attempt

    def bring(self, number: int, outcome: Outcome) -> None:
        """End a fetched attempt. Raises KeyError if it was not fetched."""
        self._end(self.fetched.pop(number), outcome)

    def report(self, number: int, step: int, loss: float) -> None:
        """Report an intermediate loss of a fetched attempt. Raises KeyError if it was not fetched."""
        self._report(self.fetched[number], step, loss)

    def give_back(self) -> None:
        """Give up all fetched attempts. Their trials wait to be asked for again."""
        for attempt in self.fetched.values():
            self._lose(attempt, "it was asked for but never told")
        self.fetched.clear()
