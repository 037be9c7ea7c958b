"""Lease monitor: find lost attempts, whose worker fell silent or which no worker claims."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shadho_celery.core.trial import Lost
from shadho_celery.fleet.circuit_breaker import CircuitBreaker
from shadho_celery.fleet.in_flight import InFlight, Sent
from shadho_celery.fleet.workers import Workers
from shadho_celery.transport.channel import SchedulerChannel, configured_lease

#: seconds between two looks at workers, leases and fellow studies
LOOK_SECONDS = 1.0

#: announcements and leases that are read a second: on a large fleet a look takes long, and there are fewer of them
READ_PER_SECOND = 5000

#: seconds for which a class has had a free slot after which an unclaimed message is presumed lost
UNCLAIMED_SECONDS = 30.0

#: seconds after which the attempts that wait for a class without live workers are taken back
NO_WORKER_SECONDS = 10.0

#: looks in a row that find no lease of a claimed attempt, after which it is lost: until then its result may be on the
#: way, or its worker renews the lease again after Redis has lost its data
MAX_UNLEASED = 10


@dataclass
class LeaseMonitor:
    """Monitors the workers and the attempts in flight of one study."""

    channel: SchedulerChannel
    workers: Workers
    in_flight: InFlight
    breaker: CircuitBreaker
    #: the moment of the last look at leases
    leases_seen_at: float
    #: the losses found, until the executor takes them
    losses: list[Lost] = field(default_factory=list)
    _looked_at: float = -math.inf
    #: announcements and leases that the last look has read
    _read: int = 0
    #: attempts whose lease has ended, until that is recorded
    _ended: list[tuple[int, int]] = field(default_factory=list)

    def look(self, now: float) -> list[tuple[int, int]]:
        """Update the live workers and find lost attempts, every LOOK_SECONDS; on a large fleet less often.

        Returns the (number, attempt) pairs that no worker claims: they are to be taken back. Raises redis-py's errors.
        """
        if now - self._looked_at < max(LOOK_SECONDS, self._read / READ_PER_SECOND):
            return []
        self._looked_at = now
        self.workers.look(now, self.in_flight, self.breaker.quarantined)
        if not self.workers.able:
            self.breaker.release(self.workers.quarantined)
        self._see_leases(now)
        self._read = len(self.workers.announced) + len(self.in_flight)
        return [sent.key for sent in self.in_flight if not sent.is_claimed and self._is_overdue(sent, now)]

    def confirm(self) -> None:
        """Remove the events and the ended leases found so far: they are recorded. Raises redis-py's errors."""
        self.channel.confirm()
        self.channel.forget(self._ended)
        self._ended.clear()

    def _see_leases(self, now: float) -> None:
        """Find claimed attempts whose lease has ended, or of which Redis has no lease any more: they are lost."""
        if now - self.leases_seen_at > max(configured_lease() / 3, 3 * LOOK_SECONDS, 3 * self._read / READ_PER_SECOND):
            # Redis was away, so workers may not have been able to renew their leases: they get the time to do so.
            self.channel.extend_leases()
        ended = self.channel.ended_leases()
        reason = "its worker fell silent: the lease ran out"
        self.losses += [Lost(number=number, attempt=attempt, reason=reason) for number, attempt in ended]
        self._see_unleased()
        self._ended = ended
        self.leases_seen_at = now

    def _see_unleased(self) -> None:
        claimed = [sent for sent in self.in_flight if sent.is_claimed]
        leased = self.channel.leased([sent.key for sent in claimed])
        for sent, is_leased in zip(claimed, leased, strict=True):
            sent.unleased = 0 if is_leased else sent.unleased + 1
            if sent.unleased >= MAX_UNLEASED:
                number, attempt = sent.key
                reason = "Redis has no record of it, and no worker renews its lease"
                self.losses.append(Lost(number=number, attempt=attempt, reason=reason, claimed=False))

    def _is_overdue(self, sent: Sent, now: float) -> bool:
        """Return whether an attempt should long have been claimed, or its class has no workers any more."""
        name = str(sent.attempt.compute_class)
        return self.workers.are_gone(sent, now, NO_WORKER_SECONDS) or self.workers.had_free_slot(
            name, sent.at, now, UNCLAIMED_SECONDS
        )
