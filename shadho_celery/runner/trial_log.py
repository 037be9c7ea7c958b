"""Log of one attempt of a trial: the lines of its output with time stamps, limited to the first and the last.

A log is beside the checkpoints of its study: ``.shadho/checkpoints/STUDY_KEY/logs/TRIAL.ATTEMPT.log``. It is plain
text. One line that begins with a bracket instead of a time stamp says how much is left out between its two parts.
"""

from __future__ import annotations

import os
import re
import stat
from datetime import datetime, timezone
from pathlib import Path

from shadho_celery.core.clock import Clock
from shadho_celery.core.folders import study_folder
from shadho_celery.core.trial import MAX_LOG

#: bytes kept of the beginning of a log, and of its end; while it is written, the end has up to twice as many
HEAD = TAIL = 256 * 1024

#: maximum bytes of a line, after which it is broken
MAX_LINE = 64 * 1024

#: bytes of output kept in memory; faulthandler's list of extension modules, which is left out, is long
_RECENT = 10 * MAX_LOG

#: text of a line before the cursor returned to its beginning, as progress bars do
_OVERWRITTEN = re.compile(rb"^[^\n]*\r(?=[^\r\n])", re.MULTILINE)
#: ANSI control sequences, such as colours
_SEQUENCE = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROL = bytes({*range(32), 127} - {*b"\t\n"})
_LEFT_OUT = re.compile(rb"^\[(\d+) bytes are left out here\]\n", re.MULTILINE)
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", re.MULTILINE)
_EXTENSIONS = re.compile(r"^(\S+ )?Extension modules: .*\n?", re.MULTILINE)


def log_path(folder: Path, study: str, number: int, attempt: int, rank: int = 0) -> Path:
    """Return the path of the log of an attempt, or of its replica `rank`, below the `folder` of checkpoints.

    Raises UsageError if it is outside of that folder.
    """
    replica = f".replica{rank}" if rank else ""
    # In one step: a worker does this for each trial, and two steps take twice as long.
    return Path(f"{study_folder(folder, study)}/logs/{number}.{attempt}{replica}.log")


def unstamped(text: str) -> str:
    """Return lines of a log without their time stamps."""
    return _STAMP.sub("", text)


class TrialLog:
    """A log that is being written. Without any output there is no file."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """Without a `path`, keep only the last lines in memory."""
        self._path = path
        self._clock = clock
        self._file: int | None = None
        #: bytes of the file, of its first part once something is left out, and of the line that says so
        self._size = self._head = self._gap = 0
        #: bytes left out so far
        self._left_out = 0
        #: bytes that could not be written since the last successful write
        self._unwritten = 0
        #: first reason why something could not be written; "" if everything was
        self.trouble = ""
        #: current line, which has not ended
        self._line = b""
        self._recent = b""

    def write(self, output: bytes) -> None:
        """Add output of the trial. Of text that overwrites itself on one line, only the last state is kept."""
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
        """Last lines, at most MAX_LOG characters."""
        text = _EXTENSIONS.sub("", self._recent.decode(errors="replace")).rstrip("\n")
        last = text[-MAX_LOG:]
        return last if len(last) == len(text) else last.partition("\n")[2] or last

    def _stamped(self, lines: bytes) -> bytes:
        """Return lines as text, each after the current time."""
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
                # Readable only by its owner, because objectives may print secrets. A link could lead to any file.
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
        """Leave out what is between the first part and the last one."""
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
            # A nearly full disk takes only a part.
            written = os.pwrite(self._file, data, place)
            data, place = data[written:], place + written

    def _note(self, error: OSError) -> None:
        self.trouble = self.trouble or str(error.strerror)


def read_log(path: Path, after: int = 0) -> tuple[str, int] | None:
    """Return the text of a log after a position, and the position of its end, or None if there is no log.

    Positions count all bytes of the log, including those that are left out. Raises OSError.
    """
    try:
        # A trial may have replaced it: reading a pipe would block, and a link may lead anywhere.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        data = file.read(2 * (HEAD + 2 * TAIL))
    if (gap := _LEFT_OUT.search(data)) is None:
        return data[after:].decode(errors="replace"), len(data)
    # Difference between positions in the log and in the file, in the last part.
    shift = int(gap[1]) - len(gap[0])
    if after > gap.start():
        # A reader that has read up to the last part has missed nothing.
        after = after - shift if after - shift >= gap.end() else gap.start()
    return data[after:].decode(errors="replace"), len(data) + shift
