"""The worker's end of a slot's process: run one attempt after another in it, and replace it when it has died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from shadho_celery.core.clock import SystemClock
from shadho_celery.core.trial import GangCall, Outcome, TrialState
from shadho_celery.runner.process import BrokenRecord, TrialProcess
from shadho_celery.runner.protocol import HARD_SECONDS, Ended, Gang, Reported, RunAttempt, Stop, TimeUp

OnReport = Callable[[Reported], None]
OnGang = Callable[[GangCall], None]

#: seconds a trial has to return after its stop flag was set
STOP_SECONDS = 2.0

#: seconds for the import of the study modules; after that the import counts as part of the trial
IMPORT_SECONDS = 300.0


class Runner:
    """Runs attempts in one slot's process, and starts the process when it needs one."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """`modules` are imported before the first trial; `environment` is added to that of this process."""
        self._arguments = ["shadho_celery.runner.child", *modules]
        self._environment = dict(environment)
        self._process: TrialProcess | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it lives, without waiting until it is ready. Raises OSError."""
        self._living()

    def run(self, order: RunAttempt, on_report: OnReport, on_gang: OnGang = lambda call: None) -> Outcome:
        """Run one attempt to its end; return its outcome, also if its process died.

        `on_gang` gets its call for replicas, and a second one when the gang is assembled. The seconds in between do not
        count against its timeout.
        """
        began = SystemClock().now()
        try:
            process = self._living()
        except OSError as error:
            return Outcome(state=TrialState.FAILED, error=f"the slot's process cannot be started: {error}", seconds=0.0)
        limit = _TimeLimit(order.timeout, process)
        ended, broken = None, ""
        try:
            ended = _converse(limit, order, on_report, on_gang)
        except BrokenRecord as error:
            broken = str(error)
            process.kill()
        except BaseException:
            # The trial must not go on beside the next one.
            process.kill()
            raise
        finally:
            limit.end()
        if ended is None:
            how, out_of_memory = process.death()
            printed = f"; it last printed:\n{process.tail}" if process.tail else ""
            text, seconds = (broken or limit.reason or how) + printed, max(0.0, SystemClock().now() - began)
            return Outcome(state=TrialState.FAILED, error=text, seconds=seconds, out_of_memory=out_of_memory)
        if ended.is_unfit:
            process.kill()
        return ended.outcome

    def stop_trial(self) -> None:
        """Set the running trial's stop flag."""
        if (process := self._process) is not None:
            process.send(Stop())

    def kill(self) -> None:
        """Kill the process and its process tree."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _living(self) -> TrialProcess:
        """Return the process, a new one if the last one has died."""
        with self._lock:
            if self._process is not None and not self._process.is_idle():
                self._process.kill()
                self._process = None
            self._process = self._process or TrialProcess(self._arguments, self._environment)
            return self._process


class _TimeLimit:
    """Interrupts a trial when its time is up, and kills its process if that does not help."""

    def __init__(self, seconds: float | None, process: TrialProcess) -> None:
        self._seconds = seconds
        #: the error of the trial, once the limit has killed its process
        self.reason = ""
        self.process = process
        self._over = threading.Event()
        self._is_paused = False
        #: notified when the limit ends, is paused, or goes on
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Start counting."""
        if self._seconds is not None:
            threading.Thread(target=self._watch, args=(self._seconds,), daemon=True).start()

    def pause(self, *, paused: bool) -> None:
        """Stop counting, or go on if `paused` is False."""
        with self._changed:
            self._is_paused = paused
            self._changed.notify_all()

    def end(self) -> None:
        """End the limit with its trial, before the process runs another one."""
        with self._changed:
            self._over.set()
            self._changed.notify_all()

    def _watch(self, seconds: float) -> None:
        self.process.await_ready(IMPORT_SECONDS, self._over)
        with self._changed:
            left = seconds
            while left > 0 and not self._over.is_set():
                began, is_paused = time.monotonic(), self._is_paused
                self._changed.wait(None if is_paused else left)
                if not is_paused:
                    left -= time.monotonic() - began
            if not self._over.is_set():
                self.process.send(TimeUp())
        if self._over.wait(HARD_SECONDS):
            return
        with self._changed:
            if not self._over.is_set():
                self.reason = (
                    f"timed out after {seconds:g} s (--trial-timeout): it ignored its interruption "
                    f"and was killed {HARD_SECONDS:g} s later"
                )
                self.process.kill()


def _converse(limit: _TimeLimit, order: RunAttempt, on_report: OnReport, on_gang: OnGang) -> Ended | None:
    """Send the order and receive records until the trial ends; return None if the process has died."""
    limit.process.forget_output()
    limit.process.send(order)
    limit.begin()
    for record in iter(limit.process.receive, None):
        if isinstance(record, Reported):
            on_report(record)
        elif isinstance(record, Gang):
            limit.pause(paused=not record.call.assembled)
            on_gang(record.call)
        elif isinstance(record, Ended):
            return record
    return None
