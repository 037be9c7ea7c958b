"""Ctrl-C and SIGTERM during a run on workers: noted here, and handled by the session between two turns of its loop."""

from __future__ import annotations

import signal
from typing import Any

#: exit codes of a run that was stopped at once, as shells have them: 128 and the signal's number
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Signals:
    """The signals that have come; a context manager. The third one ends the process wherever it is."""

    def __init__(self) -> None:
        #: numbers of those that have come
        self.noted: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in STOPPED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def are_urgent(self) -> bool:
        """True if the run is to stop at once: after two of them, or SIGTERM."""
        return len(self.noted) > 1 or signal.SIGTERM in self.noted

    @property
    def exit_code(self) -> int:
        """Exit code of a run that the latest one has stopped."""
        return STOPPED[signal.Signals(self.noted[-1])]

    def _note(self, number: int, _: object) -> None:
        self.noted.append(number)
        if len(self.noted) > 2:
            # The loop does not come to its next turn, perhaps because of a network that does not answer.
            raise SystemExit(self.exit_code)
