"""What one worker has done since its start, for its metrics."""

from __future__ import annotations

import threading
from collections import Counter

from shadho_celery.core.trial import Outcome, TrialState


class Tally:
    """Counts of one worker, which any thread may read."""

    def __init__(self) -> None:
        #: ended trials by state, and the seconds of all of them
        self.trials: Counter[TrialState] = Counter()
        self.seconds = 0.0
        #: announcements to the schedulers, and renewals of leases
        self.heartbeats = self.renewals = 0
        #: number of times that Redis has stopped to answer
        self.outages = 0
        self._is_out = False
        self._lock = threading.Lock()

    def end(self, outcome: Outcome) -> None:
        """Count a trial that has ended, in the thread of its slot."""
        with self._lock:
            self.trials[outcome.state] += 1
            self.seconds += outcome.seconds or 0.0

    def note_redis(self, *, is_out: bool) -> None:
        """Note whether Redis has answered the last beat."""
        self.outages += is_out and not self._is_out
        self._is_out = is_out
