"""The processes below one: who they are, and how they are ended.

psutil is imported where it is needed: a trial's process starts without it, and most trials leave nothing behind.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

#: in the environment of a trial's process, so that it is found where its reaper itself was killed
MARK = "SHADHO_RUNNER"

#: seconds after which killing is given up: only what hangs in the kernel, or belongs to another user, lives so long
KILL_SECONDS = 10.0

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (Linux only)."""
    if sys.platform == "linux":
        # Not needed anywhere else, and not free.
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (Linux only)."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(of: int) -> dict[int, str]:
    """Return the process ids of the live descendants of `of`, each with the name of its program."""
    import psutil

    found = {}
    with suppress(psutil.Error):
        for child in psutil.Process(of).children(recursive=True):
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found[child.pid] = child.name()
    return found


def kill(pid: int) -> None:
    """Send SIGKILL, where it still lives and is ours to kill."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kill every process that was started with `mark` as its MARK, until there is none."""
    import psutil

    def marked() -> list[int]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    deadline = time.monotonic() + KILL_SECONDS
    while (pids := marked()) and time.monotonic() < deadline:
        for pid in pids:
            kill(pid)
        time.sleep(0.005)
