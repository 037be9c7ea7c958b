"""Process trees: functions that find and kill their processes, and that protect them from signals for the worker.

psutil is imported in the functions, because a trial's process rarely needs it: most trials leave no children. A service
manager or a batch system may send signals to all processes of a worker, but only the worker may end trials.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

#: environment variable that marks the processes of a slot, so that they can be found if their reaper was killed
MARK = "SHADHO_RUNNER"
#: value of MARK in a prepared process; it has the length of a real mark, which later overwrites it
UNMARKED = "0" * 32

#: seconds after which killing is given up. Processes that are still alive then hang in the kernel or belong to another
#: user
KILL_SECONDS = 10.0

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (Linux only)."""
    if sys.platform == "linux":
        # Imported here because nothing else needs it, and it takes time.
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def hide_memory() -> None:
    """Prevent other processes of this user from reading this process's memory, environment and files (Linux only).

    Programs that this process starts are not protected.
    """
    prctl(PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent dies (Linux only)."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(of: int) -> dict[int, str]:
    """Return the live descendants of the process `of`: process id -> name of the program."""
    import psutil

    found = {}
    with suppress(psutil.Error):
        for child in psutil.Process(of).children(recursive=True):
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found[child.pid] = child.name()
    return found


def kill(pid: int) -> None:
    """Send SIGKILL to a process. Do nothing if it is gone or belongs to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_all(find: Callable[[], Mapping[int, str]], seconds: float = KILL_SECONDS) -> set[str]:
    """Kill the processes that `find` returns, until it finds no more or `seconds` are over. Return the names of the
    killed processes.
    """
    deadline = time.monotonic() + seconds
    names: set[str] = set()
    while found := find():
        names.update(found.values())
        for pid in found:
            kill(pid)
        time.sleep(0.002)
        if time.monotonic() > deadline:
            break
    return names


def kill_marked(mark: str) -> None:
    """Kill every process in whose environment the variable MARK has the value `mark`."""
    import psutil

    def marked() -> dict[int, str]:
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process.name()
        return found

    kill_all(marked)


#: signals that may be meant for the worker alone. SIGXCPU is not included, because the system sends it to a trial that
#: exceeds its own limit of CPU seconds
FOR_WORKER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def shielded() -> Iterator[None]:
    """Block the signals FOR_WORKER in programs that start within a `with` block, until they call `ignore`.

    Without this, a signal could end a new interpreter before it calls `ignore`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_WORKER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore the signals FOR_WORKER, and unblock them."""
    for number in FOR_WORKER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_WORKER)


def leave_to_worker() -> None:
    """In a trial's process: make the signals FOR_WORKER have no effect here, but their usual effect in the trial's
    children.

    `multiprocessing` may terminate a forked process before that process has reset its handlers. Therefore the signals
    are blocked from the fork until the reset.
    """
    for number in FOR_WORKER[1:]:
        # SIGINT stays ignored, also in programs that the trial starts, because Ctrl-C at a terminal is meant for the
        # scheduler.
        signal.signal(number, _do_nothing)
    forking = threading.local()

    def block() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_WORKER)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def reset() -> None:
        for number in FOR_WORKER:
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def _do_nothing(number: int, frame: object) -> None:
    """Handle a signal by doing nothing.

    If the signal was ignored instead, programs that a trial starts would inherit that and could not be terminated. A
    handler is not inherited.
    """
