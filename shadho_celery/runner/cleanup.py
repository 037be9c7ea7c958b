"""Cleanup: put back what a trial has changed in its process, and end what it has left running."""

from __future__ import annotations

import _thread
import copy
import faulthandler
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from shadho_celery.runner.process_tree import adopt_orphans, descendants, kill

#: the signals that libraries and their users set handlers for
_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGVTALRM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGPIPE),
)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
_STANDARD = range(3)

#: seconds that threads are given to end, and killed children to be gone
GRACE_SECONDS = 0.3

#: children that serve the process rather than a trial: a module, an object in it, and where that has their process id
_HELPERS = (
    ("multiprocessing.resource_tracker", "_resource_tracker", "_pid"),
    ("multiprocessing.forkserver", "_forkserver", "_forkserver_pid"),
    ("joblib.externals.loky.backend.resource_tracker", "_resource_tracker", "_pid"),
)

#: classes of threads that a library starts once and keeps: tqdm's monitor of its progress bars
_HELPER_THREADS = {"TMonitor"}


class _Part:
    """Something that trials change and that can be put back: how to look at it, and how to set it."""

    def __init__(self, name: str, look: Callable[[], Any], restore: Callable[[Any], Any]) -> None:
        self.name = name
        self._look = look
        self._restore = restore
        self._then = copy.copy(look())

    def is_back(self) -> bool:
        """Put it back where it was changed; False where that cannot be."""
        if self._look() == self._then:
            return True
        with suppress(OSError, ValueError):
            self._restore(self._then)
        return bool(self._look() == self._then)


class Cleanup:
    """Knows how the process was at its creation, and makes it so again after each trial."""

    def __init__(self) -> None:
        #: the standard descriptors, out of the way of those that close the low ones
        self.spares = [os.dup(number) for number in _STANDARD]
        self._parts = [
            # First: a limit set too low fails whatever else is called here.
            _Part("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
            _Part("descriptors 0 to 2", _descriptors, self._restore_descriptors),
            _Part("sys.stdin, stdout and stderr", _streams, _restore_streams),
            _Part("working directory", _folder, os.chdir),
            # The bytes that os.environ keeps: to decode them takes longer than all else here together.
            _Part("environment", lambda: os.environ._data, _restore_environment),  # type: ignore[attr-defined]
            _Part("signal handlers", lambda: [signal.getsignal(each) for each in _SIGNALS], _restore_handlers),
            _Part("signal mask", lambda: _mask(signal.SIG_BLOCK, ()), lambda then: _mask(signal.SIG_SETMASK, then)),
            _Part("umask", lambda: os.umask(os.umask(0o077)), os.umask),
            _Part("resource limits", lambda: [resource.getrlimit(each) for each in _LIMITS], _restore_limits),
            _Part("faulthandler", faulthandler.is_enabled, lambda _: faulthandler.enable(self.spares[2])),
        ]
        self._threads = set(threading.enumerate())
        self._count = _thread._count()
        adopt_orphans()
        self._children = set() if _is_childless() else set(descendants(os.getpid()))

    def clear(self) -> list[str]:
        """Put everything back; return in words what this process cannot be rid of."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        left = [part.name for part in self._parts if not part.is_back()]
        if not _is_childless() or _thread._count() > self._count:
            left += [*self._clear_children(), *self._clear_threads()]
        try:
            # What was printed so far was printed by this trial.
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            # It has closed them, or there is no room for what it prints.
            left.append("a closed sys.stdout")
        return left

    def _clear_children(self) -> Iterator[str]:
        """Kill the children, and theirs; libraries that had them may be in disorder now, so they are told of."""
        if self._left():
            _stop_loky()
            # What is only not collected yet, a DataLoader perhaps, ends its children in good order.
            gc.collect()
        # A library's own handler might raise, here.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        deadline = time.monotonic() + GRACE_SECONDS
        names: set[str] = set()
        while left := self._left():
            for pid, name in left.items():
                names.add(name)
                kill(pid)
            time.sleep(0.002)
            if time.monotonic() > deadline:
                break
        _reap(self._children | _helpers())
        signal.signal(signal.SIGCHLD, handler)
        if names:
            yield f"child processes ({', '.join(sorted(names))[:200]})"

    def _left(self) -> dict[int, str]:
        kept = self._children | _helpers()
        return {pid: name for pid, name in descendants(os.getpid()).items() if pid not in kept}

    def _clear_threads(self) -> Iterator[str]:
        """Wait for those that are about to end."""
        deadline = time.monotonic() + GRACE_SECONDS
        while _thread._count() > self._count and time.monotonic() < deadline:
            time.sleep(0.002)
            if not self._left_threads():
                break
        if left := self._left_threads():
            yield f"threads ({', '.join(left)[:200]})"
        else:
            self._threads = set(threading.enumerate())
            self._count = _thread._count()

    def _left_threads(self) -> list[str]:
        """Return the names of threads that a trial started."""
        known = {thread for thread in threading.enumerate() if type(thread).__name__ in _HELPER_THREADS}
        # A thread of C that has called Python once looks like one of Python's, and cannot be ended.
        new = [
            thread.name
            for thread in threading.enumerate()
            if thread not in self._threads | known and not isinstance(thread, threading._DummyThread)
        ]
        unnamed = _thread._count() - self._count - len(new) - len(known - self._threads)
        return new + ["without a name"] * max(0, unnamed)

    def _restore_descriptors(self, then: list[Any]) -> None:
        for number, now, was in zip(_STANDARD, _descriptors(), then, strict=True):
            if now != was:
                os.dup2(self.spares[number], number)


_mask = signal.pthread_sigmask


def _folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 -- Path costs more than all else that is looked at
    except OSError:
        return None


def _descriptors() -> list[tuple[int, int] | None]:
    return [identity(number) for number in _STANDARD]


def identity(descriptor: int) -> tuple[int, int] | None:
    """What is open there, told from anything else; None where nothing is."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _streams() -> list[Any]:
    return [sys.stdin, sys.stdout, sys.stderr]


def _restore_streams(then: list[Any]) -> None:
    sys.stdin, sys.stdout, sys.stderr = then


def _restore_environment(then: dict[Any, Any]) -> None:
    os.environb.clear()
    os.environb.update(then)


def _restore_handlers(then: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, then, strict=True):
        # None: it was not set from Python, and cannot be.
        if handler is not None:
            signal.signal(number, handler)


def _restore_limits(then: list[tuple[int, int]]) -> None:
    for which, limits in zip(_LIMITS, then, strict=True):
        resource.setrlimit(which, limits)


def _is_childless() -> bool:
    """True where this process has neither children nor, as they would come to it, further descendants."""
    if sys.platform != "linux":
        # Orphans go elsewhere there, and children are the guardian's to end.
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _helpers() -> set[int]:
    """Process ids of the children that libraries keep."""
    found = set()
    for module, holder, field in _HELPERS:
        if module in sys.modules:
            found.add(getattr(getattr(sys.modules[module], holder, None), field, None) or 0)
    return found


def _stop_loky() -> None:
    """Have joblib end the pool that it keeps for the next call: it would compute on after the trial."""
    module = sys.modules.get("joblib.externals.loky.reusable_executor")
    if module is not None and (pool := getattr(module, "_executor", None)) is not None:
        pool.shutdown(wait=True, kill_workers=True)


def _reap(helpers: set[int]) -> None:
    """Take note of the deaths of children nobody has waited for, orphans above all."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in helpers:
                break
            os.waitpid(ended.si_pid, 0)
