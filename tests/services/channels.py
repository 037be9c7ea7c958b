"""A worker's end of the channel for tests, which claim and finish one attempt at a time; workers do so in bundles."""

from __future__ import annotations

import uuid

from shadho_celery.core.trial import Result, Started
from shadho_celery.fleet.channel import Claim, WorkerChannel


class Channel(WorkerChannel):
    """A worker's end that claims and finishes one attempt at a time."""

    def finish_and_claim(
        self,
        study: str,
        result: Result | None,
        started: Started | None,
        *,
        delivery: str | None = None,
        watched: bool = False,
    ) -> tuple[bool, Claim]:
        """Finish one attempt and claim the next, as `exchange`; either may be None."""
        results, claims = [result] if result else [], [started] if started else []
        finished, claimed = self.exchange(study, results, claims, delivery or uuid.uuid4().hex, watched=watched)
        return any(finished), claimed[0] if claimed else Claim.REFUSED

    def claim(self, study: str, started: Started) -> bool:
        """Claim an attempt; return whether it is this worker's now."""
        return self.finish_and_claim(study, None, started)[1] is Claim.TAKEN

    def finish(self, study: str, result: Result) -> bool:
        """Send a result; return whether it was taken."""
        return self.finish_and_claim(study, result, None)[0]
