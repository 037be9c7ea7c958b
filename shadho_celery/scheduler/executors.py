"""Role of an executor, which runs attempts and returns events, and a function for the queues of implementations.

Executors without a fleet: `InlineExecutor` runs trials here one after another, `ByHandExecutor` serves ask/tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from shadho_celery.core.attempts import Sent
from shadho_celery.core.files import holds_files
from shadho_celery.core.hardware import ComputeClass, Machine, ram_bytes, usable_cores
from shadho_celery.core.records import MachineRecord, Present, own_versions
from shadho_celery.core.system import Clock, SystemClock
from shadho_celery.core.trial import Attempt, Event, Lost, Outcome, Params, Report, Result, Started, TrialState, whole
from shadho_celery.objective.call import Objective, call
from shadho_celery.objective.context import LocalContext
from shadho_celery.study.recorder import Recorder


class Executor(Protocol):
    """Runs attempts.

    It has seven methods, two more than other roles. While the store cannot be reached, the scheduler keeps its lock on
    the study with `keep`. It cannot use `poll` then, because `poll` confirms events that are not recorded yet.
    """

    def classes(self) -> Sequence[ComputeClass]:
        """Return the compute classes with live workers for this study, as of the last `poll`."""

    def submit(self, attempts: Sequence[Attempt]) -> None:
        """Send QUEUED attempts to their compute classes.

        Each attempt ends in an event, unless another attempt has ended its trial. Sending an attempt twice is harmless.
        A copy is sent while another attempt of its trial runs. It goes to another machine, and the first attempt that
        ends COMPLETE or PRUNED ends the other. An attempt with `only_on` runs only on that machine: if no worker there
        takes it soon, it ends LOST, unclaimed. A RUNNING attempt is known from an earlier run of the scheduler: it is
        not sent but watched, and also ends in an event.
        """

    def poll(self, seconds: float) -> Sequence[Event]:
        """Return events as soon as there are any, or an empty sequence after about `seconds`.

        The call also confirms that the events of the last call are recorded. After a crash, only unconfirmed events are
        returned again.
        """

    def keep(self) -> None:
        """Keep the scheduler's lock on the study while `poll` is not called. Call this every few seconds."""

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        """Take back the trials that no worker has claimed; they end LOST, unclaimed.

        With `running`, also stop the trials that run. With `pruned`, their workers are told that the reason is their
        reports, which they log. The events arrive some time later.
        """

    def note_end(self, event: Event, ended: Sequence[Sent], *, is_over: bool) -> None:
        """Free what the `ended` attempts hold, which are no longer live because of an event of `poll`.

        `is_over` says that their trial has no live attempt left.
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

#: used in place of the machine's name, and of the id of its storage
HOST = "this process"
STORAGES = {HOST: "local"}


def record_process(recorder: Recorder, at: float) -> None:
    """Record that this process runs trials from now on, and on which machine it does."""
    machine = Machine(host=HOST, cores=usable_cores().count, memory=ram_bytes())
    present = Present(INLINE_CLASS, 1, MachineRecord.of(machine, own_versions()))
    recorder.see({HOST}, at, lambda name: present)


class LocalExecutor:
    """Base of executors without a fleet: a queue of attempts for one compute class, `local`, and a list of events."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: deque[Attempt] = deque()
        self._events: list[Event] = []

    def poll(self, seconds: float) -> Sequence[Event]:
        events, self._events = self._events, []
        return events

    def keep(self) -> None:
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

    def _report(self, attempt: Attempt, step: int, loss: float) -> Report:
        at = self._clock.wall()
        report = Report(number=attempt.number, attempt=attempt.attempt, step=step, loss=loss, at=at)
        self._events.append(report)
        return report

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        number, which, at = attempt.number, attempt.attempt, self._clock.wall()
        result = Result(number=number, attempt=which, outcome=outcome, compute_class=INLINE_CLASS, host=HOST, at=at)
        self._events.append(result)


class InlineExecutor(LocalExecutor):
    """Runs one trial at a time in this process, inside `poll`. It has one slot of one class, `local`."""

    def __init__(
        self,
        objective: Objective,
        evaluate: Callable[[Params], object],
        checkpoints: Path = Path(".shadho/checkpoints"),
        study: str = "",
        *,
        objectives: Mapping[str, str] | None = None,
        prunes: Callable[[Attempt, Report], bool] = lambda attempt, report: False,
        code: str = "",
    ) -> None:
        """`evaluate` computes the objective's values from a trial's params (`Space.evaluate`). `study` is a name.

        `objectives` are the directions of the study's losses by name, if they have names. `prunes` is called with each
        report and returns whether its attempt should stop; it is needed because the scheduler cannot poll while an
        objective runs. `code` is the digest of the objective's version.
        """
        super().__init__(SystemClock())
        self._objective = objective
        self._evaluate = evaluate
        self._checkpoints = checkpoints
        self._study = study
        self._objectives = objectives
        self._prunes = prunes
        self._code = code or None

    def classes(self) -> Sequence[ComputeClass]:
        return [ComputeClass(name=INLINE_CLASS, slots=1, cores=1, storages=STORAGES)]

    def submit(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if attempt.state is TrialState.RUNNING:
                self._lose(attempt, "the process that ran it is gone", claimed=True)
            else:
                self._queue.append(attempt)

    def poll(self, seconds: float) -> Sequence[Event]:
        # With an empty queue there is nothing to wait for.
        if self._queue:
            self._run(self._queue.popleft())
        return super().poll(seconds)

    def _run(self, attempt: Attempt) -> None:
        self._start(attempt)
        is_stopped = False

        def report(step: int, loss: float) -> None:
            nonlocal is_stopped
            is_stopped = self._prunes(attempt, self._report(attempt, step, loss)) or is_stopped

        checkpoints = self._checkpoints / str(attempt.number if attempt.origin is None else attempt.origin)
        continued = None if attempt.origin is None else holds_files(checkpoints)
        context = LocalContext(
            study=self._study,
            trial=attempt.number,
            attempt=attempt.attempt,
            seed=attempt.seed,
            checkpoints=checkpoints,
            compute_class=INLINE_CLASS,
            budget=whole(attempt.budget),
            on_report=report,
            objectives=self._objectives,
            stopped=lambda: is_stopped,
        )
        outcome = call(
            self._objective,
            lambda: self._evaluate(attempt.params),
            context,
            self._clock,
            objectives=self._objectives,
        )
        # The outcome is also CANCELLED if the objective raises its own exception when it should stop.
        outcome = outcome.cancelled() if is_stopped else outcome
        self._end(attempt, replace(outcome, continued=continued, code=self._code))


class ByHandExecutor(LocalExecutor):
    """Executor for ask/tell: the caller fetches each attempt, runs it, and brings its result.

    It has one class, `local`, with a slot for each fetched or queued attempt, and a free slot while the caller asks for
    an attempt and none is queued.
    """

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
                if attempt.number not in {each.number for each in self._queue}:
                    self._queue.append(attempt)
            elif attempt.number not in self.fetched:
                self._lose(attempt, "the process that asked for it is gone")

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        super().cancel(numbers, running=running, pruned=pruned)
        for number in self.fetched.keys() & set(numbers) if running else ():
            self.bring(number, Outcome(state=TrialState.CANCELLED, error="cancelled"))

    def fetch(self) -> Attempt | None:
        """Return an attempt for the caller to run, or None if none is queued."""
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
        """Give up all fetched attempts. They end LOST, so their trials can be fetched again."""
        for attempt in self.fetched.values():
            self._lose(attempt, "it was asked for but never told")
        self.fetched.clear()
