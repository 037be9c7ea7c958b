"""Ctrl-C and SIGTERM during a run on workers: recorded here, and handled by the session after a turn of its loop."""

from __future__ import annotations

import signal
from typing import Any

#: exit codes of a run that was stopped at once, as in shells: 128 plus the signal's number
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Signals:
    """Records the signals that arrive within its block. The third signal ends the process, whatever it does."""

    def __init__(self) -> None:
        #: numbers of the signals that have arrived, in order
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
        """True if the run is to stop at once: after two signals, or after SIGTERM."""
        return len(self.noted) > 1 or signal.SIGTERM in self.noted

    @property
    def exit_code(self) -> int:
        """Exit code of a run that the latest signal has stopped."""
        return STOPPED[signal.Signals(self.noted[-1])]

    def _note(self, number: int, _: object) -> None:
        self.noted.append(number)
        if len(self.noted) > 2:
            # The loop has not handled the earlier signals, perhaps because it waits for a server.
            raise SystemExit(self.exit_code)
