"""The worker's end of a slot's process: run attempts in it one after another, and replace it when it has died."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from shadho_celery.core.clock import SystemClock
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.hardware import thread_variables
from shadho_celery.core.trial import GangCall, Memory, Outcome, TrialState
from shadho_celery.objective.memory import system_kills
from shadho_celery.runner import protocol
from shadho_celery.runner.output import Output, unstamped
from shadho_celery.runner.process_tree import MARK, kill_marked

log = logging.getLogger(__name__)

OnReport = Callable[[protocol.Reported], None]
OnGang = Callable[[GangCall], None]

#: seconds after the stop flag at which a trial is interrupted, and at which its process is killed. With the time until
#: the worker learns of it, a pruned trial's slot is free within about a second
INTERRUPT_SECONDS, STOP_SECONDS = 0.25, 0.7

#: seconds for the import of the study modules; after that, the import counts as part of the trial
IMPORT_SECONDS = 300.0

#: seconds to collect the ends of short trials while the process has more trials to run
GATHER_SECONDS = 0.001


#: prefixes of environment variables that trials do not get: our settings, and those with which clients of PostgreSQL,
#: Redis and RabbitMQ log in
_OURS = ("SHADHO_", "CELERY_", "PG", "REDIS", "AMQP", "RABBITMQ")
#: exceptions that trials get: addresses of gangs, and settings of the studies in tasks/
_ALLOWED = frozenset({"SHADHO_HOST", "SHADHO_LISTEN", "SHADHO_SVM_DATA"})
#: variable that names further variables for trials, joined by commas
PASS = "SHADHO_PASS"

#: seconds that a reaper has to kill its process tree
END_SECONDS = 5.0

#: Python's arguments for the reaper; -u (unbuffered) makes a trial's output complete even if it crashes
_REAPER = ("-u", "-m", "shadho_celery.runner.reaper")


class OtherCode(Exception):
    """An attempt was not started, because even a new process has another version of the study's code."""

    def __init__(self, code: CodeVersion) -> None:
        super().__init__(code.problem or code.digest)
        self.code = code


class Runner:
    """Runs attempts in one slot's process, and starts the process when needed.

    `send_ahead` and `run` are for the slot's thread, the other methods for any thread.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str],
        complain: Callable[[str], None] = log.warning,
    ) -> None:
        """Import `modules` before the first trial, and add `environment` to the environment of the process.

        `complain` is called with the reason why a trial's log is incomplete.
        """
        self._modules = modules
        self._environment = dict(environment)
        self._complain = complain
        self._process: TrialProcess | None = None
        #: folder of the shipped code that the process runs; "" for this machine's own modules
        self._folder = ""
        #: number of the running order, and of the last order that was sent
        self._current = 0
        self._last = 0
        #: (number, order) of the orders that the process has received but not started
        self._ahead: deque[tuple[int, protocol.RunAttempt]] = deque()
        #: True if such orders were taken back and the process has not confirmed it yet; it may have started one of them
        self._is_recalled = False
        self._is_running = False
        self._is_closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it is alive. Do not wait until it is ready. Raises OSError."""
        with self._lock:
            self._living("")

    def send_ahead(self, orders: Sequence[protocol.RunAttempt]) -> None:
        """Send the short attempts that run next, in this order. `run` then need not send them and wait.

        Attempts for which the pipe has no room are left to `run`.
        """
        if not orders:
            return
        with self._lock:
            try:
                process = self._living(orders[0].folder)
            except OSError:
                # `run` will raise it again.
                return
            numbered, size = [], 0
            for order in orders:
                self._last += 1
                numbered.append(replace(order, order=self._last))
                size += len(protocol.encode(numbered[-1]))
                if size > protocol.AHEAD_BYTES:
                    numbered.pop()
                    break
            self._ahead.extend((each.order, order) for each, order in zip(numbered, orders, strict=False))
        # Not under the lock: stopping the trial or killing the process must not wait for the pipe.
        process.send(*numbered)

    def recall(self) -> None:
        """Take back the attempts that were sent ahead and have not started."""
        with self._lock:
            if self._process is None or not self._ahead:
                return
            self._ahead.clear()
            self._is_recalled = True
            process, current, is_running = self._process, self._current, self._is_running
        if is_running:
            process.send(protocol.Recall(order=current))
        else:
            # The process may have just started one of them.
            process.kill()

    def run(self, order: protocol.RunAttempt, on_report: OnReport, on_gang: OnGang = lambda call: None) -> Outcome:
        """Run one attempt to its end. Return its outcome, even if its process died.

        `on_gang` is called when the trial calls for replicas, and again when its gang is complete. The seconds in
        between do not count against its timeout.

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
        limit, ended, reason = None, None, ""
        try:
            limit = None if order.timeout is None else _TimeLimit(order.timeout, process, number)
            ended = _converse(process, number, limit, on_report, on_gang, has_more=has_more)
        except BrokenRecord as error:
            reason = str(error)
            process.kill()
        except BaseException:
            # The trial must not continue beside the next one.
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
        how, out_of_memory = process.death()
        last_lines = process.output.last_lines(number)
        printed = f"; it last printed:\n{unstamped(last_lines)}" if last_lines else ""
        return Outcome(
            state=TrialState.FAILED,
            error=(reason or how) + printed,
            seconds=max(0.0, SystemClock().now() - began),
            out_of_memory=out_of_memory,
            log=last_lines or None,
            code=order.code or None,
        )

    def codes(self) -> Mapping[str, CodeVersion]:
        """Return the version of each study module that the process has imported; empty until it is ready.

        Shipped code is not included, because it is not on this machine's import path.
        """
        with self._lock:
            if self._process is None or self._folder:
                return {}
            if not (self._is_running or self._ahead or self._process.codes):
                # No attempt runs, so nothing else reads from the pipe that the process is ready.
                self._process.is_idle()
            return self._process.codes

    def set_threads(self, threads: int) -> None:
        """Set the number of threads that trials use, from the next trial on."""
        with self._lock:
            self._environment |= thread_variables(threads)
            process = self._process
        if process is not None:
            process.send(protocol.Threads(threads=threads))

    def stop_trial(self, how: type[protocol.Stop | protocol.Interrupt] = protocol.Stop) -> None:
        """Set the running trial's stop flag, or interrupt it."""
        with self._lock:
            process, current = self._process, self._current
        if process is not None:
            process.send(how(order=current))

    def kill(self) -> None:
        """Kill the process and its process tree."""
        with self._lock:
            process, self._process = self._process, None
            self._ahead.clear()
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the process and its process tree, and never start another one."""
        with self._lock:
            self._is_closed = True
        self.kill()

    def _begin(self, order: protocol.RunAttempt) -> tuple[TrialProcess, int, bool]:
        """Send an order, unless it was sent ahead. Return its process, its number, and whether more were sent ahead."""
        with self._lock:
            if self._process is not None and self._ahead and self._ahead[0][1] == order:
                self._is_running = True
                self._current, _ = self._ahead.popleft()
                return self._process, self._current, bool(self._ahead)
            process = self._living(order.folder)
            self._last += 1
            self._is_running, self._current, number = True, self._last, self._last
        process.send(replace(order, order=number))
        return process, number, False

    def _end(self, process: TrialProcess, ended: protocol.Ended | protocol.Refused | None) -> None:
        """Note the end of an order. Kill the process if it cannot run another, or may run one that was taken back."""
        is_unfit = isinstance(ended, protocol.Refused) or (ended is not None and ended.is_unfit)
        with self._lock:
            self._is_running = False
            if ended is None or is_unfit:
                # The orders that were sent ahead have not run, so `run` sends them again.
                self._ahead.clear()
            elif isinstance(ended, protocol.Ended) and ended.is_recalled:
                self._is_recalled = False
            is_over = ended is not None and (is_unfit or self._is_recalled)
        if is_over:
            process.kill()

    def _living(self, folder: str) -> TrialProcess:
        """Return a process for the code in a folder that has nothing to run. Start a new process if needed.

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
            # A process for shipped code imports its module at the first order, and none of this machine's modules.
            arguments = ["shadho_celery.runner.child", *([] if folder else self._modules)]
            self._process = TrialProcess(arguments, self._environment, self._complain)
        return self._process


class _TimeLimit:
    """Interrupts a trial when its time is up, and kills its process if that does not help."""

    def __init__(self, seconds: float, process: TrialProcess, number: int) -> None:
        """Start the clock for the order with this number."""
        #: error of the trial if its process was killed; "" if it was not
        self._reason = ""
        self._over = threading.Event()
        self._is_paused = False
        #: notified when the limit ends, pauses or continues
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, args=(seconds, process, number), daemon=True).start()

    def pause(self, *, paused: bool) -> None:
        """Pause the clock, or continue if `paused` is False."""
        with self._changed:
            self._is_paused = paused
            self._changed.notify_all()

    def end(self) -> str:
        """End the limit when its trial has ended. Return why it killed the process, or "" if it did not."""
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
            # Not inside the condition: if the process does not read, sending blocks, and `end` must not wait for that.
            process.send(protocol.TimeUp(order=number))
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


class BrokenRecord(Exception):
    """A slot's process sent something that is not a record."""


class TrialProcess:
    """One process of a slot, with its reaper, pipe and output. It starts when the object is created."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        complain: Callable[[str], None] = log.warning,
    ) -> None:
        """Start a process that runs `main` of the module ``arguments[0]``.

        `main` gets the pipe's descriptor and the other arguments. `complain` is called with the reason why a trial's
        log is incomplete. Raises OSError.
        """
        self.was_killed = False
        #: version of each study module that the process has imported; empty until it is ready
        self.codes: Mapping[str, CodeVersion] = {}
        self._code: int | None = None
        self._ready = threading.Event()
        self._received = bytearray()
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._system_kills = system_kills()
        self._mark = uuid.uuid4().hex
        with ExitStack() as ours, ExitStack() as theirs:
            self.output = Output(self._mark, complain)
            ours.callback(self.output.close)
            theirs.callback(self.output.end.close)
            self._pipe, pipe = socket.socketpair()
            ours.callback(self._close)
            theirs.callback(pipe.close)
            lifeline, self._lifeline = os.pipe()
            ours.callback(os.close, self._lifeline)
            theirs.callback(os.close, lifeline)
            self._reaper = subprocess.Popen(
                [sys.executable, *_REAPER, str(lifeline), arguments[0], str(pipe.fileno()), *arguments[1:]],
                pass_fds=[lifeline, pipe.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.output.end,
                stderr=subprocess.STDOUT,
                env={**without_credentials(os.environ), **environment, MARK: self._mark},
                # In a new session, Ctrl-C at the terminal does not reach the process.
                start_new_session=True,
            )
            # It has started: our ends stay open.
            ours.pop_all()
        self.output.start()

    def is_idle(self) -> bool:
        """Return whether the process is alive and has sent no record, except that it is ready."""
        if self.was_killed or self._code is not None or self._reaper.poll() is not None:
            return False
        with suppress(BrokenRecord, OSError, ValueError):
            while self._received or select.select([self._pipe], [], [], 0)[0]:
                if self._ready.is_set() or self.receive() is None:
                    return False
            return True
        return False

    def send(self, *records: protocol.ToChild) -> None:
        """Send records to the process, or do nothing if it has died.

        This blocks while the pipe is full. A few records always fit beside those that were sent ahead (AHEAD_BYTES).
        """
        for record in records:
            if isinstance(record, protocol.RunAttempt) and record.log:
                self.output.expect(record.order, record.log)
        with self._sending, suppress(OSError):
            self._pipe.sendall(b"".join(map(protocol.encode, records)))

    def receive(self, gather: float = 0.0) -> protocol.FromChild | None:
        """Return the process's next record, or None after it has ended. Raises BrokenRecord.

        If no record has been received yet, first wait `gather` seconds so that several arrive.
        """
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > protocol.MAX_RECORD:
                raise BrokenRecord("the trial's process sent an incomplete record")
            if gather:
                time.sleep(gather)
            try:
                part = self._pipe.recv(1 << 16)
            except OSError:
                part = b""
            if not part:
                return None
            self._received += part
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            record = protocol.decode_from_child(line)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise BrokenRecord(
                f"the trial's process sent something that is not a record ({type(error).__name__})"
            ) from error
        if isinstance(record, protocol.Ready) and not self._ready.is_set():
            self.codes = record.codes
            self._ready.set()
        return record

    def await_ready(self, seconds: float, over: threading.Event) -> None:
        """Wait until the process is ready, `over` is set, or the time is up."""
        for _ in range(int(seconds / 0.05)):
            if self._ready.is_set() or over.wait(0.05):
                return

    def kill(self) -> None:
        """Kill the process and its process tree."""
        self.was_killed |= self._code is None
        self._end()

    def death(self) -> tuple[str, Memory | None]:
        """Wait for the end of the process. Return how it ended, and which memory ran out if that was the cause."""
        self._reaper.send_signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._reaper.wait(timeout=END_SECONDS)
        code = self._end()
        if self.was_killed:
            return "the trial's process was killed", None
        if code == protocol.PIPE_LOST:
            return "the trial closed the pipe between its process and the worker", None
        if code >= 0:
            return f"the trial's process ended with exit code {code}", None
        # Real-time signals have numbers but no names.
        name = next((each.name for each in signal.Signals if each == -code), -code)
        text = f"the trial's process ended with signal {name}"
        if code != -signal.SIGKILL:
            return text, None
        if system_kills() > self._system_kills:
            return f"{text}: the system killed it because memory ran out", Memory.HOST
        return f"{text}, which this worker did not send; memory may have run out", Memory.HOST

    def _end(self) -> int:
        """End the process and its reaper, in any state they are in. Return the reaper's exit code."""
        with self._ending:
            if self._code is None:
                os.close(self._lifeline)
                # A trial may have stopped its reaper.
                self._reaper.send_signal(signal.SIGCONT)
                try:
                    self._code = self._reaper.wait(timeout=END_SECONDS)
                except subprocess.TimeoutExpired:
                    self.was_killed = True
                    self._reaper.kill()
                    self._code = self._reaper.wait()
                if self._code < 0:
                    # The reaper ends by its child's signal. If a trial has killed the reaper, the tree may be alive.
                    kill_marked(self._mark)
                self.output.join()
                self._close()
            return self._code

    def _close(self) -> None:
        with suppress(OSError):
            # With this, a thread that waits for a record notices the end of the pipe.
            self._pipe.shutdown(socket.SHUT_RDWR)
        self._pipe.close()


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a trial: the worker's environment without our settings and other credentials.

    The few settings that a trial needs are kept, and those named in SHADHO_PASS. Any variable that contains one of the
    removed passwords is removed too.
    """
    passed = _ALLOWED | {name.strip() for name in environment.get(PASS, "").split(",")}
    ours = {name: value for name, value in environment.items() if name.startswith(_OURS) and name not in passed}
    secrets = {secret for name, value in ours.items() for secret in _passwords(name, value)}
    return {
        name: value
        for name, value in environment.items()
        if name in passed or not (name in ours or value in secrets or secrets.intersection(_passwords("", value)))
    }


def _passwords(name: str, value: str) -> set[str]:
    """Return the passwords in a variable: those in its URLs, and its whole value if its name ends like a password's."""
    found = {value} if name.endswith(("PASSWORD", "PASS", "AUTH")) else set()
    # Several URLs of one broker are joined by semicolons.
    for part in value.split(";") if "://" in value else ():
        with suppress(ValueError):
            found.add(urlsplit(part).password or "")
    return found - {""}
