"""A worker's end of the channel for tests, which claim and finish apart; workers do both in one step."""

from __future__ import annotations

from shadho_celery.core.trial import Result, Started
from shadho_celery.transport.channel import Claim, WorkerChannel


class Channel(WorkerChannel):
    """A worker's end that claims and finishes apart."""

    def claim(self, study: str, started: Started) -> bool:
        """Claim an attempt; return whether it is this worker's now."""
        return self.finish_and_claim(study, None, started)[1] is Claim.TAKEN

    def finish(self, study: str, result: Result) -> bool:
        """Send a result; return whether it was taken."""
        return self.finish_and_claim(study, result, None)[0]
