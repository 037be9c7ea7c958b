"""Quick end of a command, without a traceback while it starts.

While a command starts, Ctrl-C ends it without a traceback, and so does a file that hides a library which it imports.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from shadho_celery.cli.streams import guard_streams
from shadho_celery.core.libraries import failed_import, is_import

#: exit code after Ctrl-C, as in shells: 128 plus the signal's number
INTERRUPTED = 130


def end_quietly() -> None:
    """Guard the standard streams, and install a hook that ends this process without a traceback.

    The hook is for Ctrl-C, and for a file that hides a library, while modules are imported. Once a command runs,
    `connection_options.refusals` does this.
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
