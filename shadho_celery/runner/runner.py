"""The worker's end of a slot's process: it runs attempts in the process, and replaces the process when it has died."""

from __future__ import annotations

import logging
import math
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from msgspec.structs import replace

from shadho_celery.core.code import CodeVersion
from shadho_celery.core.failures import PRINTED
from shadho_celery.core.files import attempt_folder
from shadho_celery.core.hardware import thread_variables
from shadho_celery.core.system import SystemClock
from shadho_celery.core.trial import GangCall, Outcome, TrialState
from shadho_celery.runner import protocol
from shadho_celery.runner.output import unstamped
from shadho_celery.runner.starting import Start, execute
from shadho_celery.runner.trial_process import BrokenRecord, TimeUp, TrialProcess

log = logging.getLogger(__name__)

OnReport = Callable[[protocol.Reported], None]
OnGang = Callable[[GangCall], None]

#: seconds from the moment when a trial's stop flag is set until the trial is interrupted, and until its process is
#: killed. They are short, so that the slot of a pruned trial is free within about a second
INTERRUPT_SECONDS, STOP_SECONDS = 0.25, 0.7

#: seconds for which the import of the study modules does not count against a trial's time limit
IMPORT_SECONDS = 300.0


class OtherCode(Exception):
    """An attempt was not started, because even a new process has another version of the study's code."""

    def __init__(self, code: CodeVersion) -> None:
        super().__init__(code.problem or code.digest)
        self.code = code


class Runner:
    """Runs attempts in one slot's process, which it starts and replaces as needed.

    Only the slot's thread may call `send_ahead` and `run`; any thread may call the other methods.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str],
        complain: Callable[[str], None] = log.warning,
        start: Start = execute,
    ) -> None:
        """The process imports `modules` before its first trial, and gets `environment` in addition to the worker's.

        `complain` is called with the reason if a trial's log is incomplete. `start` starts the process's reaper.
        """
        self._start_reaper = start
        self._modules = modules
        self._environment = dict(environment)
        self._complain = complain
        #: process that runs the next order (RunAttempt record); None if there is none, or if it was killed
        self._process: TrialProcess | None = None
        #: process that runs the current order, or None
        self._running: TrialProcess | None = None
        #: True if the running trial is the coordinator of a complete gang
        self._has_gang = False
        #: folder of the shipped code that the process runs; "" for this machine's own modules
        self._folder = ""
        #: numbers of the running order, and of the last order that was sent
        self._current = 0
        self._last = 0
        #: number of the last order whose trial was told of a preemption
        self._preempted = 0
        #: (number, order) of the orders that the process has received but not started
        self._ahead: deque[tuple[int, protocol.RunAttempt]] = deque()
        #: True if such orders were taken back but the process has not confirmed it yet, so it may start one of them
        self._is_recalled = False
        self._is_closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless there is one. This does not wait until it is ready. Raises OSError."""
        with self._lock:
            self._living("")

    def send_ahead(self, orders: Sequence[protocol.RunAttempt]) -> None:
        """Send short attempts ahead, so that `run`, called for them in the same order, need not send and wait.

        Attempts for which the pipe has no room are sent by `run`.
        """
        if not orders:
            return
        try:
            process = self._started(orders[0].folder)
        except OSError:
            # `run` will try again, and return the error as the trial's outcome.
            return
        with self._lock:
            if process is not self._process:
                # The process was killed meanwhile.
                return
            numbered, lines = [], b""
            for order in orders:
                self._last += 1
                record = replace(order, order=self._last)
                line = protocol.encode(record)
                if len(lines) + len(line) > protocol.AHEAD_BYTES:
                    break
                numbered.append(record)
                lines += line
            self._ahead.extend((each.order, order) for each, order in zip(numbered, orders, strict=False))
        # Send without the lock, so that stopping the trial or killing the process does not wait for the pipe.
        process.send_encoded(numbered, lines)

    def recall(self) -> None:
        """Take back the attempts that were sent ahead and have not started."""
        with self._lock:
            if self._process is None or not self._ahead:
                return
            self._ahead.clear()
            self._is_recalled = True
            process, current, is_running = self._process, self._current, self._running is not None
        if is_running:
            process.send(protocol.Tell(order=current, what="recall"))
        else:
            # The process may just have started one of these orders.
            process.kill()

    def run(self, order: protocol.RunAttempt, on_report: OnReport, on_gang: OnGang = lambda call: None) -> Outcome:
        """Run one attempt to its end. Return its outcome, also if the process died.

        `on_gang` is called when the trial calls for replicas, and again when its gang is complete. The time in between
        does not count against the trial's timeout. The trial is not interrupted before `on_gang` returns.

        If the process has another version of the study's code, it is replaced once, because the files may have been
        edited since. Raises OtherCode if the new process has another version too.
        """
        ended = self._run(order, on_report, on_gang)
        if isinstance(ended, protocol.Refused):
            ended = self._run(order, on_report, on_gang)
        if isinstance(ended, protocol.Refused):
            raise OtherCode(ended.code)
        return ended

    def _run(self, order: protocol.RunAttempt, on_report: OnReport, on_gang: OnGang) -> Outcome | protocol.Refused:
        began = SystemClock().now()
        try:
            process, number = self._begin(order)
        except OSError as error:
            return Outcome(state=TrialState.FAILED, error=f"the slot's process cannot be started: {error}", seconds=0.0)
        ended, reason, self._has_gang = None, "", False
        try:
            ended = self._converse(process, number, order.payload.timeout, on_report, on_gang)
        except (BrokenRecord, TimeUp) as error:
            reason = str(error)
            process.kill()
        except BaseException:
            # The trial must not continue while the next one runs.
            process.kill()
            raise
        finally:
            self._end(process, ended)
        if isinstance(ended, protocol.Refused):
            return ended
        if ended is not None and ended.outcome.state is not TrialState.FAILED:
            return ended.outcome
        if ended is not None:
            return replace(ended.outcome, log=process.output.last_lines(number) or None)
        death = process.death()
        # Remove the attempt's folder, which a command removes itself unless its process was killed.
        tried = order.attempt
        shutil.rmtree(attempt_folder(order.checkpoint_dir, tried.number, tried.attempt), ignore_errors=True)
        last_lines = process.output.last_lines(number)
        printed = f"{PRINTED}\n{unstamped(last_lines)}" if last_lines else ""
        return Outcome(
            state=TrialState.FAILED,
            error=(reason or death.how) + printed,
            seconds=max(0.0, SystemClock().now() - began),
            out_of_memory=death.out_of_memory,
            # If the process of a complete gang was killed, the training continues from its checkpoint (`rank_lost`).
            rank_lost=self._has_gang and death.is_unexplained,
            log=last_lines or None,
            code=order.payload.code or None,
        )

    def _converse(
        self,
        process: TrialProcess,
        number: int,
        timeout: float | None,
        on_report: OnReport,
        on_gang: OnGang,
    ) -> protocol.Ended | protocol.Refused | None:
        """Receive the records of an order until it ends or is refused. Return the last record, or None if the process
        died.

        A trial is interrupted after `timeout` seconds. Raises TimeUp if it ignores that.
        """
        now, left, is_interrupted = SystemClock().now, math.inf if timeout is None else timeout, False
        was_ready = process.is_ready
        until = now() + left + (0.0 if was_ready else IMPORT_SECONDS)
        while True:
            try:
                record = process.receive(until)
            except TimeUp:
                if is_interrupted:
                    raise TimeUp(
                        f"timed out after {timeout:g} s (trial timeout): it ignored its interruption "
                        f"and was killed {protocol.HARD_SECONDS:g} s later"
                    ) from None
                process.send(protocol.Tell(order=number, what="time up"))
                is_interrupted, until = True, now() + protocol.HARD_SECONDS
                continue
            if isinstance(record, protocol.Ready):
                if not was_ready:
                    # An interruption before this moment was ignored.
                    until, is_interrupted, was_ready = now() + left, False, True
            elif record is None or (record.order == number and isinstance(record, protocol.Ended | protocol.Refused)):
                return record
            elif record.order == number and isinstance(record, protocol.Reported) and not is_interrupted:
                # Later reports are dropped, because `on_report` may take longer than the interrupted trial has left.
                on_report(record)
            elif record.order == number and isinstance(record, protocol.Gang):
                self._has_gang = record.call.assembled
                if self._has_gang and until == math.inf:
                    until = now() + left
                elif not (self._has_gang or is_interrupted):
                    # The time in which the trial waits for its replicas does not count.
                    left, until = min(left, until - now()), math.inf
                on_gang(record.call)

    def codes(self) -> Mapping[str, CodeVersion]:
        """Return the version of each study module that the process has imported. The result is empty until it is ready.

        Shipped code is not included, because it is not on this machine's import path.
        """
        with self._lock:
            if self._process is None or self._folder:
                return {}
            if not (self._running or self._ahead or self._process.codes):
                # No attempt runs, so nothing else receives the record that the process is ready.
                self._process.is_idle()
            return self._process.codes

    def set_threads(self, threads: int) -> None:
        """Set the number of threads that trials use, from the next trial on."""
        with self._lock:
            self._environment |= thread_variables(threads)
            process = self._process
        if process is not None:
            process.send(protocol.Threads(threads=threads))

    def equip(self, environment: Mapping[str, str]) -> None:
        """Run the next trial in a new process with these environment variables. Call this between two trials."""
        with self._lock:
            self._environment = dict(environment)
        self.kill()

    def preempt(self) -> None:
        """Tell the running trial that its worker is preempted, unless it has already been told."""
        with self._lock:
            process, current = self._running, self._current
            if process is None or current == self._preempted:
                return
            self._preempted = current
        process.send(protocol.Tell(order=current, what="preempt"))

    def stop_trial(self, what: Literal["stop", "interrupt"] = "stop") -> None:
        """Set the running trial's stop flag, or interrupt it."""
        with self._lock:
            process, current = self._running, self._current
        if process is not None:
            process.send(protocol.Tell(order=current, what=what))

    def kill(self) -> None:
        """Kill the process and its process tree. A trial that runs or still waits for the start fails, and the slot's
        thread starts the next process.
        """
        with self._lock:
            process, self._process = self._running or self._process, None
            self._ahead.clear()
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the process and its process tree, and never start another one."""
        with self._lock:
            self._is_closed = True
        self.kill()

    def _begin(self, order: protocol.RunAttempt) -> tuple[TrialProcess, int]:
        """Send an order, unless it was sent ahead. Return its process and its number."""
        with self._lock:
            if self._process is not None and self._ahead and self._ahead[0][1] == order:
                self._running = self._process
                self._current, _ = self._ahead.popleft()
                return self._process, self._current
        process = self._started(order.folder)
        with self._lock:
            self._last += 1
            self._running, self._current, number = process, self._last, self._last
        process.send(replace(order, order=number))
        return process, number

    def _started(self, folder: str) -> TrialProcess:
        """Return a process as `_living` does, and wait until it has started. Raises OSError, also if it was killed."""
        while True:
            with self._lock:
                process = self._living(folder)
            if process.await_start():
                return process
            if process.was_killed:
                raise OSError("it was killed")
            # The prepared process has failed, so the next process starts in a new interpreter.
            process.kill()

    def _end(self, process: TrialProcess, ended: protocol.Ended | protocol.Refused | None) -> None:
        """Record the end of an order. Kill the process if it cannot run another order, if it may run an order that was
        taken back, or if it has been replaced.
        """
        is_unfit = isinstance(ended, protocol.Refused) or (ended is not None and ended.is_unfit)
        with self._lock:
            self._running = None
            if isinstance(ended, protocol.Ended) and ended.is_recalled:
                self._is_recalled = False
            is_over = ended is None or is_unfit or self._is_recalled or self._process is not process
            if is_over:
                # The orders that were sent ahead have not run. `run` sends them again to another process, which starts
                # now, without waiting for the end of this one.
                self._process = None
                self._ahead.clear()
                # If no process can be started, `run` will try again, and return the error as the trial's outcome.
                with suppress(OSError):
                    self._living(self._folder)
        if is_over and ended is not None:
            process.kill()

    def _living(self, folder: str) -> TrialProcess:
        """Return an idle process for the code in `folder`. Start a new process if needed.

        Raises OSError.
        """
        if self._is_closed:
            raise OSError("its worker stops")
        is_other = folder != self._folder
        if self._process is not None and (is_other or self._is_recalled or self._ahead or not self._process.is_idle()):
            self._process.kill()
            self._process = None
        if self._process is None:
            self._ahead.clear()
            self._is_recalled = False
            self._folder = folder
            # A process for shipped code imports none of this machine's modules, and the shipped module only at its
            # first order.
            arguments = ["shadho_celery.runner.child", *([] if folder else self._modules)]
            self._process = TrialProcess(arguments, self._environment, self._complain, self._start_reaper)
        return self._process
