"""Start of a slot's process: in a new interpreter, or faster by a fork of a prepared process (`fork_server`).

This module also removes the credentials of broker, Redis, store and signing key from the environment of trials.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any, TypeAlias
from urllib.parse import unquote, urlsplit

from shadho_celery.core.checks import one_line, short
from shadho_celery.core.hardware import thread_variables
from shadho_celery.core.system import SystemClock
from shadho_celery.errors import UsageError
from shadho_celery.runner import protocol
from shadho_celery.runner.process_tree import MARK, UNMARKED, shielded

#: prefixes of environment variables that trials do not get: settings of this package, and variables with which clients
#: of PostgreSQL, Redis and RabbitMQ log in
_OURS = ("SHADHO_", "CELERY_", "PG", "REDIS", "AMQP", "RABBITMQ")
#: variables that trials get in spite of their prefix: addresses of gangs, and settings of the studies in tasks/
_ALLOWED = frozenset({"SHADHO_HOST", "SHADHO_LISTEN", "SHADHO_SVM_DATA"})
#: variables that are not secret, even if their value happens to equal a password, such as postgres
_PUBLIC = frozenset({"USER", "LOGNAME", "USERNAME", "HOSTNAME", "HOST", "HOME", "PATH", "SHELL", "LANG", "TERM"})
#: a password in a connection string, such as "host=db password=secret", or in the query of a URL
_KEYWORD = re.compile(r"\b(?:password|passwd|pwd)\s*=\s*['\"]?([^\s;&'\"]+)", re.IGNORECASE)
#: variable that names further variables that trials get, separated by commas
PASS = "SHADHO_PASS"


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a trial: the worker's environment without settings of this package and credentials.

    The settings in `_ALLOWED` and the variables named in SHADHO_PASS are kept. Other variables that contain one of the
    removed passwords are removed too.
    """
    passed = _ALLOWED | _passed(environment)
    ours = {name: value for name, value in environment.items() if name.startswith(_OURS) and name not in passed}
    secrets = {secret for name, value in ours.items() for secret in _passwords(name, value)}
    return _without(secrets, {name: value for name, value in environment.items() if name not in ours}, passed)


def without_passwords(urls: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that contain a password in one of these URLs.

    Settings of this package and its servers, and the variables named in SHADHO_PASS, are kept.
    """
    secrets = {secret for url in urls for secret in _passwords("", url)}
    ours = {name for name in environment if name.startswith(_OURS)}
    return _without(secrets, environment, ours | _passed(environment))


def _without(secrets: set[str], environment: Mapping[str, str], kept: Collection[str]) -> dict[str, str]:
    """Return the environment without the variables that contain a secret, except those in `kept` and `_PUBLIC`."""
    return {
        name: value
        for name, value in environment.items()
        if name in kept or name in _PUBLIC or not (value in secrets or secrets.intersection(_passwords("", value)))
    }


def _passed(environment: Mapping[str, str]) -> set[str]:
    return {name.strip() for name in environment.get(PASS, "").split(",")}


def _passwords(name: str, value: str) -> set[str]:
    """Return the passwords in a variable, each as it is written and with its escapes (%40) decoded.

    These are passwords in URLs and connection strings, and the whole value if the name ends with PASSWORD, PASS or
    AUTH.
    """
    found = {value} if name.endswith(("PASSWORD", "PASS", "AUTH")) else set()
    found.update(_KEYWORD.findall(value))
    # Several URLs of one broker are joined by semicolons.
    for part in value.split(";") if "://" in value else ():
        with suppress(ValueError):
            found.add(urlsplit(part).password or "")
    return {*found, *map(unquote, found)} - {""}


log = logging.getLogger(__name__)

#: environment variable with the way in which a worker starts the processes of its slots: fork (the default), or spawn,
#: a new interpreter for each
START = "SHADHO_START"

#: Python's arguments for the processes; -u (unbuffered) makes a trial's output complete even if it crashes
_REAPER = ("-u", "-m", "shadho_celery.runner.reaper")
_SERVER = ("-u", "-m", "shadho_celery.runner.fork_server")

#: seconds that a prepared process has to import its modules and fork; and seconds after its failure for which no
#: prepared process is used
FORK_SECONDS, RETRY_SECONDS = 60.0, 60.0

#: seconds after which a thread that waits for a message checks whether another thread has received it
AGAIN_SECONDS = 0.1

#: seconds that a prepared process that does not start a reaper has to end by itself
END_SECONDS = 0.5

#: maximum bytes of complaints that are read
MAX_COMPLAINT_BYTES = 100_000


#: handle of a reaper process
Reaper: TypeAlias = "_Executed | _Forked"
#: function that starts a reaper, with the arguments of `execute`
Start: TypeAlias = "Callable[[Sequence[str], Mapping[str, str], int, int, IO[bytes]], Reaper]"


class _Executed(subprocess.Popen[bytes]):
    """A reaper in a new interpreter."""

    _pidfd = -1

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the reaper ends, or -1 if the system has none."""
        if self._pidfd < 0 and sys.platform == "linux":
            with suppress(OSError):
                self._pidfd = os.pidfd_open(self.pid)
        return self._pidfd

    def __del__(self, *arguments: Any, **keywords: Any) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
        super().__del__(*arguments, **keywords)

    def await_start(self) -> bool:
        """Return True, because the reaper has already started."""
        return True


def execute(
    arguments: Sequence[str], environment: Mapping[str, str], lifeline: int, pipe: int, output: IO[bytes]
) -> Reaper:
    """Start a reaper in a new interpreter. Its child runs `main` of the module ``arguments[0]``. Raises OSError.

    `main` gets the descriptor `pipe` and the other arguments. `environment` is added to this process's environment
    without credentials. Standard output and standard error go to `output`. The caller closes the descriptors.
    """
    with shielded():
        return _Executed(
            [sys.executable, *_REAPER, str(lifeline), arguments[0], str(pipe), *arguments[1:]],
            pass_fds=[lifeline, pipe],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**without_credentials(os.environ), **environment},
            # In a new session, Ctrl-C at the terminal does not reach the process.
            start_new_session=True,
        )


def is_readable(end: socket.socket | int, seconds: float | None) -> bool:
    """Wait up to `seconds` until there is something to receive or the other end is closed. Return whether that
    happened.
    """
    # select is not used, because it cannot wait for descriptors above 1,023.
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


class _Forked:
    """A reaper that a prepared process forks. It sends its pidfd over the status socket, and at its end the exit code.

    The methods do the same as those of `_Executed`.
    """

    def __init__(self, status: socket.socket, server: _Server, servers: ForkServers) -> None:
        """`server` is the prepared process, which `servers` has started."""
        self._status, self._server, self._servers = status, server, servers
        self._pidfd: int | None = None
        self._code: int | None = None
        self._was_given_up = False
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self._status.close()
        if self._pidfd is not None:
            os.close(self._pidfd)

    def poll(self) -> int | None:
        self._receive(0.0, lambda: self._code is not None)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code like `subprocess.Popen.wait`. If the reaper has not started yet, give it up."""
        with self._lock:
            if self._pidfd is None and self._code is None and not is_readable(self._status, 0.0):
                # The prepared process may still be importing. If it forks later, the reaper finds its lifeline closed
                # and ends.
                self._was_given_up, self._code = True, -signal.SIGKILL
                # This wakes a thread that waits for the start.
                with suppress(OSError):
                    self._status.shutdown(socket.SHUT_RDWR)
        if not self._receive(timeout, lambda: self._code is not None) or self._code is None:
            raise subprocess.TimeoutExpired("the reaper", timeout or 0.0)
        return self._code

    def send_signal(self, sig: int) -> None:
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)

    def fileno(self) -> int:
        return self._status.fileno()

    def await_start(self) -> bool:
        self._receive(FORK_SECONDS, lambda: self._pidfd is not None or self._code is not None)
        if self._pidfd is None and not self._was_given_up:
            self._servers.give_up(self._server)
        self._servers.on_complaints()
        return self._pidfd is not None

    def _receive(self, seconds: float | None, is_done: Callable[[], bool]) -> bool:
        """Receive messages until `is_done` returns True, but no longer than `seconds`. Return whether it does."""
        clock = SystemClock()
        until = math.inf if seconds is None else clock.now() + seconds
        while not is_done():
            # Wait in short steps: if another thread receives the message, this thread is not woken.
            if not is_readable(self._status, min(max(0.0, until - clock.now()), AGAIN_SECONDS)):
                if clock.now() >= until:
                    return is_done()
                continue
            with self._lock:
                if not is_done() and is_readable(self._status, 0.0):
                    self._take()
        return True

    def _take(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._status, 64, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            message, descriptors = b"", []
        if descriptors:
            self._pidfd = descriptors[0]
        else:
            # A reaper that was killed sends no code. A reaper whose pidfd could not be received counts as killed.
            self._code = -signal.SIGKILL if message in (b"", b"started") else int(message)


class _Server:
    """A prepared process."""

    def __init__(self, environment: Mapping[str, str], preload: Sequence[str], complaints: int) -> None:
        """`complaints` is the descriptor of the file to which it appends complaints, one a line."""
        # SOCK_SEQPACKET keeps the boundaries of messages.
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(FORK_SECONDS)
        with control, shielded():
            self.process = subprocess.Popen(
                [sys.executable, *_SERVER, *preload],
                stdin=control.fileno(),
                stdout=complaints,
                env=environment,
                start_new_session=True,
            )

    def close(self, seconds: float = 0.0) -> int:
        """End the process: wait `seconds`, then kill it. Return its exit code, which is negative if it was killed."""
        self.control.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        return self.process.wait()


def start_method() -> str:
    """Return how the processes of slots start: fork or spawn, as SHADHO_START says. Raises UsageError for another
    value.
    """
    if (method := os.environ.get(START, "fork")) not in ("fork", "spawn"):
        raise UsageError(f"{START}={short(method)} is not allowed; set it to fork or spawn, or leave it out")
    return method


def _can_fork() -> bool:
    """Return whether the processes of slots can be forked: on Linux, unless SHADHO_START is spawn."""
    if sys.platform != "linux" or start_method() != "fork":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("complaints"))
    except (AttributeError, OSError):
        # Python was built without these functions, or this kernel does not have or allow them.
        return False
    return True


class ForkServers:
    """Starts reapers by forking a prepared process.

    A prepared process has imported the modules that all trials need, so a slot's process begins within hundredths of a
    second. If a prepared process fails, reapers are started in new interpreters for RETRY_SECONDS.
    """

    def __init__(self, preload: Sequence[str] = (), complain: Callable[[str], None] = log.warning) -> None:
        """Prepared processes also import `preload`. `complain` is called with the reason if such a process fails."""
        self.preload = preload
        #: called in a slot's thread, before the slot's trial begins, because there may be new complaints
        self.on_complaints: Callable[[], object] = lambda: None
        self._complain = complain
        self._server: _Server | None = None
        #: time from which on prepared processes are used
        self._used_from = -math.inf if _can_fork() else math.inf
        self._is_closed = False
        #: file in memory with the complaints of prepared processes and about them; it stays open
        self._complaints = -1 if self._used_from == math.inf else os.memfd_create("complaints")
        self._lock = threading.Lock()

    def complaints(self) -> Sequence[str]:
        """Return the complaints of prepared processes and about them so far, at most MAX_COMPLAINTS, without
        duplicates. Each is one printable line.
        """
        text = b"" if self._complaints < 0 else os.pread(self._complaints, MAX_COMPLAINT_BYTES, 0)
        lines = text.decode(errors="replace").splitlines()
        return [*dict.fromkeys(one_line(each, protocol.MAX_COMPLAINT) for each in lines)][: protocol.MAX_COMPLAINTS]

    def prepare(self) -> None:
        """Start the prepared process early, so that it is ready when a slot needs it."""
        with self._lock, suppress(OSError):
            if SystemClock().now() > self._used_from:
                self._living()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], lifeline: int, pipe: int, output: IO[bytes]
    ) -> Reaper:
        """Start a reaper by a fork if possible, else in a new interpreter. The arguments are those of `execute`."""
        ordinary = partial(execute, arguments, environment, lifeline, pipe, output)
        request = json.dumps({"environment": environment, "arguments": arguments}).encode()
        with self._lock:
            if SystemClock().now() < self._used_from or self._is_closed or len(request) > protocol.MAX_START:
                return ordinary()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    server = self._living()
                    descriptors = [lifeline, pipe, output.fileno(), theirs.fileno()]
                    socket.send_fds(server.control, [request], descriptors)
                except OSError:
                    ours.close()
                    return ordinary()
        return _Forked(ours, server, self)

    def close(self) -> None:
        """End the prepared process. Reapers that have started continue."""
        with self._lock:
            self._is_closed = True
            if self._server is not None:
                self._server.close()

    def _living(self) -> _Server:
        if self._server is not None and self._server.process.poll() is not None:
            self._server.close()
            self._server = None
        if self._server is None:
            # Limit libraries to one thread, because a process with several threads cannot be forked. Each fork sets its
            # own number.
            environment = {**without_credentials(os.environ), **thread_variables(1), MARK: UNMARKED}
            self._server = _Server(environment, self.preload, self._complaints)
        return self._server

    def give_up(self, server: _Server) -> None:
        """End a prepared process that has failed to start a reaper, and start reapers in new interpreters instead."""
        with self._lock:
            if self._is_closed or server is not self._server:
                return
            self._server = None
            is_unfit = server.close(END_SECONDS) == protocol.UNFIT
            self._used_from = math.inf if is_unfit else SystemClock().now() + RETRY_SECONDS
            preload, self.preload = self.preload, ()
        if is_unfit:
            # The prepared process has already said the reason in a complaint.
            return
        left_out = f"; afterwards it does not import {', '.join(preload)}" if preload else ""
        complaint = (
            "the prepared process of the slots does not answer or was ended; for a minute, slots start without it, "
            f"which takes longer ({START}=spawn does without it always){left_out}"
        )
        self._complain(complaint)
        os.write(self._complaints, f"{complaint}\n".encode())
