"""Attempts in flight: attempts of one study that were sent and have not ended."""

from __future__ import annotations

from dataclasses import dataclass

from shadho_celery.core.attempts import Attempts
from shadho_celery.core.trial import Attempt, TrialState


@dataclass
class Sent:
    """An attempt in flight."""

    #: RUNNING once a worker has claimed it
    attempt: Attempt
    #: time at which it was sent (`Clock.now`)
    at: float
    #: time at which a worker claimed it, as far as this scheduler knows; None before
    began: float | None = None
    #: number of looks in a row that found no trace of the claimed attempt in Redis
    unleased: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Trial and attempt."""
        return self.attempt.number, self.attempt.attempt

    @property
    def is_claimed(self) -> bool:
        """Return whether a worker runs it."""
        return self.attempt.state is TrialState.RUNNING

    def slot_seconds(self, now: float) -> float:
        """Return the seconds for which it has run, for each of its slots."""
        return 0.0 if self.began is None else (now - self.began) * self.attempt.slots


class InFlight(Attempts[Sent]):
    """The attempts in flight."""

    def other_host(self, attempt: Attempt) -> str | None:
        """Return the machine on which another attempt of the trial runs, or None if there is none."""
        others = (sent for key, sent in self.of(attempt.number).items() if key != attempt.attempt)
        return next((sent.attempt.host or "" for sent in others if sent.is_claimed), None)
