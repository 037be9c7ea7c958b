"""Process trees: find the descendants of a process and kill them.

psutil is imported in the functions: a trial's process starts without it, and most trials leave no children.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

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
