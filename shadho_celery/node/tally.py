"""What one worker has done since its start, for its metrics."""

from __future__ import annotations

import threading
from collections import Counter

from shadho_celery.core.outage import Outage
from shadho_celery.core.trial import Outcome, TrialState


class Tally:
    """Counts of one worker, which any thread may read."""

    def __init__(self) -> None:
        #: ended trials by state, and the seconds of all of them
        self.trials: Counter[TrialState] = Counter()
        self.seconds = 0.0
        #: announcements to the schedulers, and renewals of leases
        self.heartbeats = self.renewals = 0
        self.redis = Outage("Redis")
        self._lock = threading.Lock()

    def end(self, outcome: Outcome) -> None:
        """Count a trial that has ended, in the thread of its slot."""
        with self._lock:
            self.trials[outcome.state] += 1
            self.seconds += outcome.seconds or 0.0
