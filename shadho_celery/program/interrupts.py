"""Ctrl-C during a search of one's own program: it waits until the study's records are whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any


class Interrupts:
    """Holds Ctrl-C back while a study changes, and then hands it to the handler that was there before.

    A context manager, which may be entered again inside itself. The handler, by default the one that raises
    KeyboardInterrupt, is called at its end, in `deliver`, and at once while the objective runs: then nothing is
    half-changed. A second Ctrl-C does not wait, as a database that does not answer may be what keeps the first.
    In another thread than the main one, which gets no signals, it does nothing.
    """

    def __init__(self) -> None:
        #: True once a second Ctrl-C has ended a change half-way: only what is stored is whole
        self.is_torn = False
        self._depth = 0
        self._is_held = False
        self._is_objective = False
        #: the handler before; None while there is none of Python's, and while this one is not installed
        self._before: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> Interrupts:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            # A signal that is ignored, or ends the process, stays so.
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
        """Handle a Ctrl-C that was held back, at a moment when nothing is half-changed."""
        if self._before is not None and self.forget():
            self._before(signal.SIGINT, None)

    def forget(self) -> bool:
        """Take a Ctrl-C for handled; return whether there was one."""
        # It may have come when the objective had just returned.
        was_held, self._is_held, self._is_objective = self._is_held, False, False
        return was_held

    def at_once(self, objective: Callable[..., Any]) -> Callable[..., Any]:
        """Return the objective, during whose call Ctrl-C is not held back."""

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
        # An own handler that returns has handled it. Where it raises, an objective that catches that still ends.
        self._is_held = self.is_torn = False
