"""The worker's end of a slot's process: runs one attempt after another in it, and replaces it after a death."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from shadho_celery.core.clock import SystemClock
from shadho_celery.core.trial import GangCall, Outcome, TrialState
from shadho_celery.runner.process import BrokenRecord, TrialProcess
from shadho_celery.runner.protocol import HARD_SECONDS, Ended, Gang, Reported, RunAttempt, Stop, TimeUp

#: seconds a trial has to return after its stop flag was raised
STOP_SECONDS = 2.0

#: seconds that a process may take to import its study modules, before they count as part of its trial
IMPORT_SECONDS = 300.0


class Runner:
    """Runs attempts in one slot's process, which is started when needed."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """`modules` are imported before the first trial; `environment` is added to this process's own."""
        self._arguments = ["shadho_celery.runner.child", *modules]
        self._environment = dict(environment)
        self._process: TrialProcess | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it lives; it gets ready while others do something else. Raises OSError."""
        self._living()

    def run(
        self,
        order: RunAttempt,
        on_report: Callable[[Reported], None],
        on_gang: Callable[[GangCall], None] = lambda call: None,
    ) -> Outcome:
        """Run one attempt to its end; return its outcome, which the end of the process is too.

        Seconds in which it waits for its replicas do not count against its timeout. `on_gang` gets its call for
        replicas, and that again once they have come.
        """
        began = SystemClock().now()
        try:
            process = self._living()
        except OSError as error:
            return Outcome(state=TrialState.FAILED, error=f"the slot's process cannot be started: {error}", seconds=0.0)
        limit = _TimeLimit(order.timeout, process)
        broken = ""
        try:
            ended = self._converse(process, order, on_report, on_gang, limit)
        except BrokenRecord as error:
            broken, ended = str(error), None
            process.kill()
        except BaseException:
            # Whatever it is, the trial must not go on beside the next one.
            process.kill()
            raise
        finally:
            limit.end()
        if ended is None:
            how, out_of_memory = process.death()
            text = broken or limit.reason or how
            return Outcome(
                state=TrialState.FAILED,
                error=text + (f"; it last printed:\n{process.tail}" if process.tail else ""),
                seconds=SystemClock().now() - began,
                out_of_memory=out_of_memory,
            )
        if ended.is_unfit:
            process.kill()
        return ended.outcome

    def stop_trial(self) -> None:
        """Raise the running trial's stop flag."""
        process = self._process
        if process is not None:
            process.send(Stop())

    def kill(self) -> None:
        """End the process and its children at once."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _living(self) -> TrialProcess:
        """Return the process, a new one where there is none that lives."""
        with self._lock:
            if self._process is None or not self._process.is_idle():
                if self._process is not None:
                    self._process.kill()
                    self._process = None
                self._process = TrialProcess(self._arguments, self._environment)
            return self._process

    @staticmethod
    def _converse(
        process: TrialProcess,
        order: RunAttempt,
        on_report: Callable[[Reported], None],
        on_gang: Callable[[GangCall], None],
        limit: _TimeLimit,
    ) -> Ended | None:
        """Send the order and hear what comes of it; None where the process has died."""
        process.forget_output()
        process.send(order)
        limit.begin()
        for record in iter(process.receive, None):
            if isinstance(record, Reported):
                on_report(record)
            elif isinstance(record, Gang):
                limit.pause(paused=not record.call.assembled)
                on_gang(record.call)
            elif isinstance(record, Ended):
                return record
        return None


class _TimeLimit:
    """Interrupts a trial when its time is up, and kills its process where that does not help."""

    def __init__(self, seconds: float | None, process: TrialProcess) -> None:
        self.seconds = seconds
        #: once it has killed the process, why
        self.reason = ""
        self._process = process
        self._over = threading.Event()
        self._is_paused = False
        #: held to end the limit, to pause it and to let it go on
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Let the time count from now on."""
        if self.seconds is not None:
            threading.Thread(target=self._watch, args=(self.seconds,), daemon=True).start()

    def pause(self, *, paused: bool) -> None:
        """Stop counting, or with `paused` False go on."""
        with self._changed:
            self._is_paused = paused
            self._changed.notify_all()

    def end(self) -> None:
        """End the limit with its trial: from now on the process may run another one."""
        with self._changed:
            self._over.set()
            self._changed.notify_all()

    def _watch(self, seconds: float) -> None:
        self._process.await_ready(IMPORT_SECONDS, self._over)
        with self._changed:
            left = seconds
            while left > 0 and not self._over.is_set():
                began, is_paused = time.monotonic(), self._is_paused
                self._changed.wait(None if is_paused else left)
                if not is_paused:
                    left -= time.monotonic() - began
            if not self._over.is_set():
                self._process.send(TimeUp())
        if self._over.wait(HARD_SECONDS):
            return
        with self._changed:
            if not self._over.is_set():
                self.reason = (
                    f"timed out after {seconds:g} s (--trial-timeout): it went on when it was interrupted, "
                    f"and was killed {HARD_SECONDS:g} s later"
                )
                self._process.kill()
