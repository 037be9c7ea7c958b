"""Cleanup: restore the process state that a trial has changed, and end the processes that it left behind."""

from __future__ import annotations

import _thread
import gc
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress

from shadho_celery.runner.process_state import ProcessState, identity
from shadho_celery.runner.process_tree import adopt_orphans, descendants, kill_all

#: seconds that a trial's threads have to end, and that killed children have to disappear
GRACE_SECONDS = 0.3

#: child processes that a library starts once and keeps, each as a module, an object in it, and the attribute of the
#: object with the process id
_HELPERS = (
    ("multiprocessing.resource_tracker", "_resource_tracker", "_pid"),
    ("multiprocessing.forkserver", "_forkserver", "_forkserver_pid"),
    ("joblib.externals.loky.backend.resource_tracker", "_resource_tracker", "_pid"),
)

#: classes of threads that a library starts once and keeps, such as tqdm's monitor of its progress bars
_HELPER_THREADS = {"TMonitor"}


class Cleanup:
    """Records the state of this process when created, and restores that state after each trial."""

    def __init__(self) -> None:
        #: copies of the standard descriptors, above the low numbers that trials may close
        self.spares = [os.dup(number) for number in range(3)]
        self._output = identity(self.spares[1])
        self._state = ProcessState(self.spares)
        self._threads = set(threading.enumerate())
        self._count = _thread._count()
        adopt_orphans()
        self._children = set() if _is_childless() else set(descendants(os.getpid()))
        self._free = _free_descriptor()

    def clear(self) -> list[str]:
        """Restore the state after a trial. Return descriptions of what could not be undone and needs a new process."""
        left = [f"a changed {name}" for name in self._state.restore()]
        if not _is_childless() or _thread._count() > self._count:
            left += [*self._end_children(), *self._await_threads()]
        if _free_descriptor() - self._free > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 > 0:
            left.append("so many open files that later trials may lack them")
        try:
            # Output that is still buffered belongs to this trial.
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            # The trial has closed the streams, or the disk has no room for its output.
            left.append("a closed sys.stdout")
        return list(dict.fromkeys(left))

    def note(self) -> None:
        """Record the current state as the state to restore. Call this after a study was imported."""
        self._state.note()

    def divide_output(self, boundary: bytes) -> None:
        """Write a boundary into the output pipe, which separates the output of two trials."""
        with suppress(OSError):
            # A trial may have closed the descriptor and opened its own file under the same number.
            if identity(self.spares[1]) == self._output:
                # Any process that has the pipe may have made it non-blocking, which affects all processes.
                os.set_blocking(self.spares[1], True)
                os.write(self.spares[1], boundary)

    def _end_children(self) -> list[str]:
        """Kill the trial's child processes and their descendants. Return a list with one phrase that names them, or [].

        The libraries that started these processes may not work afterwards, so the caller replaces this process.
        """
        if self._left():
            _stop_loky()
            # Some objects, such as a DataLoader, end their children themselves when they are collected.
            gc.collect()
        # A signal handler that a library has set might raise an exception here.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        names = kill_all(self._left, GRACE_SECONDS)
        _reap(self._children | _helpers())
        signal.signal(signal.SIGCHLD, handler)
        return [f"child processes ({', '.join(sorted(names))[:200]})"] if names else []

    def _left(self) -> dict[int, str]:
        kept = self._children | _helpers()
        return {pid: name for pid, name in descendants(os.getpid()).items() if pid not in kept}

    def _await_threads(self) -> list[str]:
        """Wait up to GRACE_SECONDS for a trial's threads to end. Return a list with one phrase that names the rest, or
        [].
        """
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := self._left_threads()) and time.monotonic() < deadline:
            time.sleep(0.002)
        if left:
            return [f"threads ({', '.join(left)[:200]})"]
        self._threads = set(threading.enumerate())
        self._count = _thread._count()
        return []

    def _left_threads(self) -> list[str]:
        """Return the names of the threads that the trial has started and that still run."""
        running = threading.enumerate()
        helpers = {thread for thread in running if type(thread).__name__ in _HELPER_THREADS}
        # `_DummyThread` is a thread of a C library that has called Python once. It is left out, because it cannot be
        # ended.
        new = [
            thread.name
            for thread in running
            if thread not in self._threads | helpers and not isinstance(thread, threading._DummyThread)
        ]
        unnamed = _thread._count() - self._count - len(new) - len(helpers - self._threads)
        return new + ["without a name"] * max(0, unnamed)


def _free_descriptor() -> int:
    """Return the smallest unused descriptor, which is about the number of open files."""
    try:
        number = os.dup(0)
    except OSError:
        return sys.maxsize
    os.close(number)
    return number


def _is_childless() -> bool:
    """Return whether this process has no children. Then it has no descendants, because it adopts orphans."""
    if sys.platform != "linux":
        # On other systems, init adopts orphans, and the reaper ends children.
        return True
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return False
    return True


def _helpers() -> set[int]:
    """Return the process ids of the children that libraries keep (`_HELPERS`)."""
    holders = [(getattr(sys.modules.get(module), name, None), attribute) for module, name, attribute in _HELPERS]
    return {getattr(holder, attribute, None) or 0 for holder, attribute in holders}


def _stop_loky() -> None:
    """Stop the process pool that joblib keeps for its next call. It may still compute for the ended trial."""
    pool = getattr(sys.modules.get("joblib.externals.loky.reusable_executor"), "_executor", None)
    if pool is not None:
        pool.shutdown(wait=True, kill_workers=True)


def _reap(helpers: set[int]) -> None:
    """Collect the exit status of ended children, mostly adopted orphans. Stop at an ended helper, for which its library
    waits.
    """
    if not hasattr(os, "waitid"):
        # macOS before Python 3.13. Nothing needs to be collected: init adopts orphans there.
        return
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in helpers:
                break
            os.waitpid(ended.si_pid, 0)
