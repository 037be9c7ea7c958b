"""Delay of Ctrl-C during a search in a user's program, and warnings."""

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
    """Context manager that delays Ctrl-C while a study changes, and then passes it to the previous signal handler.

    The previous handler, which by default raises KeyboardInterrupt, is called at the end of the outermost `with` block,
    or earlier in `deliver`. While the objective runs, that handler is called at once, because no change is incomplete
    then. A second Ctrl-C also calls it at once, because the change may be waiting for a database that does not answer.
    Only the main thread gets signals; in other threads this object does nothing.
    """

    def __init__(self) -> None:
        #: True if a second Ctrl-C has interrupted a change, so that the state in memory may be incomplete (but not the
        #: store)
        self.is_torn = False
        self._depth = 0
        self._is_held = False
        self._is_objective = False
        #: previous signal handler; None if it is not a Python function, or while this object's handler is not installed
        self._before: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> Interrupts:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            # Without a Python handler, Ctrl-C is ignored or ends the process. Do not change that.
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
        """Call the previous handler if a Ctrl-C was delayed. Call this when no change is incomplete."""
        if self._before is not None and self.forget():
            self._before(signal.SIGINT, None)

    def forget(self) -> bool:
        """Drop a delayed Ctrl-C. Return whether there was one."""
        # Reset `_is_objective` too, because the signal may have arrived just after the objective returned.
        was_held, self._is_held, self._is_objective = self._is_held, False, False
        return was_held

    def at_once(self, objective: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls the objective. During this call, Ctrl-C is not delayed."""

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
        # If a handler of the user returns, the signal is handled. If it raises an exception, the lines below do not
        # run, so that the search ends even if the objective catches the exception.
        self._is_held = self.is_torn = False


#: name of this package, whose frames are skipped to find the line of the user's program
_OURS = __name__.partition(".")[0]


def warn(message: str) -> None:
    """Issue a warning that points to the line of the user's program that has called this package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(message), stacklevel=level)
