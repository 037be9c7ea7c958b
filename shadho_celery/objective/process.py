"""Runs a command as a trial: makes its folder and files, reads its output, stops it, and reads its result.

Each attempt has a folder beside the trial's checkpoints, which is removed when the attempt ends. Processes that a
command leaves behind are ended by the slot's process and its reaper, like those of a function.

A line of the output may be a JSON object with the keys of an objective's return value, and with `step` if it is a
report. If the study gives a name or a pattern of the loss, the lines of standard output are searched for a number after
this name, or for the pattern. The time to search a line for a name is proportional to its length.
"""

from __future__ import annotations

import json
import os
import re
import resource
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shadho_celery.core.checks import one_line, short
from shadho_celery.core.failures import PRINTED
from shadho_celery.core.files import MAX_BYTES, attempt_folder
from shadho_celery.objective.call import system_kills
from shadho_celery.objective.command import Command, is_users
from shadho_celery.objective.context import INTERRUPT, LocalContext, TrialStopped, TrialTimeout
from shadho_celery.objective.result import Unreadable
from shadho_celery.objective.script import CHECKPOINT_DIR, PARAMS, REPORTS, RESULT, STOP, WATCHED

#: seconds between two checks of the stop flag and the file of reports; and the first such interval after the command
#: has closed its output
_LOOK_SECONDS, _END_SECONDS = 0.05, 0.002
#: seconds from a reason to stop until SIGTERM for a script that calls `should_stop`, and until SIGKILL. Other commands
#: get SIGTERM at once. If the trial does not end, the slot's process is killed 0.7 s after the reason "stopped", and
#: 5 s after "timeout"
_GRACE = {"stopped": (0.2, 0.4), "timeout": (1.5, 3.0), "preempted": (float("inf"), float("inf"))}
#: bytes of a read; and number of reads after the end of the command, which together read as much as the largest pipe
#: holds. The file of reports is read at most as often between two checks of the stop flag
_READ, _READS = 1 << 16, 16

#: files as the original SHADHO names them: the values of a trial, and an archive that may hold the file RESULT
VALUES, ARCHIVE = "hyperparameters.json", "out.tar.gz"
#: files in the folder of an attempt for which inputs with the same names are not copied
_OWN = {VALUES, RESULT, ARCHIVE, REPORTS, STOP, WATCHED}
#: file of a module of the original SHADHO that runs a function; this package has a copy
_WORKER = "shadho_worker.py"


def run(command: Command, arguments: Sequence[str], params: object, context: LocalContext) -> Any:
    """Run the program and its `arguments` as a trial of `command`, and return what an objective would return.

    `params` are written to the file whose path is in the environment variable SHADHO_PARAMS. Returns None if the trial
    was cancelled, pruned or preempted. Raises CommandFailed if the command fails or has no loss.
    """
    own = attempt_folder(context.checkpoints, context.trial, context.attempt)
    try:
        # Earlier attempts have ended, or their results do not count. Only if this is a copy may another attempt count.
        for number in range(context.attempt if context.is_copy else 0, context.attempt + 1):
            shutil.rmtree(attempt_folder(context.checkpoints, context.trial, number), ignore_errors=True)
        where = _prepare(own, command, params)
        if (returned := _Attempt(own, where, Printed(command.loss, context), context).run(arguments)) is not None:
            _keep(command.outputs, where, context)
        return returned
    except OSError as error:
        remedy = "install the program there, correct the command, or make room on the disk"
        raise CommandFailed(f"the command cannot run in {command.folder}: {one_line(error)}; {remedy}") from None
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
    shutil.copy(Path(__file__).with_name(_WORKER), own)
    # Modules outside of the study's folder are left out, and so is a result of an earlier run, which must not count.
    for name in {each for each in command.files if not each.startswith("../")} - _OWN:
        copy = own / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(command.folder / name, copy)
        # A worker's files are read-only, but the command may change its copy.
        copy.chmod(copy.stat().st_mode | stat.S_IWUSR)
    return own


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block the signal that interrupts the trial, because the `with` block itself checks the flags of the context."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {INTERRUPT})
        yield
    finally:
        # An interrupt that was blocked arrives here, and is ignored.
        with suppress(TrialTimeout, TrialStopped):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {INTERRUPT})


class _Attempt:
    """An attempt in the folder `own`, whose command runs in the folder `where`."""

    def __init__(self, own: Path, where: Path, printed: Printed, context: LocalContext) -> None:
        self._own, self._where, self._printed, self._context = own, where, printed, context
        #: reason to stop, the time at which it was found, and the signals that were sent because of it
        self._reason, self._since = "", 0.0
        self._sent: set[int] = set()

    def run(self, arguments: Sequence[str]) -> Any:
        """Run the program to its end, and return its result. Raises CommandFailed if it fails or has no loss."""
        kills, context = system_kills(), self._context
        with self._own.joinpath(REPORTS).open("rb", buffering=0) as self._reports, self._started(arguments) as process:
            try:
                with _uninterrupted():
                    code = self._follow(process)
            finally:
                # Processes that the command has left in the background must not occupy the slot.
                self._send(process.pid, signal.SIGKILL)
        if context.stopped() or context.was_told:
            return None
        if code and not context.timed_out():
            how = f"ended with exit code {code}" if code > 0 else f"was killed by signal: {signal.strsignal(-code)}"
            # A shell has this exit code if its last program was killed.
            if code == 128 + signal.SIGKILL and system_kills() > kills:
                how += ", because the system sent SIGKILL(-9) when memory ran out"
            raise self._failed(f"the command {how}", "stderr", "stdout")
        if (found := _read_result(self._own)) is None and (found := self._printed.result) is None:
            raise self._failed(self._printed.missing, "stdout")
        return found

    def _started(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        variables = {
            PARAMS: str(self._own / VALUES),
            CHECKPOINT_DIR: str(self._context.checkpoint_dir.absolute()),
            REPORTS: str(self._own / REPORTS),
            STOP: str(self._own / STOP),
            "PYTHONUNBUFFERED": "1",
        }
        return subprocess.Popen(
            arguments,
            cwd=self._where,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )

    def _follow(self, process: subprocess.Popen[bytes]) -> int:
        """Read the output and the reports of the process, and send it signals if it should stop, until it has ended.

        Return its exit code, or the negative number of the signal that has ended it.
        """
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout or -1, selectors.EVENT_READ, "stdout")
            waiting.register(process.stderr or -1, selectors.EVENT_READ, "stderr")
            closed = _END_SECONDS
            while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                # The first wait after the output was closed is short, because most commands then end at once.
                seconds = _LOOK_SECONDS if waiting.get_map() else closed
                closed = closed if waiting.get_map() else min(2 * closed, _LOOK_SECONDS)
                self._receive(waiting, seconds)
                self._look(process.pid)
            process.returncode = os.waitstatus_to_exitcode(ended[1])
            for _ in range(_READS):
                self._receive(waiting, 0)
        # Complete a last line without a line feed. That of a killed process is not read, because it may be cut.
        for stream in ("stdout", REPORTS) if process.returncode >= 0 else ():
            self._printed.feed(stream, b"\n")
        # A new process begins with the peak of the process that has started it, so only a larger peak is its own.
        if (peak := ended[2].ru_maxrss) > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss:
            # The system's unit is a kilobyte, on macOS a byte.
            self._context.on_ranks(peak * (1 if sys.platform == "darwin" else 1024), 0)
        return process.returncode

    def _receive(self, waiting: selectors.BaseSelector, seconds: float) -> None:
        """Wait for output up to `seconds`. Write it to the trial's log, and read it and the file of reports."""
        for key, _ in waiting.select(seconds):
            if not (part := os.read(key.fd, _READ)):
                waiting.unregister(key.fileobj)
            log = getattr(sys, key.data).buffer
            with suppress(OSError):
                log.write(part)
                log.flush()
            self._printed.feed(key.data, part)
        for _ in range(_READS):
            if not (part := self._reports.read(_READ)):
                break
            self._printed.feed(REPORTS, part)

    def _look(self, pid: int) -> None:
        """If the trial should stop, send SIGTERM or SIGKILL after the seconds in `_GRACE`."""
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

    def _failed(self, how: str, *streams: str) -> CommandFailed:
        """Return the error of the command, with the last lines of the first of these streams that is not empty."""
        tail = next(filter(None, (self._printed.lines[stream].tail for stream in streams)), "")
        return CommandFailed(f"{how}{PRINTED}\n{tail}" if tail else how)


def _read_result(own: Path) -> Any:
    """Return the content of the file RESULT in an attempt's folder, else in its ARCHIVE; None if there is neither."""
    # Only regular files are read, because the reading of others, such as pipes, may block.
    name = next((each for each in (RESULT, ARCHIVE) if own.joinpath(each).is_file()), None)
    if name is None:
        return None
    try:
        if name == RESULT:
            with own.joinpath(RESULT).open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        else:
            with tarfile.open(own / ARCHIVE) as archive:
                # `getmember` would unpack the whole archive. A missing file raises KeyError below, and a folder
                # AttributeError, because `extractfile` returns None for it.
                member = next((each for each in archive if each.name == RESULT), RESULT)
                content = archive.extractfile(member).read(MAX_BYTES + 1)  # type: ignore[union-attr]
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        return json.loads(content)
    except TrialTimeout:
        raise
    except Exception as error:  # damaged archives raise various errors of their compression
        raise CommandFailed(f"{name} cannot be read: {short(error)}") from None


def _keep(outputs: Sequence[str], where: Path, context: LocalContext) -> None:
    """Copy the outputs of a command to its folder of checkpoints. Warn of each output that is missing."""
    for pattern in outputs:
        # A folder stands for all files in it, except the folder of checkpoints itself.
        found = [each for path in where.glob(pattern) for each in (path, *path.rglob("*")) if is_users(each, where)]
        if not found:
            context.warnings.append(f"the command has written no output {pattern}")
        for path in found:
            target = context.checkpoint_dir / path.relative_to(where)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


#: maximum number of bytes of a line that is read; and of characters of a line that is searched for a user's pattern,
#: because the time of this search may grow with the square of the length
MAX_LINE, MAX_MATCHED = 64 * 1024, 2000
#: bytes of the latest output that are kept for messages
_TAIL = 5000

_NUMBER = r"[-+]?(?:(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:[eE][-+]?\d{1,9})?|(?i:nan|inf(?:inity)?))"
_END = re.compile(rb"[\r\n]")
#: an escape sequence that colours a text
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")


class CommandFailed(Unreadable):
    """A command has failed, or has printed no loss."""


class Lines:
    """Divides output into lines. A line ends with a line feed or a carriage return."""

    def __init__(self) -> None:
        self._rest = self._tail = b""

    def feed(self, part: bytes) -> list[str]:
        """Return the lines whose end is in `part`. Lines of more than MAX_LINE bytes are left out."""
        self._tail = (self._tail + part)[-_TAIL:]
        *lines, rest = _END.split(self._rest + part)
        # An unfinished line keeps one byte more than the maximum, so that it still is too long when its end arrives.
        self._rest = rest[: MAX_LINE + 1]
        return [line.decode(errors="replace") for line in lines if 0 < len(line) <= MAX_LINE]

    @property
    def tail(self) -> str:
        """Last lines of the output.

        Of a line that was overwritten after carriage returns, only the last text is kept.
        """
        lines = self._tail.decode(errors="replace").rstrip().split("\n")
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def loss_pattern(name: str) -> re.Pattern[str]:
    """Return a pattern for a number after `name`, as in ``name=1e-05``, ``name: .3`` and ``"name": 3``.

    The name is not found as a part of a longer word: `loss` is not found in val_loss or val/loss.
    """
    between = r"[\"']?(?:\s{0,100}[:=|│]\s{0,100}|\s{1,100})"
    return re.compile(rf"(?<![\w./-]){re.escape(name)}{between}({_NUMBER})(?!\w|[.,/]\d)")


class Printed:
    """Reads the output and the file of reports of a command, passes its reports on, and keeps its result."""

    def __init__(self, loss: str | re.Pattern[str] | None, context: LocalContext) -> None:
        """`loss` is the name or the pattern of the loss in standard output. If it is None, only JSON lines are read."""
        self._context = context
        self._pattern = loss_pattern(loss) if isinstance(loss, str) else loss
        self._most = MAX_LINE if isinstance(loss, str) else MAX_MATCHED
        self.lines = {stream: Lines() for stream in ("stdout", "stderr", REPORTS)}
        what = f"a number after {loss!r}" if isinstance(loss, str) else "what the pattern of loss matches"
        line = (
            'a loss; print a JSON line such as {"loss": 0.3}, or name its loss, such as --loss val_loss for a command '
            'after --, which begins a new study, or loss = "val_loss" in a study file; a job of Hydra may return it'
        )
        #: error message for a command that has succeeded without a loss
        self.missing = f"the command has not printed {line if loss is None else what}"
        #: the last line with a loss; a line without a step is preferred
        self._last: Mapping[str, Any] | None = None

    def feed(self, stream: str, part: bytes) -> None:
        """Read a part of the standard output ("stdout" or "stderr") or of the file REPORTS. Raises CommandFailed."""
        for line in self.lines[stream].feed(part):
            if stream != "stderr":
                self._read(stream, _COLOUR.sub("", line))

    def _read(self, stream: str, line: str) -> None:
        record = _record(line)
        if stream == REPORTS and record is None and line.strip():
            raise CommandFailed(
                f"a line in the file that SHADHO_REPORTS names is not a JSON object: {short(line)}; append lines such "
                'as {"step": 1, "loss": 0.3}'
            )
        if stream == "stdout" and self._pattern is not None:
            found = self._found(line)
            record = None if found is None else {**(record or {}), "loss": found}
        if record is not None:
            self._keep(line, record)

    @property
    def result(self) -> dict[str, Any] | None:
        """The result, as an objective would return it; None if no line had a loss."""
        return None if self._last is None else {key: value for key, value in self._last.items() if key != "step"}

    def _keep(self, line: str, record: Mapping[str, Any]) -> None:
        losses = record.get("losses")
        if "loss" not in record and losses is None:
            return
        if self._last is None or "step" not in record or "step" in self._last:
            self._last = record
        if (step := record.get("step")) is None:
            return
        try:
            self._context.report(step, record.get("loss", losses))
        except (TypeError, ValueError) as error:
            what = str(error).removeprefix("context.report: ").partition(": write ")[0]
            raise CommandFailed(f"{what}, in the line {short(line)}") from None

    def _found(self, line: str) -> float | None:
        """Return the loss in a line, or None. Raises CommandFailed for two losses, or if the loss is no number."""
        assert self._pattern is not None
        found = [match[1] for match in self._pattern.finditer(line)] if len(line) <= self._most else []
        if len(found) > 1:
            raise CommandFailed(
                f"a line has {len(found)} losses, {short(found[0])} and {short(found[1])}: {short(line)}; choose one "
                'by a pattern, such as loss = {"pattern": "best loss (\\\\S+)"}'
            )
        try:
            return float(found[0]) if found else None
        except (TypeError, ValueError):
            raise CommandFailed(f"the pattern of loss has found {short(found[0])}, which is not a number") from None


def _record(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None."""
    with suppress(ValueError, RecursionError):
        return found if isinstance(found := json.loads(line), dict) else None
    return None
