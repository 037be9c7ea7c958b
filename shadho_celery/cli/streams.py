"""Standard streams of a command. All that it prints passes through them, also what libraries and study files print.

A write may fail: on a full disk, after ``>&-``, and in a pipe that nobody reads any more.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Stream(io.FileIO):
    """Standard error of a command. What cannot be written is dropped, because there is no place to say so."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.lost(error)
            return memoryview(data).nbytes

    def lost(self, error: OSError) -> None:
        """Handle a write that has failed."""


class Output(Stream):
    """Standard output of a command, which ends with one line and exit code 2 if it cannot be written.

    A closed pipe ends the command as click and rich decide, without a line.
    """

    #: True for a command that runs a study or serves trials: it gets a warning and goes on
    is_optional = False
    #: True once a write has failed
    is_lost = False

    def lost(self, error: OSError) -> None:
        was_lost, self.is_lost = self.is_lost, True
        if was_lost or (self.is_optional and error.errno == errno.EPIPE):
            return
        if error.errno == errno.EPIPE:
            raise error
        kind = "Warning" if self.is_optional else "Error"
        sys.stderr.write(f"{kind}: standard output cannot be written: {error.strerror}\n")
        if not self.is_optional:
            raise SystemExit(2)


def guard_streams() -> None:
    """Let this process print through `Output` and `Stream`, and open the streams that its caller has closed."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(_opened(os.O_RDONLY), encoding="utf-8")
    # Standard output is opened for reading, so that a write to it still fails.
    for name, number, kind, mode in (("stdout", 1, Output, os.O_RDONLY), ("stderr", 2, Stream, os.O_WRONLY)):
        stream = getattr(sys, name)
        # A test or a program may have its own stream here.
        if stream is getattr(sys, f"__{name}__"):
            raw = kind(_opened(mode) if stream is None else number, "w", closefd=False)
            # A trial's text may have an unpaired surrogate, or characters that the terminal's encoding lacks.
            how: dict[str, Any] = {name: getattr(stream, name, False) for name in ("line_buffering", "write_through")}
            encoding = getattr(stream, "encoding", None)
            made = io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", **how)
            setattr(sys, name, made)
            setattr(sys, f"__{name}__", made)


def _opened(mode: int) -> int:
    """Open the null device in place of a closed stream, whose number a file that is opened later would get."""
    number = os.open(os.devnull, mode)
    os.set_inheritable(number, True)
    return number
