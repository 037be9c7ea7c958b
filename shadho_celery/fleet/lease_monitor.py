"""Lease monitor: find attempts that are lost because their worker is silent, or because no worker claims them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shadho_celery.core.attempts import Attempts, Sent
from shadho_celery.core.clock import Clock
from shadho_celery.core.trial import Lost
from shadho_celery.fleet.circuit_breaker import CircuitBreaker
from shadho_celery.fleet.workers import Workers
from shadho_celery.transport.channel import SchedulerChannel, configured_lease

#: seconds between two looks at workers, leases and other studies
LOOK_SECONDS = 1.0
#: the same while there is no worker and no attempt in flight
WAIT_SECONDS = 0.1

#: maximum mean number of announcements and leases read per second: on a large fleet, looks are less frequent
READ_PER_SECOND = 5000

#: seconds with a free slot in its class after which an unclaimed message is assumed lost
UNCLAIMED_SECONDS = 30.0

#: seconds after which the waiting attempts of a class without live workers are taken back
NO_WORKER_SECONDS = 10.0

#: seconds for which an attempt for one machine may wait there with a free slot or without live workers, and seconds for
#: which it may wait for a slot; after that it may run on any machine of its class
MACHINE_SECONDS = 5.0
MACHINE_BUSY_SECONDS = 60.0

#: number of looks in a row at which Redis has no record of a claimed attempt, after which it is lost; if Redis has lost
#: its data, the worker's next renewal records the attempt again
MAX_UNLEASED = 10


@dataclass
class LeaseMonitor:
    """Looks for lost attempts among the attempts in flight of one study, and updates its live workers."""

    channel: SchedulerChannel
    workers: Workers
    in_flight: Attempts[Sent]
    breaker: CircuitBreaker
    clock: Clock
    #: True if Redis did not answer in time since the last look at leases, so that workers could not renew them either
    was_silent: bool = False
    #: Lost events that were found; the executor removes them
    losses: list[Lost] = field(default_factory=list)
    _looked_at: float = -math.inf
    #: number of announcements and leases read by the last look
    _read: int = 0
    #: attempts whose lease has ended; the executor removes them once that is recorded in the store
    ended: list[tuple[int, int]] = field(default_factory=list)
    #: states in Redis of the attempts in flight, until `missing` has used them
    _states: dict[tuple[int, int], str] = field(default_factory=dict)
    _lease_seconds: float = field(default_factory=configured_lease)

    def look(self, now: float) -> list[tuple[int, int]]:
        """Update the live workers and find lost attempts. Do nothing until the next look is due.

        `now` is the time of the first request to Redis in this turn. Returns the (number, attempt) pairs that no worker
        claims and that should be taken back. Raises redis-py's errors.
        """
        self.note_wait(self.clock.now() - now)
        # A study without workers waits for the first one.
        seconds = LOOK_SECONDS if self.workers.able or self.in_flight else WAIT_SECONDS
        if now - self._looked_at < max(seconds, self._read / READ_PER_SECOND):
            return []
        self._looked_at = now
        self.channel.repair()
        self.workers.look(now, self.in_flight, self.breaker.quarantined)
        if not self.workers.able:
            self.breaker.release(self.workers.quarantined)
        self.note_wait(self.clock.now() - now)
        if self.was_silent:
            # Once per outage: workers get time to renew their leases.
            self.channel.extend_leases()
            self.was_silent = False
        self.ended = self.channel.ended_leases()
        self.losses += [self._lost(number, attempt, now) for number, attempt in self.ended]
        keys = [sent.key for sent in self.in_flight]
        self._states = dict(zip(keys, self.channel.states(keys), strict=True))
        self._read = len(self.workers.announced) + len(self.in_flight)
        return [sent.key for sent in self.in_flight if not sent.is_claimed and self._is_overdue(sent, now)]

    def _lost(self, number: int, attempt: int, now: float) -> Lost:
        """Return the loss of an attempt whose lease has ended. A trial may end its worker, but hardly a machine."""
        sent = self.in_flight.find(number, attempt)
        host = None if sent is None else sent.attempt.host
        if host and self.workers.has_vanished(host, now):
            reason = "its machine has vanished: none of its workers is live"
            return Lost(number=number, attempt=attempt, reason=reason, vanished=True)
        return Lost(number=number, attempt=attempt, reason="its worker was silent until the lease ran out")

    def note_wait(self, seconds: float) -> None:
        """Record how long Redis took to answer: a server that hangs for a while raises no error."""
        longest = max(self._lease_seconds / 3, 3 * LOOK_SECONDS, 3 * self._read / READ_PER_SECOND)
        self.was_silent |= seconds > longest

    def missing(self) -> list[tuple[int, int]]:
        """Return the (number, attempt) pairs that no worker can claim (they are void in Redis) but that had no event.

        Claimed attempts of which Redis has had no record for MAX_UNLEASED looks are added to `losses`. Call this after
        all events before the last look have been handled, because they may contain results.
        """
        found = []
        for key, state in self._states.items():
            sent = self.in_flight.find(*key)
            if sent is None:
                continue
            sent.unleased = sent.unleased + 1 if state == "free" and sent.is_claimed else 0
            if state == "void":
                found.append(key)
            if sent.unleased >= MAX_UNLEASED:
                number, attempt = key
                reason = "Redis has no record of it, and no worker renews its lease"
                self.losses.append(Lost(number=number, attempt=attempt, reason=reason, claimed=False))
        self._states = {}
        return found

    def _is_overdue(self, sent: Sent, now: float) -> bool:
        """Return whether an attempt should have been claimed long ago, or whether no live worker may claim it."""
        name, host = str(sent.attempt.compute_class), sent.attempt.only_on
        is_bound, slots = host is not None, 1 if host is None else sent.attempt.slots
        gone = MACHINE_SECONDS if is_bound else NO_WORKER_SECONDS
        # A wide one goes from worker to worker of its machine until it finds the one with its slots.
        free = MACHINE_SECONDS if is_bound and slots == 1 else UNCLAIMED_SECONDS
        return (
            self.workers.are_gone(sent, now, gone)
            or self.workers.had_free_slot(name, sent.at, now, free, host=host, slots=slots)
            # A worker keeps its free slots for an attempt that waits for several.
            or (is_bound and sent.attempt.slots == 1 and now - sent.at > MACHINE_BUSY_SECONDS)
        )
