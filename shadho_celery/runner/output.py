"""Output of a slot's process and of all its children: read from one pipe, and written to the log of each trial.

The process writes a boundary into the pipe when a trial starts, and after a trial if no other trial follows
(`protocol.boundary`). Output belongs to the trial that the last boundary before this output names.
A trial that prints faster than its output is read waits for room in the pipe; other trials do not wait.

A log contains the lines of an attempt's output with time stamps. If the output is long, the log has only the first and
the last lines. A line between them, which begins with a bracket, says how many bytes are left out. The log is a text
file beside the checkpoints of the study: ``.shadho/checkpoints/STUDY_KEY/logs/TRIAL.ATTEMPT.log``.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from shadho_celery.core.files import study_folder
from shadho_celery.core.system import Clock, SystemClock, start_thread
from shadho_celery.core.trial import MAX_LOG
from shadho_celery.runner.protocol import NO_ORDER, boundary

log = logging.getLogger(__name__)

#: bytes read at a time: as many as a pipe holds
READ = 1 << 16

#: seconds to wait after each read, so that output accumulates: minimum, multiple of the seconds that the last read and
#: its processing took, and maximum
REST_SECONDS, REST_FACTOR, MAX_REST_SECONDS = 0.002, 4.0, 0.1

#: maximum seconds to wait for output that is still in the pipe
LAST_SECONDS = 2.0

#: number of ended trials whose last lines are kept
KEPT = 256

#: bytes kept of the beginning and of the end of a log; while it is written, the end may be twice as long
HEAD = TAIL = 256 * 1024

#: maximum bytes of a line; longer lines are broken
MAX_LINE = 64 * 1024

#: bytes of output kept in memory for the last lines. It is more than MAX_LOG, because the long list of extension
#: modules that faulthandler prints is removed from these lines
_RECENT = 10 * MAX_LOG

#: text of a line that is overwritten after a carriage return, as progress bars do
_OVERWRITTEN = re.compile(rb"^[^\n]*\r(?=[^\r\n])", re.MULTILINE)
#: ANSI control sequences, such as colours
_SEQUENCE = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROL = bytes({*range(32), 127} - {*b"\t\n"})
_LEFT_OUT = re.compile(rb"^\[(\d+) bytes are left out here\]\n", re.MULTILINE)
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", re.MULTILINE)
_EXTENSIONS = re.compile(r"^(\S+ )?Extension modules: .*\n?", re.MULTILINE)


class Output:
    """Reads the output of one slot's process, in a thread of its own. Any thread may call the methods."""

    def __init__(self, mark: str, complain: Callable[[str], None]) -> None:
        """`mark` makes the boundaries different from anything that a trial prints.

        `complain` is called with the reason if a log is incomplete. The attribute `end` is the writing end of the pipe:
        pass it to the process, and then close it in this process.
        """
        reading, end = os.pipe()
        self._reading, self.end = os.fdopen(reading, "rb", buffering=0), os.fdopen(end, "wb", buffering=0)
        self._complain = complain
        self._clock = SystemClock()
        prefix = re.escape(boundary(mark, NO_ORDER).partition(b" ")[0])
        self._boundary = re.compile(prefix + rb" (\d+)\0")
        self._longest = len(boundary(mark, 10**18))
        #: bytes that were read and may be the beginning of a boundary
        self._held = b""
        #: paths of the logs of orders that have not ended
        self._paths: dict[int, str] = {}
        #: log of the running order; None while it has printed nothing
        self._log: TrialLog | None = None
        #: numbers of the running order, of the last order that has started, and of the last order that has ended
        self._current = self._begun = self._ended = NO_ORDER
        #: (order, last lines) of the latest orders that have printed something
        self._last_lines: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="shadho-output", daemon=True)

    def start(self) -> None:
        """Start to read. Reading ends when all writing ends are closed. Raises OSError if the thread cannot start."""
        try:
            start_thread(self._thread)
        except OSError:
            self._reading.close()
            raise

    def expect(self, order: int, path: str) -> None:
        """Record the path of an order's log. Call this before the order is sent."""
        with self._changed:
            self._paths[order] = path

    def last_lines(self, order: int) -> str:
        """Return the last lines that an order's trial has printed, or "". Wait for output that is still in the pipe.

        If the process died before the trial started, return the last lines that it printed outside of trials.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._ended >= order, LAST_SECONDS)
            found = dict(self._last_lines)
            return found.get(order, "" if self._begun >= order else found.get(NO_ORDER, ""))

    def join(self) -> None:
        """Wait until all output has been read. Call this after the process and its children have ended."""
        self._thread.join(LAST_SECONDS)

    def _read(self) -> None:
        with suppress(OSError):
            while part := self._reading.read(READ):
                began = time.monotonic()
                try:
                    self._divide(part)
                except Exception:
                    # If the pipe were not read, it would soon be full, and every trial of the slot would wait for it.
                    log.exception("output of a trial was lost; this is a bug")
                # Rest after each read, so that a trial that prints endlessly does not keep this thread busy.
                rest = REST_FACTOR * (time.monotonic() - began)
                time.sleep(min(MAX_REST_SECONDS, max(REST_SECONDS, rest)))
        self._reading.close()
        self._write(self._held)
        self._turn(NO_ORDER)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _divide(self, part: bytes) -> None:
        """Divide a part of the output at the boundaries, and write each piece to the log of its trial."""
        *before, rest = self._boundary.split(self._held + part)
        for output, order in zip(before[::2], before[1::2], strict=True):
            self._write(output)
            self._turn(int(order))
        held = rest.find(b"\0", max(0, len(rest) - self._longest))
        self._held = rest[held:] if held >= 0 else b""
        self._write(rest[:held] if held >= 0 else rest)
        with self._changed:
            # Remove the paths of orders that have ended, and of orders that were recalled before they started.
            while self._paths and (first := next(iter(self._paths))) < self._begun:
                del self._paths[first]
            self._changed.notify_all()

    def _write(self, output: bytes) -> None:
        if output:
            if self._log is None:
                path = self._paths.get(self._current)
                self._log = TrialLog(Path(path) if path else None, self._clock)
            self._log.write(output)

    def _turn(self, order: int) -> None:
        """End the log of the current order, and make `order` the current one."""
        if self._log is not None:
            self._log.close()
            if self._log.trouble:
                self._complain(f"logs of trials are incomplete: {self._log.trouble}")
            with self._changed:
                self._last_lines.append((self._current, self._log.last_lines))
            self._log = None
        # Set this after the last lines are stored, because `last_lines` waits for it.
        self._ended = max(self._ended, self._current)
        self._begun = max(self._begun, order)
        self._current = order


def log_path(folder: Path, study: str, number: int, attempt: int, rank: int = 0) -> Path:
    """Return the path of the log of an attempt, or of its replica `rank`, below the `folder` of checkpoints.

    Raises UsageError if the path is outside of that folder.
    """
    return study_folder(folder, study) / log_name(number, attempt, rank)


def log_name(number: int, attempt: int, rank: int = 0) -> str:
    """Return the path of the log of an attempt, or of its replica `rank`, below the `study_folder`."""
    return f"logs/{number}.{attempt}.replica{rank}.log" if rank else f"logs/{number}.{attempt}.log"


def replica_logs(folder: Path, study: str, number: int, attempt: int) -> list[Path]:
    """Return the paths of the logs of an attempt's replicas, below the `folder` of checkpoints."""
    return sorted(log_path(folder, study, number, attempt).parent.glob(f"{number}.{attempt}.replica*.log"))


def unstamped(text: str) -> str:
    """Return lines of a log without their time stamps."""
    return _STAMP.sub("", text)


class TrialLog:
    """The log of one attempt while it is written. Its file is created at the first output."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """Write to the file `path`. If it is None, only keep the last lines in memory."""
        self._path = path
        self._clock = clock
        self._file: int | None = None
        #: bytes of the file; of its first part; and of the line that says how many bytes are left out. The last two are
        #: 0 while nothing is left out
        self._size = self._head = self._gap = 0
        #: bytes left out so far
        self._left_out = 0
        #: bytes that could not be written since the last successful write
        self._unwritten = 0
        #: first reason why output could not be written, or ""
        self.trouble = ""
        #: beginning of the last line of the output, which has not ended yet
        self._line = b""
        self._recent = b""

    def write(self, output: bytes) -> None:
        """Add output of the trial. If a line overwrites itself, as progress bars do, only its last state is kept."""
        lines, newline, self._line = (self._line + output).rpartition(b"\n")
        if b"\r" in self._line:
            self._line = _OVERWRITTEN.sub(b"", self._line)
        if len(self._line) > MAX_LINE:
            lines, newline, self._line = lines + newline + self._line, b"\n", b""
        if newline:
            self._put(self._stamped(lines))

    def close(self) -> None:
        """Write the line that has not ended, and close the file."""
        if self._line:
            self._put(self._stamped(self._line))
            self._line = b""
        if self._unwritten:
            self._put(b"")
        if self._file is not None:
            try:
                if self._size > HEAD + TAIL:
                    self._cut()
            except OSError as error:
                self._note(error)
            os.close(self._file)
            self._file = None

    @property
    def last_lines(self) -> str:
        """The last lines of the output, at most MAX_LOG characters."""
        text = _EXTENSIONS.sub("", self._recent.decode(errors="replace")).rstrip("\n")
        last = text[-MAX_LOG:]
        return last if len(last) == len(text) else last.partition("\n")[2] or last

    def _stamped(self, lines: bytes) -> bytes:
        """Return lines without control sequences, each with the current time in front."""
        if b"\r" in lines:
            lines = _OVERWRITTEN.sub(b"", lines)
        if b"\x1b" in lines:
            lines = _SEQUENCE.sub(b"", lines)
        lines = lines.translate(None, _CONTROL)
        if not lines.isascii():
            lines = lines.decode(errors="backslashreplace").encode()
        moment = datetime.fromtimestamp(self._clock.wall(), timezone.utc)
        stamp = f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z ".encode()
        return stamp + lines.replace(b"\n", b"\n" + stamp) + b"\n"

    def _put(self, lines: bytes) -> None:
        self._recent = (self._recent + lines)[-_RECENT:]
        if self._path is None:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # Only the owner may read the file, because objectives may print secrets. A symbolic link, which could
                # lead to any file, is not followed.
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            if self._unwritten:
                self._append(f"[{self._unwritten} bytes could not be written here: {self.trouble}]\n".encode())
                self._unwritten = 0
            self._append(lines)
            if self._size > HEAD + 2 * TAIL:
                self._cut()
        except OSError as error:
            self._unwritten += len(lines)
            self._note(error)

    def _append(self, lines: bytes) -> None:
        """Append whole lines. If that raises OSError, the file is unchanged."""
        assert self._file is not None
        try:
            self._write(lines, self._size)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(lines)

    def _cut(self) -> None:
        """Replace the middle of the file by a line that says how many bytes have been left out in total."""
        assert self._file is not None
        if not self._head:
            self._head = os.pread(self._file, HEAD, 0).rfind(b"\n") + 1
        tail = os.pread(self._file, TAIL, self._size - TAIL)
        tail = tail[tail.find(b"\n") + 1 :]
        self._left_out += self._size - len(tail) - self._head - self._gap
        gap = f"[{self._left_out} bytes are left out here]\n".encode()
        self._write(gap + tail, self._head)
        self._size, self._gap = self._head + len(gap) + len(tail), len(gap)
        os.ftruncate(self._file, self._size)

    def _write(self, data: bytes, place: int) -> None:
        assert self._file is not None
        while data:
            # If the disk is nearly full, only a part of the data is written.
            written = os.pwrite(self._file, data, place)
            data, place = data[written:], place + written

    def _note(self, error: OSError) -> None:
        self.trouble = self.trouble or str(error.strerror)


def read_log(path: Path, after: int = 0) -> tuple[str, int] | None:
    """Return the text of a log after a position, and the position of the log's end. Return None if there is no log.

    Positions count all bytes of the log, including those that are left out. Raises OSError.
    """
    try:
        # A trial may have replaced the file by a named pipe, whose reading would block, or by a link to any file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        data = file.read(2 * (HEAD + 2 * TAIL))
    if (gap := _LEFT_OUT.search(data)) is None:
        return data[after:].decode(errors="replace"), len(data)
    # In the last part, a position in the log is greater by `shift` than the position in the file.
    shift = int(gap[1]) - len(gap[0])
    if after > gap.start():
        # A reader that has already read from the last part has missed nothing. Otherwise begin with the line about the
        # bytes that are left out.
        after = after - shift if after - shift >= gap.end() else gap.start()
    return data[after:].decode(errors="replace"), len(data) + shift
