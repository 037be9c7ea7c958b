"""Runs a command as a trial: makes its folder and files, reads its output, stops it, and reads its result.

Each attempt has a folder beside the study's checkpoints, which is removed when the attempt ends. A thread reads the
output, because an exception may interrupt the main thread at any point. Processes that a command leaves behind are
ended by the slot's process and its reaper, like those of a function.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from shadho_celery.core.checks import one_line, short
from shadho_celery.core.failures import PRINTED
from shadho_celery.core.files import is_locked, read_text
from shadho_celery.core.threads import start_thread
from shadho_celery.errors import UsageError
from shadho_celery.objective.call import system_kills
from shadho_celery.objective.command import Command, is_users
from shadho_celery.objective.context import LocalContext, TrialStopped, TrialTimeout
from shadho_celery.objective.printed import CommandFailed, Lines, Printed
from shadho_celery.objective.script import CHECKPOINT_DIR, PARAMS, REPORTS, STOP, WATCHED

#: seconds between two looks at the stop flag and the file of reports; and once the output is closed
_LOOK_SECONDS, _END_SECONDS = 0.05, 0.002
#: seconds from a reason to stop until SIGTERM for a script that calls `should_stop`, and until SIGKILL. Other commands
#: get SIGTERM at once. The slot's process itself is killed 0.7 s and 5 s after the first two reasons
_GRACE = {"stopped": (0.2, 0.4), "timeout": (1.5, 3.0), "preempted": (float("inf"), float("inf"))}
#: bytes read at a time, and number of reads of what is left at the end: as much as the largest pipe holds
_READ, _LAST_READS = 1 << 16, 16
#: seconds to wait for the end of a killed process, if this process is interrupted
_LAST_SECONDS = 1.0
#: exit codes of a process that was ended by SIGKILL, and of a shell whose last program was
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)

#: values of a trial and its result, as the original SHADHO names them, and the archive that may hold the result
VALUES, RESULT, ARCHIVE = "hyperparameters.json", "performance.json", "out.tar.gz"
#: module of the original SHADHO that runs a function, and its copy here
_WORKER = "shadho_worker.py"


def run(command: Command, arguments: Sequence[str], params: object, context: LocalContext) -> Any:
    """Run the program and its `arguments` as a trial of `command`, and return what an objective would return.

    `params` are written to the file whose path is in the environment variable SHADHO_PARAMS. Returns None if the trial
    was cancelled, pruned or preempted. Raises CommandFailed if the command fails or has no loss.
    """
    own = Path(context.checkpoints).absolute().parent / "attempts" / f"{context.trial}.{context.attempt}"
    try:
        for earlier in own.parent.glob(f"{context.trial}.*"):
            # Its process was killed, unless it holds the lock.
            if not is_locked(earlier / REPORTS):
                shutil.rmtree(earlier, ignore_errors=True)
        where = _prepare(own, command, params)
        process = _Process(arguments, where, own, Printed(command.loss, context), context)
        process.run()
        returned = process.returned()
        _keep(command.outputs, where, context)
        return returned
    except OSError as error:
        raise CommandFailed(f"a file of the attempt cannot be read or written: {one_line(error)}") from None
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _prepare(own: Path, command: Command, params: object) -> Path:
    """Create the folder of an attempt, and return the folder in which the command runs. Raises OSError."""
    own.mkdir(parents=True)
    try:
        own.joinpath(VALUES).write_text(json.dumps(params, default=lambda value: value.tolist()))
    except (AttributeError, TypeError, ValueError) as error:
        raise CommandFailed(f"the values of the trial cannot be written as JSON: {error}, in {short(params)}") from None
    own.joinpath(REPORTS).touch()
    if not command.inputs:
        return command.folder
    # A result of an earlier run must not count.
    for name in command.files.keys() - {VALUES, RESULT, ARCHIVE}:
        link = own / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(command.folder / name)
    with suppress(FileExistsError):
        own.joinpath(_WORKER).symlink_to(Path(__file__).with_name(_WORKER))
    return own


class _Process:
    """The process of one attempt."""

    def __init__(
        self, arguments: Sequence[str], where: Path, own: Path, printed: Printed, context: LocalContext
    ) -> None:
        self._arguments, self._where, self._own = arguments, where, own
        self._printed, self._context = printed, context
        self._lines = {stream: Lines() for stream in ("stdout", "stderr", REPORTS)}
        #: exit code, or the negative number of the signal that ended it; None while it runs
        self._code: int | None = None
        #: reason to stop, the time at which it was found, and the signals that were sent because of it
        self._reason, self._since = "", 0.0
        self._sent: set[int] = set()
        self._error: Exception | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Start the process and wait for its end. Raises CommandFailed if it cannot be started."""
        self._kills = system_kills()
        with ExitStack() as stack:
            self._reports = stack.enter_context(self._own.joinpath(REPORTS).open("rb", buffering=0))
            # A lock is held while the attempt is alive. Some file systems have none.
            with suppress(OSError):
                fcntl.flock(self._reports, fcntl.LOCK_EX)
            process = stack.enter_context(self._started())
            reader = threading.Thread(target=self._follow, args=(process,), name="command", daemon=True)
            try:
                start_thread(reader)
                # An exception in `Thread.join` makes the thread look ended (Python 3.8 to 3.12), so an event is used.
                while not self._ended.is_set():
                    # The reader obeys the same flags. The objective is interrupted once.
                    with suppress(TrialTimeout, TrialStopped):
                        self._ended.wait()
                reader.join()
            except BaseException:
                self._send(process.pid, signal.SIGKILL)
                if reader.ident is not None:
                    self._ended.wait(_LAST_SECONDS)
                raise
        if self._error is not None:
            raise self._error

    def returned(self) -> Any:
        """Return the result of the ended process. Raises CommandFailed if it failed or has no loss."""
        if self._context.stopped() or self._context.was_told:
            return None
        is_late = self._context.timed_out()
        if self._code and not is_late:
            raise self._failure()
        if (found := _read_result(self._own)) is None and (found := self._printed.result) is None:
            if is_late:
                raise CommandFailed("the command has printed no loss until then")
            raise _failed(self._printed.missing, self._lines["stdout"].tail)
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        # With this path, a script that is a link finds modules in the attempt's folder.
        path = os.pathsep.join(filter(None, (str(self._own), os.environ.get("PYTHONPATH"))))
        variables = {
            PARAMS: str(self._own / VALUES),
            CHECKPOINT_DIR: str(self._context.checkpoint_dir.absolute()),
            REPORTS: str(self._own / REPORTS),
            STOP: str(self._own / STOP),
            "PYTHONUNBUFFERED": "1",
            **({"PYTHONPATH": path} if self._where == self._own else {}),
        }
        try:
            return subprocess.Popen(
                self._arguments,
                cwd=self._where,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else one_line(error)
            raise CommandFailed(
                f"the program {short(self._arguments[0])} cannot be run in {self._where}: {reason}; install it there, "
                "or correct the command"
            ) from None

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Until the process has ended: read its output, pass on its reports, and send it signals if it should stop."""
        try:
            with selectors.DefaultSelector() as waiting:
                waiting.register(process.stdout or -1, selectors.EVENT_READ, "stdout")
                waiting.register(process.stderr or -1, selectors.EVENT_READ, "stderr")
                closed = _END_SECONDS
                while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                    # Most commands end as soon as they have closed their output.
                    seconds = _LOOK_SECONDS if waiting.get_map() else closed
                    closed = closed if waiting.get_map() else min(2 * closed, _LOOK_SECONDS)
                    self._receive(waiting, seconds)
                    self._look(process.pid)
                self._code = process.returncode = os.waitstatus_to_exitcode(ended[1])
                # What it has left in the background must not keep the slot.
                self._send(process.pid, signal.SIGKILL)
                for _ in range(_LAST_READS):
                    self._receive(waiting, 0)
                self._read("stdout", b"\n")
                self._read(REPORTS, b"\n")
                self._count(ended[2].ru_maxrss)
        except Exception as error:
            self._error = error
            self._send(process.pid, signal.SIGKILL)
        finally:
            self._ended.set()

    def _receive(self, waiting: selectors.BaseSelector, seconds: float) -> None:
        """Wait for output up to `seconds`. Write it to the trial's log, and read its lines and the file of reports."""
        for key, _ in waiting.select(seconds):
            if not (part := os.read(key.fd, _READ)):
                waiting.unregister(key.fileobj)
            left = memoryview(part)
            with suppress(OSError):
                while left:
                    left = left[os.write(1 if key.data == "stdout" else 2, left) :]
            self._read(key.data, part)
        while part := self._reports.read(_READ):
            self._read(REPORTS, part)

    def _read(self, stream: str, part: bytes) -> None:
        for line in self._lines[stream].feed(part):
            if stream == "stdout":
                self._printed.read(line)
            elif stream == REPORTS and line.strip():
                self._printed.read_report(line)

    def _look(self, pid: int) -> None:
        """If the trial should stop, send SIGTERM or SIGKILL once its time has come."""
        if not (reason := self._context.stop_reason):
            return
        if reason != self._reason:
            self._reason, self._since = reason, time.monotonic()
            self._own.joinpath(STOP).touch()
        polite, hard = _GRACE[reason]
        passed = time.monotonic() - self._since
        if passed >= hard:
            self._send(pid, signal.SIGKILL)
        elif signal.SIGTERM not in self._sent and (passed >= polite or not self._own.joinpath(WATCHED).exists()):
            self._send(pid, signal.SIGTERM)

    def _send(self, pid: int, number: int) -> None:
        """Send a signal to the process group of the command."""
        self._sent.add(number)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)

    def _count(self, peak: int) -> None:
        """Report the peak resident memory of the command. `peak` is in the system's unit: kilobytes, on macOS bytes."""
        # A new process has the peak of the process that has started it, so a smaller one is not known.
        if peak > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss:
            self._context.on_ranks(peak * (1 if sys.platform == "darwin" else 1024), 0)

    def _failure(self) -> CommandFailed:
        """Return the error for a process that has failed or was killed."""
        code = self._code or 0
        how = f"the command ended with exit code {code}"
        if code < 0:
            name = next((each.name for each in signal.Signals if each == -code), "")
            how = f"the command was ended by signal {name}({code})"
        if code in _KILLED and system_kills() > self._kills:
            how = f"{how}, because the system sent SIGKILL(-9) when memory ran out"
        return _failed(how, self._lines["stderr"].tail or self._lines["stdout"].tail)


def _failed(how: str, tail: str) -> CommandFailed:
    """Return the error of a command with the end of its output."""
    error = CommandFailed(f"{how}{PRINTED}\n{tail}" if tail else how)
    if re.search(r"^MemoryError\b", tail, re.MULTILINE):
        error.__cause__ = MemoryError()
    return error


def _read_result(own: Path) -> Any:
    """Return the content of the file RESULT in an attempt's folder or in its ARCHIVE; None if there is neither.

    Raises CommandFailed if it cannot be read.
    """
    try:
        if own.joinpath(ARCHIVE).is_file() and not own.joinpath(RESULT).exists():
            with tarfile.open(own / ARCHIVE) as archive:
                file = archive.extractfile(RESULT)
                own.joinpath(RESULT).write_bytes(file.read() if file else b"")
        return json.loads(read_text(own / RESULT, RESULT)) if own.joinpath(RESULT).exists() else None
    except UsageError as error:
        raise CommandFailed(str(error)) from None
    except (KeyError, OSError, tarfile.TarError, ValueError, RecursionError, EOFError) as error:
        raise CommandFailed(f"{RESULT} cannot be read: {short(error)}") from None


def _keep(outputs: Sequence[str], where: Path, context: LocalContext) -> None:
    """Copy the outputs of a command to its folder of checkpoints. Warn of each output that is missing."""
    if context.stopped():
        return
    for pattern in outputs:
        # A folder stands for all files in it, except the folder of checkpoints itself.
        found = [each for path in where.glob(pattern) for each in (path, *path.rglob("*")) if is_users(each, where)]
        if not found:
            context.warnings.append(f"the command has written no output {pattern}")
        for path in found:
            target = context.checkpoint_dir / path.relative_to(where)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
