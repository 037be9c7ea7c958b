"""Lines of a worker's log about its trials: one line a trial, where it ends."""

from __future__ import annotations

import logging
import threading

from shadho_celery.core.failures import headline
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Outcome, TrialState

log = logging.getLogger(__name__)

#: lines between two beats, about a second; of more trials only the number is told
MOST = 100


class TrialLines:
    """Writes the lines. `beat` is for one thread, `tell` for any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = self._more = 0

    def tell(self, payload: Payload, attempt: Attempt, outcome: Outcome) -> None:
        """Write the line of an attempt that has ended."""
        with self._lock:
            self._told += 1
            if self._told > MOST:
                self._more += 1
                return
        level = logging.WARNING if outcome.state is TrialState.FAILED or outcome.warning else logging.INFO
        log.log(level, "%s", line(payload, attempt, outcome))

    def beat(self) -> None:
        """Tell the number of the trials that got no line; to be called every second or so."""
        with self._lock:
            more, self._told, self._more = self._more, 0, 0
        if more:
            log.info("%d more trials have ended within a second", more)


def line(payload: Payload, attempt: Attempt, outcome: Outcome) -> str:
    """Return the line of an attempt that has ended."""
    which = f", attempt {attempt.attempt}" if attempt.attempt > 1 else ""
    parts = [f"study {payload.name or payload.study}, trial {attempt.number}{which} ({attempt.subspace})"]
    # Only the scheduler knows which losses are negative because they are to be maximised.
    loss = "" if outcome.loss is None or outcome.losses else f", loss {outcome.loss:.6g}"
    parts.append(f"{outcome.state}{loss}, {outcome.seconds or 0.0:.3g} s")
    if outcome.state is TrialState.FAILED:
        parts.append(headline(outcome.error))
    return ": ".join(parts) + (f"; {outcome.warning}" if outcome.warning else "")
