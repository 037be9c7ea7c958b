"""Ctrl-C during a search in a user's program, which waits until the study's records are complete; warnings."""

from __future__ import annotations

import inspect
import signal
import threading
import warnings
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

from shadho_celery.core.checks import printable


class Interrupts:
    """Delays Ctrl-C while a study changes, and then passes it to the previous signal handler.

    A context manager that can be nested. The previous handler, by default the one that raises KeyboardInterrupt, is
    called at the end of the outermost block, or earlier in `deliver`. While the objective runs, it is called at once,
    because no change is incomplete then. It is also called at once for a second Ctrl-C, because the first one may wait
    for a database that does not answer. In other threads than the main one, which get no signals, this does nothing.
    """

    def __init__(self) -> None:
        #: True once a second Ctrl-C has interrupted a change: the state in memory may be incomplete, the store is not
        self.is_torn = False
        self._depth = 0
        self._is_held = False
        self._is_objective = False
        #: previous signal handler; None if it is not a Python function, or while ours is not installed
        self._before: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> Interrupts:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            # If the signal is ignored or ends the process, that is not changed.
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._before is not None:
            before, self._before = self._before, None
            signal.signal(signal.SIGINT, before)
            if self.forget():
                before(signal.SIGINT, None)

    def deliver(self) -> None:
        """Call the previous handler if a Ctrl-C was delayed. To be called when no change is incomplete."""
        if self._before is not None and self.forget():
            self._before(signal.SIGINT, None)

    def forget(self) -> bool:
        """Drop a delayed Ctrl-C. Return whether there was one."""
        # It may have arrived just after the objective had returned.
        was_held, self._is_held, self._is_objective = self._is_held, False, False
        return was_held

    def at_once(self, objective: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls the objective, during which Ctrl-C is not delayed."""

        @wraps(objective)
        def called(*values: Any) -> Any:
            self.deliver()
            try:
                self._is_objective = True
                return objective(*values)
            finally:
                self._is_objective = False

        return called

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_second, self._is_held = self._is_held, True
        if self._before is None or not (is_second or self._is_objective):
            return
        self.is_torn = self.is_torn or not self._is_objective
        self._before(number, frame)
        # If a user's handler returns, the signal is handled. If it raises an exception that the objective catches, the
        # search ends nevertheless.
        self._is_held = self.is_torn = False


#: this package, whose frames are skipped in search of the user's line
_OURS = __name__.partition(".")[0]


def warn(message: str) -> None:
    """Warn with `message`. The warning points to the line of the user's program that has called this package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(message), stacklevel=level)
