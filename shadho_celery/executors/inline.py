"""Runs trials one after another in this very process: for `minimize`, tests and debugging."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from shadho_celery.core.clock import Clock, SystemClock
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Attempt, Event, Lost, Report, Result, Started, TrialState, whole
from shadho_celery.objective.call import Objective, call
from shadho_celery.objective.context import LocalContext

INLINE_CLASS = "local"

#: what stands for the machine's name
HOST = "this process"


class InlineExecutor:
    """One slot of one class, `local`; a trial runs inside `poll`."""

    def __init__(
        self,
        objective: Objective,
        evaluate: Callable[[Any], Any],
        clock: Clock | None = None,
        checkpoints: Path = Path(".shadho/checkpoints"),
    ) -> None:
        """`evaluate` turns a trial's params into what the objective gets (`Space.evaluate`)."""
        self._objective = objective
        self._evaluate = evaluate
        self._clock = clock or SystemClock()
        self._checkpoints = checkpoints
        self._queue: deque[Attempt] = deque()
        self._events: list[Event] = []

    def classes(self) -> Sequence[ComputeClass]:
        return [ComputeClass(name=INLINE_CLASS, slots=1, cores=1)]

    def submit(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if attempt.state is TrialState.RUNNING:
                self._lose(attempt, "the process that ran it is gone", claimed=True)
            else:
                self._queue.append(attempt)

    def poll(self, seconds: float) -> Sequence[Event]:
        # With an empty queue nothing can happen later on: no reason to wait.
        if self._queue:
            self._run(self._queue.popleft())
        events, self._events = self._events, []
        return events

    def cancel(self, numbers: Iterable[int], *, running: bool) -> None:
        unwanted = set(numbers)
        for attempt in [attempt for attempt in self._queue if attempt.number in unwanted]:
            self._queue.remove(attempt)
            self._lose(attempt, "taken back", claimed=False)

    def close(self) -> None:
        self._queue.clear()

    def _lose(self, attempt: Attempt, reason: str, *, claimed: bool) -> None:
        lost = Lost(number=attempt.number, attempt=attempt.attempt, reason=reason, claimed=claimed)
        self._events.append(lost)

    def _run(self, attempt: Attempt) -> None:
        number, which = attempt.number, attempt.attempt
        self._events.append(Started(number=number, attempt=which, host=HOST, at=self._clock.now()))

        def report(step: int, loss: float) -> None:
            self._events.append(Report(number=number, attempt=which, step=step, loss=loss, at=self._clock.now()))

        context = LocalContext(
            trial=attempt.number,
            attempt=attempt.attempt,
            seed=attempt.seed,
            checkpoints=self._checkpoints / str(attempt.number if attempt.origin is None else attempt.origin),
            compute_class=INLINE_CLASS,
            budget=whole(attempt.budget),
            on_report=report,
        )
        outcome = call(self._objective, lambda: self._evaluate(attempt.params), context, self._clock)
        now = self._clock.now()
        result = Result(number=number, attempt=which, outcome=outcome, compute_class=INLINE_CLASS, host=HOST, at=now)
        self._events.append(result)
