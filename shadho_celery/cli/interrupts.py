"""Quick end of a command, without a traceback while it starts.

While a command starts, Ctrl-C ends it without a traceback, and so does a file that hides a library which it imports.

Standard streams of a command. All that it prints passes through them, also what libraries and study files print.

A write may fail: on a full disk, after ``>&-``, and in a pipe that nobody reads any more.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shadho_celery.core.libraries import failed_import, is_import

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


#: exit code after Ctrl-C, as in shells: 128 plus the signal's number
INTERRUPTED = 130


def end_quietly() -> None:
    """Guard the standard streams, and install a hook that ends this process without a traceback.

    The hook is for Ctrl-C, and for a file that hides a library, while modules are imported. Once a command runs,
    `shared_options.refusals` does this.
    """
    guard_streams()
    sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        # The exception is not raised again, because Python would then end the process by the signal.
        os._exit(INTERRUPTED)
    if is_import(error) and (told := failed_import(error)):
        sys.stderr.write(f"Error: {told}\n")
        sys.stderr.flush()
        os._exit(2)
    sys.__excepthook__(kind, error, trace)


@contextmanager
def ending_quickly() -> Iterator[None]:
    """End this process when a command in the block exits, without clearing its memory.

    With large libraries, Python takes up to a second to do that. Threads, functions of `atexit` and open files end as
    usual; finalizers of objects do not run.
    """
    try:
        yield
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int) and code is not None:
            sys.stderr.write(f"{code}\n")
            code = 1
        # What the interpreter does at its end, in the same order.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush_files()
        os._exit((code or 0) & 0xFF)


def _flush_files() -> None:
    """Flush all files and pipes that are still open."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError, OSError, AttributeError):
            stream.flush()
    if not _has_open_files():
        return
    # Objects of imported libraries are hidden from the collector (`without_collections`), but their files must be
    # flushed, too.
    gc.unfreeze()
    # Types are compared, because `isinstance` runs code of some objects.
    kinds = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}
    for each in [each for each in gc.get_objects() if type(each) in kinds]:
        with suppress(ValueError, OSError):
            each.flush()


def _has_open_files() -> bool:
    """Return whether this process has opened a file or pipe that is still open.

    To look for them among a million objects takes longer than the rest of a command's end.
    """
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208 -- names alone
    except OSError:
        return True
    for number in numbers:
        with suppress(OSError):
            mode = os.fstat(number).st_mode
            # Descriptors that the shell has passed on are inheritable, and those that Python opens are not.
            if (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)) and not os.get_inheritable(number):
                return True
    return False
