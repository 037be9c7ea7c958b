"""Lines in a worker's log.

Each trial has a line at its end. Lines about the worker itself are written at any log level, because people wait for
them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from shadho_celery.core.failures import headline
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.fleet.registry import Worker

log = logging.getLogger(__name__)

#: maximum number of lines about trials between two beats (about a second); further trials are only counted
MOST_LINES = 100


class TrialLines:
    """Writes a line about each ended attempt to the worker's log. `beat` is for one thread, `tell` for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = self._more = 0

    def tell(self, payload: Payload, attempt: Attempt, outcome: Outcome) -> None:
        """Write the line about an ended attempt, or only count it after MOST_LINES lines since the last beat."""
        with self._lock:
            self._told += 1
            if self._told > MOST_LINES:
                self._more += 1
                return
        level = logging.WARNING if outcome.state is TrialState.FAILED or outcome.warning else logging.INFO
        log.log(level, "%s", line(payload, attempt, outcome))

    def beat(self) -> None:
        """Write the number of trials that got no line. Call this about every second."""
        with self._lock:
            more, self._told, self._more = self._more, 0, 0
        if more:
            log.info("%d more trials have ended within a second", more)


def line(payload: Payload, attempt: Attempt, outcome: Outcome) -> str:
    """Return the line about an ended attempt for the worker's log."""
    # The scheduler decides whether a failed attempt ends its trial, or is retried on another worker.
    has_failed = outcome.state is TrialState.FAILED
    which = f", attempt {attempt.attempt}" if attempt.attempt > 1 or has_failed else ""
    parts = [f"study {payload.name or payload.study}, trial {attempt.number}{which} ({attempt.subspace})"]
    # Only the scheduler knows which losses are negative because they are maximised.
    loss = "" if outcome.loss is None or outcome.losses else f", loss {outcome.loss:.6g}"
    parts.append(f"{'failed' if has_failed else outcome.state}{loss}, {outcome.seconds or 0.0:.3g} s")
    if has_failed:
        parts.append(headline(outcome.error))
    return ": ".join(parts) + (f"; {outcome.warning}" if outcome.warning else "")


def tell(text: str) -> None:
    """Write a line to the log at any log level."""
    log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None))


def ready(name: str, worker: Worker, queues: Sequence[str], broker: str) -> str:
    """Return the line that says that a worker is ready. `broker` is a URL without a password."""
    room = f"{worker.slots} slot{'s' * (worker.slots > 1)}"
    return f"{name} is ready. Class {worker.compute_class}, {room}, queues {' and '.join(queues)} on {broker}"
