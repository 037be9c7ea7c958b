"""Ctrl-C during a search in a user's program: it waits until the study's records are complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any


class Interrupts:
    """Delays Ctrl-C while a study changes, and then passes it to the previous handler.

    A context manager that can be nested. The handler, by default the one that raises KeyboardInterrupt, is called at
    its end, in `deliver`, and at once while the objective runs, because nothing is partly changed then. A second Ctrl-C
    does not wait, because the first may wait for a database that does not answer. In another thread than the main one,
    which gets no signals, it does nothing.
    """

    def __init__(self) -> None:
        #: True once a second Ctrl-C has interrupted a change: only what is stored is complete
        self.is_torn = False
        self._depth = 0
        self._is_held = False
        self._is_objective = False
        #: the previous handler; None if it is not a Python handler, or while this one is not installed
        self._before: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> Interrupts:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            # A signal that is ignored, or that ends the process, stays so.
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
        """Handle a delayed Ctrl-C at a time when nothing is partly changed."""
        if self._before is not None and self.forget():
            self._before(signal.SIGINT, None)

    def forget(self) -> bool:
        """Mark a Ctrl-C as handled. Return whether there was one."""
        # It may have arrived when the objective had just returned.
        was_held, self._is_held, self._is_objective = self._is_held, False, False
        return was_held

    def at_once(self, objective: Callable[..., Any]) -> Callable[..., Any]:
        """Return the objective as a function during which Ctrl-C is not delayed."""

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
        # A handler of the user that returns has handled it. If it raises and an objective catches that, the search
        # still ends.
        self._is_held = self.is_torn = False
