"""The worker's end of a slot's process: it runs attempts in the process, and replaces the process when it has died."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from msgspec.structs import replace

from shadho_celery.core.code import CodeVersion
from shadho_celery.core.failures import PRINTED
from shadho_celery.core.hardware import thread_variables
from shadho_celery.core.system import SystemClock
from shadho_celery.core.threads import NoThread, start_thread
from shadho_celery.core.trial import GangCall, Outcome, TrialState
from shadho_celery.runner import protocol
from shadho_celery.runner.output import unstamped
from shadho_celery.runner.starting import Start, execute
from shadho_celery.runner.trial_process import BrokenRecord, TrialProcess

log = logging.getLogger(__name__)

OnReport = Callable[[protocol.Reported], None]
OnGang = Callable[[GangCall], None]

#: seconds after the stop flag was set, after which a trial is interrupted, the slot's next process is started, and the
#: trial's process is killed. A worker learns of a pruned trial soon, so the slot is free within about a second
INTERRUPT_SECONDS, NEXT_SECONDS, STOP_SECONDS = 0.25, 0.5, 0.7

#: seconds for which the import of the study modules does not count against a trial's time limit
IMPORT_SECONDS = 300.0

#: seconds to wait before reading while the process has more orders, so that several records arrive together
GATHER_SECONDS = 0.001


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
        #: process that runs the next order
        self._process: TrialProcess | None = None
        #: process that runs the current order; the same as `_process`, unless the next process has already been started
        self._running: TrialProcess | None = None
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
        """Send short attempts before `run` is called for them in this order, so that `run` need not send and wait.

        Attempts for which the pipe has no room are sent by `run`.
        """
        if not orders:
            return
        # If no process can be started, `run` will raise the error again.
        with suppress(OSError):
            self._send_ahead(self._started(orders[0].folder), orders)

    def _send_ahead(self, process: TrialProcess, orders: Sequence[protocol.RunAttempt]) -> None:
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
            process, current = self._process, self._current
            is_running = self._running is process
        if is_running:
            process.send(protocol.Tell(order=current, what="recall"))
        else:
            # The process may just have started one of these orders.
            process.kill()

    def run(self, order: protocol.RunAttempt, on_report: OnReport, on_gang: OnGang = lambda call: None) -> Outcome:
        """Run one attempt to its end. Return its outcome, also if the process died.

        `on_gang` is called when the trial calls for replicas, and again when its gang is complete. The time in between
        does not count against the trial's timeout.

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
            process, number, has_more = self._begin(order)
        except OSError as error:
            return Outcome(state=TrialState.FAILED, error=f"the slot's process cannot be started: {error}", seconds=0.0)
        limit, ended, reason, has_gang = None, None, "", False

        def note_gang(call: GangCall) -> None:
            nonlocal has_gang
            has_gang = call.assembled
            on_gang(call)

        try:
            timeout = order.payload.timeout
            limit = None if timeout is None else _TimeLimit(timeout, process, number)
            ended = _converse(process, number, limit, on_report, note_gang, has_more=has_more)
        except BrokenRecord as error:
            reason = str(error)
            process.kill()
        except NoThread as error:
            reason = f"the trial's timeout cannot be watched: {error}"
            process.kill()
        except BaseException:
            # The trial must not continue while the next one runs.
            process.kill()
            raise
        finally:
            if limit is not None:
                over = limit.end()
                reason = reason or over
            self._end(process, ended)
        if isinstance(ended, protocol.Refused):
            return ended
        if ended is not None and ended.outcome.state is not TrialState.FAILED:
            return ended.outcome
        if ended is not None:
            return replace(ended.outcome, log=process.output.last_lines(number) or None)
        death = process.death()
        last_lines = process.output.last_lines(number)
        printed = f"{PRINTED}\n{unstamped(last_lines)}" if last_lines else ""
        return Outcome(
            state=TrialState.FAILED,
            error=(reason or death.how) + printed,
            seconds=max(0.0, SystemClock().now() - began),
            out_of_memory=death.out_of_memory,
            # If the process of a complete gang was killed, the training continues from its checkpoint (`rank_lost`).
            rank_lost=has_gang and death.is_unexplained,
            log=last_lines or None,
            code=order.payload.code or None,
        )

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
        """Kill the process and its process tree."""
        with self._lock:
            processes = {each for each in (self._process, self._running) if each is not None}
            self._process = None
            self._ahead.clear()
        for process in processes:
            process.kill()

    def start_next(self) -> None:
        """Start a process for the next trial now, because the process of the running trial will probably be killed."""
        with self._lock:
            if self._running is not None and self._process is self._running:
                self._start_next()

    def replace(self) -> None:
        """Kill the process tree of the running trial, and start another process for the next trial.

        If the trial still waits for the start of its process, that process is killed.
        """
        with self._lock:
            process = self._running or self._process
            if self._process is process:
                self._start_next()
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the process and its process tree, and never start another one."""
        with self._lock:
            self._is_closed = True
        self.kill()

    def _begin(self, order: protocol.RunAttempt) -> tuple[TrialProcess, int, bool]:
        """Send an order, unless it was sent ahead. Return its process, its number, and whether further orders were sent
        ahead.
        """
        with self._lock:
            if self._process is not None and self._ahead and self._ahead[0][1] == order:
                self._running = self._process
                self._current, _ = self._ahead.popleft()
                return self._process, self._current, bool(self._ahead)
        process = self._started(order.folder)
        with self._lock:
            self._last += 1
            self._running, self._current, number = process, self._last, self._last
        process.send(replace(order, order=number))
        return process, number, False

    def _started(self, folder: str) -> TrialProcess:
        """Return a process as `_living` does, and wait until it has started. Raises OSError."""
        while True:
            with self._lock:
                process = self._living(folder)
            if process.await_start():
                return process
            # The next process will be started by a new interpreter.
            process.kill()

    def _end(self, process: TrialProcess, ended: protocol.Ended | protocol.Refused | None) -> None:
        """Record the end of an order. Kill the process if it cannot run another order, if it may run an order that was
        taken back, or if it has been replaced.
        """
        is_unfit = isinstance(ended, protocol.Refused) or (ended is not None and ended.is_unfit)
        with self._lock:
            self._running = None
            if ended is None or is_unfit:
                # The orders that were sent ahead have not run. `run` sends them again to another process.
                self._ahead.clear()
            elif isinstance(ended, protocol.Ended) and ended.is_recalled:
                self._is_recalled = False
            is_replaced = self._process is not process
            is_over = ended is not None and (is_unfit or self._is_recalled or is_replaced)
            if (is_over or ended is None) and not is_replaced:
                self._start_next()
        if is_over:
            process.kill()

    def _start_next(self) -> None:
        """Start a process for the next trial, without waiting for the end of the current process."""
        self._process = None
        # If no process can be started, `run` will raise the error.
        with suppress(OSError):
            self._living(self._folder)

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


class _TimeLimit:
    """Time limit of a trial: interrupts the trial at its end, and kills its process if it does not return."""

    def __init__(self, seconds: float, process: TrialProcess, number: int) -> None:
        """Start the clock for the order with this number. Raises NoThread."""
        #: error of the trial if this object has killed its process, else ""
        self._reason = ""
        self._over = threading.Event()
        self._is_paused = False
        #: notified when the trial ends, and when the clock pauses or continues
        self._changed = threading.Condition()
        start_thread(threading.Thread(target=self._watch, args=(seconds, process, number), daemon=True))

    def pause(self, *, paused: bool) -> None:
        """Pause the clock, or continue if `paused` is False."""
        with self._changed:
            self._is_paused = paused
            self._changed.notify_all()

    def end(self) -> str:
        """Stop the clock, because the trial has ended. Return why its process was killed, or "" if it was not."""
        with self._changed:
            self._over.set()
            self._changed.notify_all()
            return self._reason

    def _watch(self, seconds: float, process: TrialProcess, number: int) -> None:
        process.await_ready(IMPORT_SECONDS, self._over)
        with self._changed:
            left = seconds
            while left > 0 and not self._over.is_set():
                began, is_paused = time.monotonic(), self._is_paused
                self._changed.wait(None if is_paused else left)
                if not is_paused:
                    left -= time.monotonic() - began
            is_over = self._over.is_set()
        if not is_over:
            # Send without the condition: sending blocks if the process does not read, and `end` must not wait for that.
            process.send(protocol.Tell(order=number, what="time up"))
        if self._over.wait(protocol.HARD_SECONDS):
            return
        with self._changed:
            if not self._over.is_set():
                self._reason = (
                    f"timed out after {seconds:g} s (trial timeout): it ignored its interruption "
                    f"and was killed {protocol.HARD_SECONDS:g} s later"
                )
                process.kill()


def _converse(
    process: TrialProcess,
    number: int,
    limit: _TimeLimit | None,
    on_report: OnReport,
    on_gang: OnGang,
    *,
    has_more: bool,
) -> protocol.Ended | protocol.Refused | None:
    """Receive the records of an order until it ends or is refused. Return the last record, or None if the process died.

    `has_more` is True if the process has more orders to run.
    """
    while (record := process.receive(GATHER_SECONDS if has_more else 0.0)) is not None:
        if isinstance(record, protocol.Ready) or record.order != number:
            continue
        if isinstance(record, protocol.Reported):
            on_report(record)
        elif isinstance(record, protocol.Gang):
            if limit is not None:
                limit.pause(paused=not record.call.assembled)
            on_gang(record.call)
        else:
            return record
    return None
