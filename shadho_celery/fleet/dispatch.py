"""Dispatch: turn placed attempts into messages and publish them. Retry while the broker or Redis is unavailable."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from shadho_celery.core.attempts import Attempts, Sent
from shadho_celery.core.clock import Clock
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.workers import MESSAGE_SECONDS, Workers
from shadho_celery.transport.broker import Publisher, machine_queue
from shadho_celery.transport.channel import SchedulerChannel
from shadho_celery.transport.redis import outages_pass

#: maximum seconds of work, and maximum number of attempts, in one message of short trials
BUNDLE_SECONDS = 0.02
MAX_BUNDLE = 16

#: seconds of a class's work that should wait in its queue, about the time that the scheduler needs to refill it; and
#: maximum number of trials that should wait there
AHEAD_SECONDS = 0.2
MAX_AHEAD = 512

#: seconds between two turns while the queues have work waiting, so that each turn handles more events
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
        """Add a trial's `seconds` to its class's moving average. This starts high, so one trial changes it little."""
        before = self.seconds.get(compute_class, 10 * BUNDLE_SECONDS)
        self.seconds[compute_class] = before + 0.2 * (max(seconds, MESSAGE_SECONDS) - before)

    def ahead(self, compute_class: ComputeClass) -> int:
        """Return the number of trials that should wait in a class's queue: as many as it runs in AHEAD_SECONDS.

        While other studies have their turn, this is only enough to keep the study's own slots busy.
        """
        share, seconds = compute_class.share, AHEAD_SECONDS
        if compute_class.turn == 0:
            share, seconds = compute_class.limit, BUNDLE_SECONDS
        return min(MAX_AHEAD, round(share * seconds / self.seconds.get(compute_class.name, math.inf)))

    def turn(self, classes: Iterable[ComputeClass]) -> None:
        """Begin a turn. If the queues have work waiting, first let some events accumulate."""
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
    #: False if all workers are on one machine, where a trial that fails on one would fail on the others too
    may_watch: bool

    def __post_init__(self) -> None:
        self.pace = Pace(self.clock)
        #: attempts that the next `send` publishes; attempts that are no longer in flight by then are skipped
        self.unsent: list[Attempt] = []
        #: (number, attempt) pairs that have ended in Redis but whose trials continue; `send` allows later attempts
        self.reopened: list[tuple[int, int]] = []
        #: reason why the broker is unavailable, or None; and the time of the next try
        self.refusal: ServiceError | None = None
        self._retry_at = -math.inf
        #: time of the next look for a notice that the broker takes no messages, while none are sent
        self._look_at = -math.inf

    def send(self) -> None:
        """Publish the unsent attempts. Retry every RETRY_SECONDS while the broker is unavailable.

        Raises ServiceError for an error of Redis that is not temporary.
        """
        with outages_pass():
            if self.reopened:
                self.channel.reopen(self.reopened)
                self.reopened.clear()
            now = self.clock.now()
            if not self.unsent or self.is_waiting(now):
                if not self.unsent and now >= self._look_at:
                    self.publisher.look()
                    self._look_at = self.clock.now() + RETRY_SECONDS
                return
            wanted = [each for each in self.unsent if self.in_flight.find(each.number, each.attempt)]
            if self.publish(self._messages(wanted)):
                self.unsent.clear()

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
        """Yield pairs of a queue's name and a message for it, which together contain these attempts."""
        by_class: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in attempts:
            others = [sent for which, sent in self.in_flight.of(attempt.number).items() if which != attempt.attempt]
            # A copy must run on another machine than the attempt that runs.
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
        # The failures of a single worker cannot be compared with those of other workers.
        watched = self.may_watch and len(self.workers.able) > 1
        return replace(self.template, attempts=list(attempts), timeout=timeout, watched=watched)


def queue_of(attempt: Attempt) -> str:
    """Return the name of the queue to which an attempt is sent: that of its class, or of a machine (`only_on`)."""
    name = str(attempt.compute_class)
    return name if attempt.only_on is None else machine_queue(name, attempt.only_on)


def _is_alone(attempt: Attempt) -> bool:
    """Return whether an attempt needs a message of its own.

    It does if it takes several slots, if only some machines may run it, or if it is not the trial's first attempt: an
    earlier attempt may have killed its worker, and with it all attempts in the message.
    """
    is_for_some = attempt.not_on is not None or attempt.only_on is not None
    return attempt.slots > 1 or attempt.attempt > 1 or is_for_some


def bundles(attempts: Sequence[Attempt], seconds: float, slots: int) -> list[Sequence[Attempt]]:
    """Split `attempts` of one class into messages. One attempt takes about `seconds`, and the class has `slots` slots.

    A message costs about a millisecond of a worker's time, so short trials share a message, as long as every slot gets
    some of the attempts.
    """
    size = min(MAX_BUNDLE, int(BUNDLE_SECONDS / seconds), math.ceil(len(attempts) / slots))
    return [attempts[i : i + size] for i in range(0, len(attempts), size)] if size > 1 else [[a] for a in attempts]
