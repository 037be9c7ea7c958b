"""Lease monitor: find the attempts that got lost, for their worker fell silent or no worker claims them."""

from __future__ import annotations

import math

from shadho_celery.core.trial import Lost
from shadho_celery.fleet.circuit_breaker import CircuitBreaker
from shadho_celery.fleet.in_flight import InFlight, Sent
from shadho_celery.fleet.workers import Workers
from shadho_celery.transport.channel import SchedulerChannel, configured_lease

#: seconds between two looks at workers, leases and fellow studies
LOOK_SECONDS = 1.0

#: seconds for which a class has had a free slot after which an unclaimed message is presumed lost
UNCLAIMED_SECONDS = 30.0

#: seconds after which the attempts that wait for a class without live workers are taken back
NO_WORKER_SECONDS = 10.0

#: looks in a row that find no lease of a claimed attempt, after which it is lost: its result may be on its way, or
#: Redis has lost its memory and the worker will tell it again
MAX_UNLEASED = 10


class LeaseMonitor:
    """Watches over the workers and the attempts in flight of one study."""

    def __init__(
        self, channel: SchedulerChannel, workers: Workers, in_flight: InFlight, breaker: CircuitBreaker, now: float
    ) -> None:
        self._channel = channel
        self._workers = workers
        self._in_flight = in_flight
        self._breaker = breaker
        self._looked_at = -math.inf
        self._leases_seen_at = now
        #: attempts whose lease has ended, for as long as that is not recorded
        self._ended: list[tuple[int, int]] = []
        #: the losses found, until they are taken
        self.losses: list[Lost] = []

    def look(self, now: float) -> list[tuple[int, int]]:
        """See every LOOK_SECONDS which workers live, whose lease has ended, and which attempts are not claimed.

        Returns the last, (number, attempt) pairs that are to be taken back. Raises redis-py's errors.
        """
        if now - self._looked_at < LOOK_SECONDS:
            return []
        self._looked_at = now
        self._workers.look(now, self._in_flight, self._breaker.quarantined)
        if not self._workers.able:
            self._breaker.release(self._workers.quarantined)
        self._see_leases(now)
        return [sent.key for sent in self._in_flight if not sent.is_claimed and self._is_overdue(sent, now)]

    def confirm(self) -> None:
        """Forget the leases whose end was found: it is recorded. Raises redis-py's errors."""
        self._channel.forget(self._ended)
        self._ended.clear()

    def _see_leases(self, now: float) -> None:
        """Find claimed attempts whose lease has ended, or of which Redis knows nothing any more: they are lost."""
        if now - self._leases_seen_at > max(configured_lease() / 3, 3 * LOOK_SECONDS):
            # We could not look, so workers may not have been able to renew: they get the time to do so.
            self._channel.extend_leases()
        ended = self._channel.ended_leases()
        for number, attempt in ended:
            reason = "its worker fell silent: the lease ran out"
            self.losses.append(Lost(number=number, attempt=attempt, reason=reason))
        self._see_unleased()
        self._ended = sorted(ended)
        self._leases_seen_at = now

    def _see_unleased(self) -> None:
        claimed = [sent for sent in self._in_flight if sent.is_claimed]
        leased = self._channel.leased([sent.key for sent in claimed])
        for sent, is_leased in zip(claimed, leased, strict=True):
            sent.unleased = 0 if is_leased else sent.unleased + 1
            if sent.unleased >= MAX_UNLEASED:
                number, attempt = sent.key
                reason = "Redis has forgotten it, and no worker tells of it any more"
                self.losses.append(Lost(number=number, attempt=attempt, reason=reason, claimed=False))

    def _is_overdue(self, sent: Sent, now: float) -> bool:
        """Return whether an attempt should long have been claimed, or waits for a class that has died out."""
        name = str(sent.attempt.compute_class)
        return self._workers.are_gone(sent, now, NO_WORKER_SECONDS) or self._workers.had_free_slot(
            name, sent.at, now, UNCLAIMED_SECONDS
        )
