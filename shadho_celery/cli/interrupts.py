"""End of a command's process, without traceback and delay, and standard streams whose writes may fail.

While a command imports its modules, Ctrl-C ends it without a traceback. So does an import error that occurs because a
file of the user has the name of a library.

All output of a command passes through `Output` and `Stream`, also the output of libraries and study files. A write
fails on a full disk, on a closed stream (``>&-``), and in a pipe whose reader has ended.
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
    """Standard error of a command. Text that cannot be written is dropped, because no error could be shown either."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.lost(error)
            return memoryview(data).nbytes

    def lost(self, error: OSError) -> None:
        """Handle a write that has failed."""


class Output(Stream):
    """Standard output of a command. A failed write ends the command with one line and exit code 2.

    If the reader of a pipe has ended, the error is raised without a line, because click and rich handle it.
    """

    #: True for a command that runs a study or serves trials, because it must continue after a failed write
    is_optional = False
    #: True after a write has failed
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
    """Replace this process's standard output and error by `Output` and `Stream`. Also open closed standard streams."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(_opened(os.O_RDONLY), encoding="utf-8")
    # A closed standard output is opened for reading, so that a write to it still fails.
    for name, number, kind, mode in (("stdout", 1, Output, os.O_RDONLY), ("stderr", 2, Stream, os.O_WRONLY)):
        stream = getattr(sys, name)
        # A stream that a test or a program has put here is kept.
        if stream is getattr(sys, f"__{name}__"):
            raw = kind(_opened(mode) if stream is None else number, "w", closefd=False)
            # Backslash escapes are for unpaired surrogates in texts of trials, and characters that the encoding lacks.
            how: dict[str, Any] = {name: getattr(stream, name, False) for name in ("line_buffering", "write_through")}
            encoding = getattr(stream, "encoding", None)
            made = io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", **how)
            setattr(sys, name, made)
            setattr(sys, f"__{name}__", made)


def _opened(mode: int) -> int:
    """Open the null device in place of a closed stream. Otherwise the next opened file would get the descriptor."""
    number = os.open(os.devnull, mode)
    os.set_inheritable(number, True)
    return number


#: exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT
INTERRUPTED = 130


def end_quietly() -> None:
    """Call `guard_streams`, and install a hook that ends this process without a traceback.

    The hook is for the time in which modules are imported. It handles Ctrl-C, and the import error that occurs if a
    file hides a library. When a command runs, `shared_options.refusals` handles both.
    """
    guard_streams()
    sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        # Without `os._exit`, Python would kill this process by SIGINT after a KeyboardInterrupt.
        os._exit(INTERRUPTED)
    if is_import(error) and (told := failed_import(error)):
        sys.stderr.write(f"Error: {told}\n")
        sys.stderr.flush()
        os._exit(2)
    sys.__excepthook__(kind, error, trace)


@contextmanager
def ending_quickly() -> Iterator[None]:
    """End this process when a command in the block exits, without freeing its objects one by one.

    Freeing the objects of large libraries takes Python up to a second. Threads are joined, functions of `atexit` are
    called, and files are flushed as usual. Finalizers of objects are not called.
    """
    try:
        yield
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int) and code is not None:
            sys.stderr.write(f"{code}\n")
            code = 1
        # The interpreter does the same at its end, in this order.
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
    # `without_collections` has hidden the objects of imported libraries from `gc`. Their files must be flushed, too.
    gc.unfreeze()
    # Types are compared, because `isinstance` would run code of objects that define `__class__`.
    kinds = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}
    for each in [each for each in gc.get_objects() if type(each) in kinds]:
        with suppress(ValueError, OSError):
            each.flush()


def _has_open_files() -> bool:
    """Return whether this process has opened a file or pipe that is still open.

    If there is none, `_flush_files` need not search all objects, of which there may be a million.
    """
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208 -- names alone
    except OSError:
        return True
    for number in numbers:
        with suppress(OSError):
            mode = os.fstat(number).st_mode
            # A descriptor that was inherited from the shell is inheritable; one that Python has opened is not.
            if (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)) and not os.get_inheritable(number):
                return True
    return False
