"""Sends attempts, and tries again for as long as the broker or Redis is away."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shadho_celery.channel import SchedulerChannel
from shadho_celery.clock import Clock
from shadho_celery.errors import ServiceError
from shadho_celery.executors.in_flight import InFlight
from shadho_celery.executors.messages import Messages
from shadho_celery.executors.outages import outages_pass
from shadho_celery.routing import Publisher
from shadho_celery.trial import Trial

#: seconds between two attempts to reach a broker that is away
RETRY_SECONDS = 2.0


class Outbox:
    """What one study has to send."""

    def __init__(
        self, channel: SchedulerChannel, publisher: Publisher, messages: Messages, in_flight: InFlight, clock: Clock
    ) -> None:
        self._channel = channel
        self._publisher = publisher
        self._messages = messages
        self._in_flight = in_flight
        self._clock = clock
        self._unsent: list[Trial] = []
        #: attempts after which another one follows although they have ended
        self._reopened: list[tuple[int, int]] = []
        #: why the broker takes nothing at the moment, None while it does; and the moment to try again
        self.refusal: ServiceError | None = None
        self._retry_at = -math.inf

    def add(self, trials: Sequence[Trial]) -> None:
        """Send these the next time, unless they are not in flight any more by then."""
        self._unsent += trials

    def reopen(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Let other attempts follow these (number, attempt) pairs, before anything else is sent."""
        self._reopened += attempts

    def send(self) -> None:
        """Publish what is to be sent; a broker that is away is asked again now and then, while what runs goes on.

        Raises ServiceError where Redis is of no use.
        """
        if not (self._unsent or self._reopened) or self.waits(self._clock.now()):
            return
        with outages_pass():
            try:
                if self._reopened:
                    self._channel.reopen(self._reopened)
                    self._reopened.clear()
                wanted = [trial for trial in self._unsent if self._in_flight.find(trial.number, trial.attempt)]
                self._publisher.publish(self._messages.carrying(wanted))
            except ServiceError as error:
                self.refused(error, self._clock.now())
            else:
                self.refusal, self._retry_at = None, -math.inf
                self._unsent.clear()

    def waits(self, now: float) -> bool:
        """Whether the broker is away and not to be asked yet."""
        return now < self._retry_at

    def refused(self, error: ServiceError, now: float) -> None:
        """The broker takes nothing: ask it again after a while."""
        self.refusal, self._retry_at = error, now + RETRY_SECONDS
