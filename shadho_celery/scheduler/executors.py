"""The protocol `Executor`, which runs attempts and returns events, and the executors that need no fleet.

`InlineExecutor` runs trials in this process, one after the other. `ByHandExecutor` serves ask/tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from shadho_celery.core.attempts import Sent
from shadho_celery.core.files import CHECKPOINTS, holds_files
from shadho_celery.core.hardware import ComputeClass, usable_cores, usable_memory
from shadho_celery.core.records import MachineRecord, Present, own_versions
from shadho_celery.core.system import Clock, SystemClock
from shadho_celery.core.trial import Attempt, Event, Lost, Outcome, Params, Report, Result, Started, TrialState, whole
from shadho_celery.objective.call import Objective, call, wants_context
from shadho_celery.objective.context import LocalContext, reported
from shadho_celery.study.recorder import Recorder


class Executor(Protocol):
    """Runs attempts.

    While the store cannot be reached, the scheduler calls `renew_lock` instead of `poll`, because `poll` confirms that
    earlier events are recorded.
    """

    def classes(self) -> Sequence[ComputeClass]:
        """Return the compute classes with live workers for this study, as of the last `poll`."""

    def submit(self, attempts: Sequence[Attempt]) -> None:
        """Send QUEUED attempts to their compute classes.

        An event ends each attempt, unless another attempt has ended the trial. Sending an attempt twice is harmless. A
        copy is an attempt that is sent while another attempt of the trial runs. It runs on another machine, and the
        first attempt that ends COMPLETE or PRUNED ends the other one. An attempt with `only_on` runs only on that
        machine: if no worker there claims it soon, a `Lost` event ends it. A RUNNING attempt was sent by an earlier run
        of the scheduler. It is not sent again, but an event ends it, too.
        """

    def poll(self, seconds: float) -> Sequence[Event]:
        """Return events as soon as there are any, or an empty sequence after about `seconds`.

        The call also confirms that the events of the last call are recorded. After a crash, the events that were not
        confirmed are returned again.
        """

    def renew_lock(self) -> None:
        """Renew the scheduler's lock on the study. Call this every few seconds while `poll` is not called."""

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        """Take back the attempts of these trials that no worker has claimed. Each ends with an unclaimed `Lost` event.

        If `running`, running attempts are stopped, too. If `pruned`, their workers log that the trials were pruned. A
        later `poll` returns the events.
        """

    def note_end(self, event: Event, ended: Sequence[Sent], *, is_over: bool) -> None:
        """Release the resources of the `ended` attempts, which are no longer live because of an event of `poll`.

        `is_over` is True if their trial has no live attempt left.
        """

    def close(self) -> None:
        """Close connections. Trials on other machines continue."""


def take(queue: deque[Attempt], numbers: Iterable[int]) -> list[Attempt]:
    """Remove the attempts of these trials from a queue, and return them."""
    unwanted = set(numbers)
    taken = [attempt for attempt in queue if attempt.number in unwanted]
    for attempt in taken:
        queue.remove(attempt)
    return taken


INLINE_CLASS = "local"

#: names of the machine and of its storage of checkpoints, for trials in this process
HOST = "this process"
STORAGES = {HOST: "local"}


def record_process(recorder: Recorder, at: float) -> None:
    """Record this process as a worker from now on, and its machine."""
    machine = replace(usable_cores(), host=HOST, memory=usable_memory())
    present = Present(INLINE_CLASS, 1, MachineRecord.of(machine, own_versions()))
    recorder.see({HOST}, at, lambda name: present)


class LocalExecutor:
    """Base of the executors without a fleet: a queue of attempts for one compute class, `local`, and their events."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: deque[Attempt] = deque()
        self._events: list[Event] = []

    def poll(self, seconds: float) -> Sequence[Event]:
        events, self._events = self._events, []
        return events

    def renew_lock(self) -> None:
        pass

    def note_end(self, event: Event, ended: Sequence[Sent], *, is_over: bool) -> None:
        pass

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        for attempt in take(self._queue, numbers):
            self._lose(attempt, "taken back")

    def close(self) -> None:
        self._queue.clear()

    def _lose(self, attempt: Attempt, reason: str, *, claimed: bool = False) -> None:
        self._events.append(Lost(number=attempt.number, attempt=attempt.attempt, reason=reason, claimed=claimed))

    def _start(self, attempt: Attempt) -> None:
        at = self._clock.wall()
        self._events.append(Started(number=attempt.number, attempt=attempt.attempt, host=HOST, at=at, worker=HOST))

    def _report(self, attempt: Attempt, step: int, loss: float | Mapping[str, float]) -> Report:
        at = self._clock.wall()
        report = Report(number=attempt.number, attempt=attempt.attempt, step=step, at=at, **reported(loss))
        self._events.append(report)
        return report

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        number, which, at = attempt.number, attempt.attempt, self._clock.wall()
        result = Result(number=number, attempt=which, outcome=outcome, compute_class=INLINE_CLASS, host=HOST, at=at)
        self._events.append(result)


@dataclass(eq=False)
class InlineExecutor(LocalExecutor):
    """Runs one trial at a time in this process, during `poll`. It has one slot of the class `local`."""

    objective: Objective
    #: computes the objective's values from a trial's params (`Space.evaluate`)
    evaluate: Callable[[Params], object]
    _: KW_ONLY
    checkpoints: Path = CHECKPOINTS
    #: name of the study
    study: str = ""
    #: direction of each loss by name, if losses have names
    objectives: Mapping[str, str] | None = None
    #: returns whether an attempt should stop after a report. While the objective runs, the scheduler cannot decide this
    prunes: Callable[[Attempt, Report], bool] = lambda attempt, report: False
    #: digest of the objective's version
    code: str = ""

    def __post_init__(self) -> None:
        super().__init__(SystemClock())
        self._takes_context = wants_context(self.objective)
        self._classes = [ComputeClass(name=INLINE_CLASS, slots=1, cores=1, storages=STORAGES)]

    def classes(self) -> Sequence[ComputeClass]:
        return self._classes

    def submit(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if attempt.state is TrialState.RUNNING:
                self._lose(attempt, "the process that ran it is gone", claimed=True)
            else:
                self._queue.append(attempt)

    def poll(self, seconds: float) -> Sequence[Event]:
        # With an empty queue, this returns at once, because no event can arrive.
        if self._queue:
            self._run(self._queue.popleft())
        return super().poll(seconds)

    def _run(self, attempt: Attempt) -> None:
        self._start(attempt)
        is_stopped = False

        def report(step: int, loss: float | Mapping[str, float]) -> None:
            nonlocal is_stopped
            is_stopped = self.prunes(attempt, self._report(attempt, step, loss)) or is_stopped

        checkpoints = self.checkpoints / str(attempt.number if attempt.origin is None else attempt.origin)
        continued = None if attempt.origin is None else holds_files(checkpoints)
        context = LocalContext(
            study=self.study,
            trial=attempt.number,
            attempt=attempt.attempt,
            seed=attempt.seed,
            checkpoints=checkpoints,
            compute_class=INLINE_CLASS,
            budget=whole(attempt.budget),
            on_report=report,
            objectives=self.objectives,
            stopped=lambda: is_stopped,
        )
        values = partial(self.evaluate, attempt.params)
        how: dict[str, Any] = {"takes_context": self._takes_context, "objectives": self.objectives}
        outcome = call(self.objective, values, context, self._clock, **how)
        # If the trial should stop, the outcome is CANCELLED, even if the objective raised an exception of its own.
        outcome = outcome.cancelled() if is_stopped else outcome
        self._end(attempt, replace(outcome, continued=continued, code=self.code or None))


class ByHandExecutor(LocalExecutor):
    """Executor for ask/tell: the caller fetches each attempt, runs it, and brings its outcome.

    It has one class, `local`, with a slot for each fetched or queued attempt. While the caller asks for an attempt and
    none is queued, it has one more slot, which is free.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        #: by number of the trial: attempts that were fetched and have no outcome yet
        self.fetched: dict[int, Attempt] = {}
        #: True while the caller asks for an attempt
        self.is_asked = False

    def classes(self) -> Sequence[ComputeClass]:
        slots = len(self.fetched) + len(self._queue) + (self.is_asked and not self._queue)
        return [ComputeClass(name=INLINE_CLASS, slots=slots, cores=1, storages=STORAGES)] if slots else []

    def submit(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if attempt.state is TrialState.QUEUED:
                if attempt.number not in {each.number for each in self._queue}:
                    self._queue.append(attempt)
            elif attempt.number not in self.fetched:
                self._lose(attempt, "the process that asked for it is gone")

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        super().cancel(numbers, running=running, pruned=pruned)
        for number in self.fetched.keys() & set(numbers) if running else ():
            self.bring(number, Outcome(state=TrialState.CANCELLED, error="cancelled"))

    def fetch(self) -> Attempt | None:
        """Return the next queued attempt, which the caller runs; None if the queue is empty."""
        if not self._queue:
            return None
        attempt = self._queue.popleft()
        self.fetched[attempt.number] = attempt
        self._start(attempt)
        return attempt

    def bring(self, number: int, outcome: Outcome) -> None:
        """End a fetched attempt with its outcome. Raises KeyError if it was not fetched."""
        self._end(self.fetched.pop(number), outcome)

    def report(self, number: int, step: int, loss: float | Mapping[str, float]) -> None:
        """Report an intermediate loss of a fetched attempt. Raises KeyError if it was not fetched."""
        self._report(self.fetched[number], step, loss)

    def give_back(self) -> None:
        """Give up all fetched attempts. They end LOST, so their trials can be fetched again."""
        for attempt in self.fetched.values():
            self._lose(attempt, "it was asked for but never told")
        self.fetched.clear()
