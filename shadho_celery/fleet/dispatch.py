"""Dispatch of attempts, and detection of lost ones.

`Dispatch` turns placed attempts into messages and publishes them; it retries while the broker or Redis is unavailable.

`LeaseMonitor` finds attempts that are lost because their worker is silent, or because no worker claims them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from shadho_celery.core.attempts import Attempts, Sent
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import Clock
from shadho_celery.core.trial import Attempt, Lost
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.broker import Publisher, machine_queue
from shadho_celery.fleet.channel import SchedulerChannel, configured_lease
from shadho_celery.fleet.circuit_breaker import CircuitBreaker
from shadho_celery.fleet.redis import outages_pass
from shadho_celery.fleet.workers import MESSAGE_SECONDS, Workers

#: maximum seconds of work, and maximum number of attempts, in one message of short trials
BUNDLE_SECONDS = 0.02
MAX_BUNDLE = 16

#: seconds of work that should wait in a compute class's queue, so that its workers stay busy until the scheduler
#: refills the queue; and maximum number of trials that should wait there
AHEAD_SECONDS = 0.2
MAX_AHEAD = 512

#: minimum seconds between two passes of the scheduler's loop while work waits in the queues, so that each pass handles
#: more events
PACE_SECONDS = 0.04

#: seconds between two tries to reach an unavailable broker
RETRY_SECONDS = 2.0


class Pace:
    """Measures how long trials take in each compute class, and computes how many should wait in the class's queue."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: moving average of the seconds of a trial, by class
        self.seconds: dict[str, float] = {}
        self._turned_at = -math.inf

    def tell(self, compute_class: str, seconds: float) -> None:
        """Add a trial's `seconds` to the moving average of its class. The average starts high, so that a few short
        trials at the start do not yet cause long queues and large messages.
        """
        before = self.seconds.get(compute_class, 10 * BUNDLE_SECONDS)
        self.seconds[compute_class] = before + 0.2 * (max(seconds, MESSAGE_SECONDS) - before)

    def ahead(self, compute_class: ComputeClass) -> int:
        """Return the number of trials that should wait in a class's queue: as many as it runs in AHEAD_SECONDS.

        While other studies have their turn at the shared slots (`fleet.workers.Turns`), the number is only large enough
        to keep the study's own slots busy.
        """
        share, seconds = compute_class.share, AHEAD_SECONDS
        if compute_class.turn == 0:
            share, seconds = compute_class.limit, BUNDLE_SECONDS
        return min(MAX_AHEAD, round(share * seconds / self.seconds.get(compute_class.name, math.inf)))

    def turn(self, classes: Iterable[ComputeClass]) -> None:
        """Begin a pass of the scheduler's loop. If work waits in the queues, first wait until PACE_SECONDS have passed
        since the last pass began, so that events accumulate.
        """
        if [compute_class for compute_class in classes if self.ahead(compute_class)]:
            self._clock.sleep(max(0.0, self._turned_at + PACE_SECONDS - self._clock.now()))
        self._turned_at = self._clock.now()


@dataclass
class Dispatch:
    """Sends the attempts of one study to their queues, as messages."""

    #: a message without attempts, with the fields that all messages of the study have in common
    template: Payload
    publisher: Publisher
    channel: SchedulerChannel
    workers: Workers
    in_flight: Attempts[Sent]
    clock: Clock
    #: True if failures may count against workers (as strikes). False if all workers are on one machine, because a trial
    #: that fails on one worker would fail on the others too
    may_watch: bool

    def __post_init__(self) -> None:
        self.pace = Pace(self.clock)
        #: attempts that the next `send` publishes, except those that are no longer in flight by then
        self.to_publish: list[Attempt] = []
        #: (number, attempt) pairs that have ended their trials according to Redis, although the trials continue; `send`
        #: makes Redis accept claims of later attempts
        self.reopened: list[tuple[int, int]] = []
        #: reason why the broker is unavailable, or None; and the time of the next try
        self.refusal: ServiceError | None = None
        self._retry_at = -math.inf
        #: time of the next check whether the broker accepts messages, which is made only while none wait to be sent
        self._look_at = -math.inf

    def send(self) -> None:
        """Publish the attempts in `to_publish`. While the broker is unavailable, try again every RETRY_SECONDS.

        Raises ServiceError for an error of Redis that is not temporary.
        """
        with outages_pass():
            if self.reopened:
                self.channel.reopen(self.reopened)
                self.reopened.clear()
            now = self.clock.now()
            if not self.to_publish or self.is_waiting(now):
                if not self.to_publish and now >= self._look_at:
                    self.publisher.look()
                    self._look_at = self.clock.now() + RETRY_SECONDS
                return
            wanted = [each for each in self.to_publish if self.in_flight.find(each.number, each.attempt)]
            if self.publish(self._messages(wanted)):
                self.to_publish.clear()

    def publish(self, messages: Iterable[tuple[str, Payload]]) -> bool:
        """Publish pairs of a queue's name and a message. Return whether the broker accepted them."""
        try:
            self.publisher.publish(messages)
        except ServiceError as error:
            self.refusal, self._retry_at = error, self.clock.now() + RETRY_SECONDS
            return False
        self.refusal, self._retry_at = None, -math.inf
        return True

    def is_waiting(self, now: float) -> bool:
        """Return True if the broker was unavailable at the last try and the next try is not due yet."""
        return now < self._retry_at

    def _messages(self, attempts: Sequence[Attempt]) -> Iterator[tuple[str, Payload]]:
        """Yield pairs of a queue's name and a message. Together, the messages contain these attempts."""
        by_class: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in attempts:
            others = [sent for which, sent in self.in_flight.of(attempt.number).items() if which != attempt.attempt]
            # A speculative copy must not run on the machine that already runs an attempt of the trial.
            not_on = next((sent.attempt.host or "" for sent in others if sent.is_claimed), None)
            by_class[str(attempt.compute_class)].append(attempt.evolve(not_on=not_on))
        slots = {compute_class.name: compute_class.slots for compute_class in self.workers.classes}
        for name, group in by_class.items():
            together = [attempt for attempt in group if not _is_alone(attempt)]
            alone = [[attempt] for attempt in group if _is_alone(attempt)]
            for bundle in [*bundles(together, self.pace.seconds.get(name, math.inf), slots.get(name, 1)), *alone]:
                yield queue_of(bundle[0]), self.payload(bundle, self.template.timeout)

    def payload(self, attempts: Sequence[Attempt], timeout: float | None) -> Payload:
        """Return a message with these attempts. Each attempt is stopped after `timeout` seconds."""
        # Failures of a study's only worker do not count against it, because no other worker can try its trials.
        watched = self.may_watch and len(self.workers.able) > 1
        return replace(self.template, attempts=list(attempts), timeout=timeout, watched=watched)


def queue_of(attempt: Attempt) -> str:
    """Return the name of an attempt's queue: the queue of its machine `only_on`, or if that is None of its class."""
    name = str(attempt.compute_class)
    return name if attempt.only_on is None else machine_queue(name, attempt.only_on)


def _is_alone(attempt: Attempt) -> bool:
    """Return whether an attempt needs a message of its own.

    It does if it takes several slots, or if not every machine of its class may run it. It also does if it is not the
    first attempt of its trial: the trial may have killed a worker, and a crash ends all attempts of a message.
    """
    is_for_some = attempt.not_on is not None or attempt.only_on is not None
    return attempt.slots > 1 or attempt.attempt > 1 or is_for_some


def bundles(attempts: Sequence[Attempt], seconds: float, slots: int) -> list[Sequence[Attempt]]:
    """Split `attempts` of one class into messages. One attempt takes about `seconds`, and the class has `slots` slots.

    A message costs about a millisecond of a worker's time, so short trials share a message, as long as there are enough
    messages for all slots.
    """
    size = min(MAX_BUNDLE, int(BUNDLE_SECONDS / seconds), math.ceil(len(attempts) / slots))
    return [attempts[i : i + size] for i in range(0, len(attempts), size)] if size > 1 else [[a] for a in attempts]


#: minimum seconds between two looks; a look reads workers, leases and other studies from Redis
LOOK_SECONDS = 1.0
#: the same while the study has no worker that can run it and no attempt in flight
WAIT_SECONDS = 0.1

#: maximum mean number of announcements and leases that looks read per second, so looks are less frequent on a large
#: fleet
READ_PER_SECOND = 5000

#: an unclaimed message is assumed lost once its class has had a free slot for this many seconds
UNCLAIMED_SECONDS = 30.0

#: seconds after which the waiting attempts of a class without live workers are taken back
NO_WORKER_SECONDS = 10.0

#: seconds after which a waiting attempt for one machine is taken back, so that any machine of its class may run it. The
#: first number applies if that machine has a free slot or no live workers, the second if it is busy
MACHINE_SECONDS = 5.0
MACHINE_BUSY_SECONDS = 60.0

#: a claimed attempt counts as lost if Redis has no record of it at this many checks in a row. One check is not enough:
#: if Redis has only lost its data, the worker's next renewal records the attempt again
MAX_UNLEASED = 10


@dataclass
class LeaseMonitor:
    """Finds lost attempts among one study's attempts in flight, and updates the study's live workers."""

    channel: SchedulerChannel
    workers: Workers
    in_flight: Attempts[Sent]
    breaker: CircuitBreaker
    clock: Clock
    #: True if Redis has failed to answer in time since the last look, so that workers may have been unable to renew
    #: leases
    was_silent: bool = False
    #: Lost events of the attempts found so far; the executor empties the list when it returns them
    lost_events: list[Lost] = field(default_factory=list)
    _looked_at: float = -math.inf
    #: number of announcements and leases read by the last look
    _read: int = 0
    #: attempts whose lease has ended; and attempts whose Lost event the executor has returned. When the executor is
    #: called again, these losses are recorded in the store, so the leases can be removed
    ended: list[tuple[int, int]] = field(default_factory=list)
    returned: list[tuple[int, int]] = field(default_factory=list)
    #: state in Redis of each attempt in flight at the last look; `missing` empties it
    _states: dict[tuple[int, int], str] = field(default_factory=dict)
    _lease_seconds: float = field(default_factory=configured_lease)

    def look(self, now: float) -> list[tuple[int, int]]:
        """Update the live workers and find lost attempts. Do nothing until the next look is due.

        `now` is a time just before the first request to Redis. Returns the (number, attempt) pairs that should be taken
        back because no worker claims them. Raises redis-py's errors.
        """
        self.note_wait(self.clock.now() - now)
        # Look more often while the study has no workers, so that it starts soon after the first worker.
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
            # Extend the leases once after each outage, so that workers have time to renew them.
            self.channel.extend_leases()
            self.was_silent = False
        self.ended = self.channel.ended_leases()
        # If an outage has interrupted the last call, `lost_events` still has losses that were not returned.
        told = {(lost.number, lost.attempt) for lost in self.lost_events}
        self.lost_events += [self._lost(*key, now) for key in self.ended if key not in told]
        keys = [sent.key for sent in self.in_flight]
        self._states = dict(zip(keys, self.channel.states(keys), strict=True))
        self._read = len(self.workers.announced) + len(self.in_flight)
        return [sent.key for sent in self.in_flight if not sent.is_claimed and self._is_overdue(sent, now)]

    def _lost(self, number: int, attempt: int, now: float) -> Lost:
        """Return the Lost event of an attempt whose lease has ended.

        Its reason says whether the whole machine has vanished. A trial may have killed its worker, but it has probably
        not stopped a machine.
        """
        sent = self.in_flight.find(number, attempt)
        host = None if sent is None else sent.attempt.host
        if host and self.workers.has_vanished(host, now):
            reason = "its machine has vanished: none of its workers is live"
            return Lost(number=number, attempt=attempt, reason=reason, vanished=True)
        return Lost(number=number, attempt=attempt, reason="its worker was silent until the lease ran out")

    def note_wait(self, seconds: float) -> None:
        """Set `was_silent` if Redis took long to answer: a server that hangs and recovers raises no error."""
        longest = max(self._lease_seconds / 3, 3 * LOOK_SECONDS, 3 * self._read / READ_PER_SECOND)
        self.was_silent |= seconds > longest

    def missing(self) -> list[tuple[int, int]]:
        """Return the (number, attempt) pairs in flight that no worker runs or can claim (``void`` in Redis), although
        no event of their end has arrived.

        Claimed attempts of which Redis has had no record for MAX_UNLEASED looks are added to `lost_events`. Call
        this after all events before the last look have been handled, because they may contain the missing results.
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
                self.lost_events.append(Lost(number=number, attempt=attempt, reason=reason, claimed=False))
        self._states = {}
        return found

    def _is_overdue(self, sent: Sent, now: float) -> bool:
        """Return whether an unclaimed attempt should be taken back, because it has waited too long or no worker can
        claim it.
        """
        name, host = str(sent.attempt.compute_class), sent.attempt.only_on
        is_bound, slots = host is not None, 1 if host is None else sent.attempt.slots
        gone = MACHINE_SECONDS if is_bound else NO_WORKER_SECONDS
        # The message of an attempt that takes several slots passes from worker to worker of its machine until a worker
        # has enough slots, which takes longer.
        free = MACHINE_SECONDS if is_bound and slots == 1 else UNCLAIMED_SECONDS
        return (
            self.workers.are_gone(sent, now, gone)
            or self.workers.had_free_slot(name, sent.at, now, free, host=host, slots=slots)
            # An attempt that takes several slots may wait longer, because a worker reserves its free slots for it.
            or (is_bound and sent.attempt.slots == 1 and now - sent.at > MACHINE_BUSY_SECONDS)
        )
