"""Runs trials one after another in this very process: for `minimize`, tests and debugging."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from shadho_celery.clock import Clock, SystemClock
from shadho_celery.context import LocalContext, Objective, call
from shadho_celery.hardware import ComputeClass
from shadho_celery.rounds import whole
from shadho_celery.trial import Event, Lost, Report, Result, Started, Trial, TrialState

INLINE_CLASS = "local"


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
        self._queue: deque[Trial] = deque()
        self._events: list[Event] = []

    def classes(self) -> Sequence[ComputeClass]:
        return [ComputeClass(name=INLINE_CLASS, slots=1, cores=1)]

    def submit(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial.state is TrialState.RUNNING:
                self._events.append(
                    Lost(number=trial.number, attempt=trial.attempt, reason="the process that ran it is gone")
                )
            else:
                self._queue.append(trial)

    def poll(self, seconds: float) -> Sequence[Event]:
        # With an empty queue nothing can happen later on: no reason to wait.
        if self._queue:
            self._run(self._queue.popleft())
        events, self._events = self._events, []
        return events

    def cancel(self, numbers: Iterable[int], *, running: bool) -> None:
        unwanted = set(numbers)
        for trial in [trial for trial in self._queue if trial.number in unwanted]:
            self._queue.remove(trial)
            self._events.append(Lost(number=trial.number, attempt=trial.attempt, reason="taken back", claimed=False))

    def close(self) -> None:
        self._queue.clear()

    def _run(self, trial: Trial) -> None:
        number, attempt = trial.number, trial.attempt
        self._events.append(Started(number=number, attempt=attempt, host="this process", at=self._clock.now()))

        def report(step: int, loss: float) -> None:
            self._events.append(Report(number=number, attempt=attempt, step=step, loss=loss, at=self._clock.now()))

        context = LocalContext(
            trial=number,
            attempt=attempt,
            seed=trial.seed,
            checkpoints=self._checkpoints / str(number if trial.origin is None else trial.origin),
            compute_class=INLINE_CLASS,
            budget=whole(trial.budget),
            on_report=report,
        )
        outcome = call(self._objective, lambda: self._evaluate(trial.params), context, self._clock)
        self._events.append(
            Result(
                number=number,
                attempt=attempt,
                state=outcome.state,
                loss=outcome.loss,
                metrics=outcome.metrics,
                error=outcome.error,
                compute_class=INLINE_CLASS,
                host="this process",
                seconds=outcome.seconds,
                at=self._clock.now(),
                out_of_memory=outcome.out_of_memory,
                warning=outcome.warning,
            )
        )
