"""The parent's handle of a process under its reaper: a pipe of records, its output, and how it ended."""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from shadho_celery.core.code import CodeVersion
from shadho_celery.core.trial import Memory
from shadho_celery.objective.memory import system_kills
from shadho_celery.runner import protocol
from shadho_celery.runner.output import Output
from shadho_celery.runner.process_tree import MARK, kill_marked

log = logging.getLogger(__name__)

#: prefixes of the names of our settings, and of those with which clients of PostgreSQL, Redis and RabbitMQ log in
_OURS = ("SHADHO_", "CELERY_", "PG", "REDIS", "AMQP", "RABBITMQ")
#: those that trials get: addresses of gangs, and the settings of the studies in tasks/
_ALLOWED = frozenset({"SHADHO_HOST", "SHADHO_LISTEN", "SHADHO_SVM_DATA"})
#: variable that names further variables for trials, joined by commas
PASS = "SHADHO_PASS"

#: seconds that a reaper has to kill its process tree
END_SECONDS = 5.0

#: Python's arguments for the reaper; unbuffered, so that a trial's output is complete after its crash
_REAPER = ("-u", "-m", "shadho_celery.runner.reaper")


class BrokenRecord(Exception):
    """The trial's process sent something other than a record."""


class TrialProcess:
    """One process, which is started when created and ended once."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        complain: Callable[[str], None] = log.warning,
    ) -> None:
        """Start `main` of the module that is the first of `arguments`. `main` gets the pipe's descriptor and the other
        arguments.

        `complain` is called with the reason why a trial's log is incomplete. Raises OSError.
        """
        self.was_killed = False
        #: code of each study module as the process has imported it, once it is ready
        self.codes: Mapping[str, CodeVersion] = {}
        self._code: int | None = None
        self._ready = threading.Event()
        self._received = bytearray()
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._system_kills = system_kills()
        self._mark = uuid.uuid4().hex
        self.output = Output(self._mark, complain)
        self._pipe, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        try:
            self._reaper = subprocess.Popen(
                [sys.executable, *_REAPER, str(lifeline), arguments[0], str(theirs.fileno()), *arguments[1:]],
                pass_fds=[lifeline, theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.output.end,
                stderr=subprocess.STDOUT,
                env={**without_credentials(os.environ), **environment, MARK: self._mark},
                # Ctrl-C at the terminal does not reach it.
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            self._close()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
            self.output.end.close()

    def is_idle(self) -> bool:
        """Return whether it is alive and has sent nothing; its first record, that it is ready, does not count."""
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

        This blocks while the pipe is full. A few records always fit, see AHEAD_BYTES.
        """
        for record in records:
            if isinstance(record, protocol.RunAttempt) and record.log:
                self.output.expect(record.order, record.log)
        with self._sending, suppress(OSError):
            self._pipe.sendall(b"".join(map(protocol.encode, records)))

    def receive(self, gather: float = 0.0) -> protocol.FromChild | None:
        """Return its next record, or None after it has ended. Raises BrokenRecord.

        If there is none yet, let more of them arrive for `gather` seconds.
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
        """Wait until it is ready, `over` is set, or the time is up."""
        for _ in range(int(seconds / 0.05)):
            if self._ready.is_set() or over.wait(0.05):
                return

    def kill(self) -> None:
        """Kill it and its process tree."""
        self.was_killed |= self._code is None
        self._end()

    def death(self) -> tuple[str, Memory | None]:
        """Return how it ended, and which memory ran out if that was the cause."""
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
        """End the process and its reaper in any state. Return the reaper's exit code."""
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
                    # It exits with its child's signal. If the child has killed the reaper, the tree may still be alive.
                    kill_marked(self._mark)
                self.output.join()
                self._close()
            return self._code

    def _close(self) -> None:
        with suppress(OSError):
            # A thread that waits for a record sees the end of the pipe.
            self._pipe.shutdown(socket.SHUT_RDWR)
        self._pipe.close()


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a trial: the worker's, without our settings except the few that it needs.

    A variable of the user that contains one of the removed passwords is removed too.
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
    """Return the passwords in a variable: that of each URL in it, or its whole value if its name says so."""
    found = {value} if name.endswith(("PASSWORD", "PASS", "AUTH")) else set()
    # Several URLs of one broker are joined by semicolons.
    for part in value.split(";") if "://" in value else ():
        with suppress(ValueError):
            found.add(urlsplit(part).password or "")
    return found - {""}
