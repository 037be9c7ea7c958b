"""Process trees, whose processes are found and killed, and signals that are meant for a worker alone.

psutil is imported in the functions: a trial's process starts without it, and most trials leave no children. A service
manager or a batch system may send a worker's signals to all of its processes, but only the worker ends trials.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

#: environment variable that marks a trial's processes, so that they can be found if their reaper was killed
MARK = "SHADHO_RUNNER"
#: value of MARK in a prepared process, with the length of other values
UNMARKED = "0" * 32

#: seconds after which killing is given up: only processes that hang in the kernel or belong to another user live on
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
    """Return the names of the programs of all live descendants of the process `of`, by process id."""
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
    """Kill the processes that `find` returns, until it finds no more or the time is up. Return their names."""
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


#: SIGXCPU is not among them, because the system sends it at a trial's own limit of CPU seconds
FOR_WORKER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def shielded() -> Iterator[None]:
    """Block the signals in programs that start within a `with` block, until they call `ignore`.

    A new interpreter takes some time until then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_WORKER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore the signals, and unblock them."""
    for number in FOR_WORKER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_WORKER)


def leave_to_worker() -> None:
    """In a trial's process: let the signals have no effect here, except on what the trial starts.

    `multiprocessing` terminates the processes that a trial forks, maybe before these have reset their handlers. So the
    signals are blocked from the fork until then.
    """
    for number in FOR_WORKER[1:]:
        # SIGINT stays ignored, also in programs that the trial starts: Ctrl-C at a terminal is for the scheduler.
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
    """Do nothing, as the handler of a signal.

    Programs that a trial starts would inherit an ignored signal, and could not be terminated. A handler is reset.
    """
