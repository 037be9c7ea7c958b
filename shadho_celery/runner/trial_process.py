"""Handle of a slot's live process: its reaper, pipe and output."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import msgspec

from shadho_celery.core.code import CodeVersion
from shadho_celery.core.system import SystemClock
from shadho_celery.core.trial import Memory
from shadho_celery.objective.call import system_kills
from shadho_celery.runner import protocol
from shadho_celery.runner.output import Output
from shadho_celery.runner.process_tree import MARK, kill_marked
from shadho_celery.runner.starting import Start, is_readable

#: seconds that a reaper has to kill its process tree and end
END_SECONDS = 5.0


class Death(NamedTuple):
    """How a slot's process ended."""

    how: str
    #: kind of memory that ran out, if that was or may have been the cause
    out_of_memory: Memory | None = None
    #: True if the process was killed by something else than this worker, and the system has not recorded that memory
    #: ran out
    is_unexplained: bool = False


class BrokenRecord(Exception):
    """Raised if a slot's process has sent something that is not a record."""


class TimeUp(Exception):
    """Raised if a slot's process has sent no record in time."""


class TrialProcess:
    """One process of a slot, with its reaper, pipe and output. The process starts when the object is created."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        complain: Callable[[str], None],
        start: Start,
    ) -> None:
        """Start a process that runs `main` of the module ``arguments[0]``.

        `main` gets the pipe's descriptor and the other arguments. `complain` is called with the reason if a trial's log
        is incomplete. Raises OSError if the process cannot be started.
        """
        self.was_killed = False
        #: version of each study module that the process has imported; empty until it is ready
        self.codes: Mapping[str, CodeVersion] = {}
        #: True once it has sent `Ready`
        self.is_ready = False
        self._code: int | None = None
        #: waits for a record or for the end of the reaper
        self._poll: select.poll | None = None
        self._received = bytearray()
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._system_kills = system_kills()
        self._mark = uuid.uuid4().hex
        with ExitStack() as ours, ExitStack() as theirs:
            self.output = Output(self._mark, complain)
            theirs.callback(self.output.end.close)
            # Start the thread before the process: if the thread cannot start, no process has to be killed.
            self.output.start()
            ours.callback(self.output.join)
            self._pipe, pipe = socket.socketpair()
            ours.callback(self._close)
            theirs.callback(pipe.close)
            lifeline, self._lifeline = os.pipe()
            ours.callback(os.close, self._lifeline)
            theirs.callback(os.close, lifeline)
            marked = {**environment, MARK: self._mark}
            self._reaper = start(arguments, marked, lifeline, pipe.fileno(), self.output.end)
            # The process has started, so keep this process's ends open.
            ours.pop_all()

    def await_start(self) -> bool:
        """Wait until the process has started. Return False if the prepared process has failed to start it."""
        return self._reaper.await_start()

    def is_idle(self) -> bool:
        """Return whether the process is alive and has sent no record except `Ready`."""
        if self.was_killed or self._code is not None or self._reaper.poll() is not None:
            return False
        with suppress(BrokenRecord, OSError, ValueError):
            while self._received or is_readable(self._pipe, 0.0):
                if self.is_ready or self.receive() is None:
                    return False
            return True
        return False

    def send(self, *records: protocol.ToChild) -> None:
        """Send records to the process, or do nothing if it has died.

        This blocks while the pipe is full. Orders that were sent ahead fill at most a third of the pipe (AHEAD_BYTES),
        so there is room for a few short records.
        """
        self.send_encoded(records, b"".join(map(protocol.encode, records)))

    def send_encoded(self, records: Sequence[protocol.ToChild], lines: bytes) -> None:
        """Do the same as `send` for records that the caller has already encoded as `lines`."""
        for record in records:
            if isinstance(record, protocol.RunAttempt) and record.log:
                self.output.expect(record.order, record.log)
        with self._sending, suppress(OSError):
            self._pipe.sendall(lines)

    def receive(self, until: float = math.inf) -> protocol.FromChild | None:
        """Return the process's next record, or None after it has ended. Raises BrokenRecord, and TimeUp at the time
        `until` of the system clock.
        """
        if SystemClock.now() >= until:
            raise TimeUp
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > protocol.MAX_RECORD:
                raise BrokenRecord("the trial's process sent an incomplete record")
            try:
                part = self._part(until)
            except (OSError, ValueError):
                # Another thread has closed the pipe.
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
        if isinstance(record, protocol.Ready) and not self.is_ready:
            self.codes, self.is_ready = record.codes, True
        return record

    def _part(self, until: float) -> bytes:
        """Wait for bytes from the process, and return them, or b"" after its end."""
        with suppress(BlockingIOError):
            # If trials are short, the next record has usually arrived already.
            return self._pipe.recv(1 << 16, socket.MSG_DONTWAIT)
        return self._pipe.recv(1 << 16) if self._await_record(until) else b""

    def _await_record(self, until: float) -> bool:
        """Wait until there is something to receive. Return False if the reaper ends before that. Raises TimeUp.

        Waiting for the pipe alone is not enough: if a trial has killed its reaper, forks of the trial may keep the pipe
        open.
        """
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._pipe, select.POLLIN)
            if (reaper := self._reaper.fileno()) >= 0:
                self._poll.register(reaper, select.POLLIN)
        pipe = self._pipe.fileno()
        while (seconds := until - SystemClock.now()) > 0:
            # `poll` cannot wait for longer than some weeks.
            if pipe in [ready for ready, _ in self._poll.poll(1000 * min(seconds, 3600.0))]:
                return True
            if self._reaper.poll() is not None:
                # A record may have arrived just before.
                return is_readable(pipe, 0.0)
        raise TimeUp

    def kill(self) -> None:
        """Kill the process and its process tree."""
        self.was_killed |= self._code is None
        self._end()

    def death(self) -> Death:
        """Wait for the end of the process, and describe it."""
        self._reaper.send_signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._reaper.wait(timeout=END_SECONDS)
        code = self._end()
        if self.was_killed:
            return Death("the trial's process was killed")
        if code == protocol.PIPE_LOST:
            return Death("the trial closed the pipe between its process and the worker")
        if code >= 0:
            return Death(f"the trial's process ended with exit code {code}")
        # Real-time signals have no names.
        name = next((each.name for each in signal.Signals if each == -code), -code)
        text = f"the trial's process ended with signal {name}"
        if code != -signal.SIGKILL:
            return Death(text)
        if system_kills() > self._system_kills:
            return Death(f"{text}: the system killed it because memory ran out", Memory.HOST)
        unexplained = f"{text}, which this worker did not send; memory may have run out"
        return Death(unexplained, Memory.HOST, is_unexplained=True)

    def _end(self) -> int:
        """End the process and its reaper, even if they are stopped or dead. Return the reaper's exit code."""
        with self._ending:
            if self._code is None:
                os.close(self._lifeline)
                # A trial may have stopped its reaper.
                self._reaper.send_signal(signal.SIGCONT)
                try:
                    self._code = self._reaper.wait(timeout=END_SECONDS)
                except subprocess.TimeoutExpired:
                    self.was_killed = True
                    self._reaper.send_signal(signal.SIGKILL)
                    self._code = self._reaper.wait()
                if self._code < 0:
                    # The reaper ends by the signal that ended its child. But a trial may have killed the reaper, so
                    # that the process tree is still alive.
                    kill_marked(self._mark)
                self.output.join()
                self._close()
            return self._code

    def _close(self) -> None:
        with suppress(OSError):
            # This wakes a thread that waits for a record.
            self._pipe.shutdown(socket.SHUT_RDWR)
        self._pipe.close()
