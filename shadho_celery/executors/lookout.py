"""Looks now and then who lives, and which attempts got lost: nobody claims them, or their worker fell silent."""

from __future__ import annotations

import math

from shadho_celery.channel import SchedulerChannel, configured_lease
from shadho_celery.executors.fleet import Fleet
from shadho_celery.executors.in_flight import InFlight, Sent
from shadho_celery.executors.referee import Referee
from shadho_celery.trial import Lost

#: seconds between two looks at workers, leases and fellow studies
LOOK_SECONDS = 1.0

#: seconds for which a class has had a free slot after which an unclaimed message is presumed lost
UNCLAIMED_SECONDS = 30.0

#: seconds after which what waits for a class without live workers is taken back
DESERTED_SECONDS = 10.0

#: looks in a row that find no lease of a claimed attempt, after which it is lost: its result may be on its way, or
#: Redis has lost its memory and the worker will tell it again
MISSED_LOOKS = 10


class Lookout:
    """Looks after the fleet and the attempts in flight of one study."""

    def __init__(
        self, channel: SchedulerChannel, fleet: Fleet, in_flight: InFlight, referee: Referee, now: float
    ) -> None:
        self._channel = channel
        self._fleet = fleet
        self._in_flight = in_flight
        self._referee = referee
        self._looked_at = -math.inf
        self._seen_leases_at = now
        #: attempts whose lease has ended, for as long as that is not recorded
        self._ended: list[tuple[int, int]] = []
        #: the losses found, until somebody takes them
        self.losses: list[Lost] = []

    def look(self, now: float) -> list[tuple[int, int]]:
        """Every LOOK_SECONDS: who lives, whose lease has ended, what nobody claims.

        Returns the last, (number, attempt) pairs that are to be taken back. Raises redis-py's errors.
        """
        if now - self._looked_at < LOOK_SECONDS:
            return []
        self._looked_at = now
        self._fleet.look(now, self._in_flight, self._referee.fenced)
        if not self._fleet.able:
            self._referee.release(self._fleet.kept_off)
        self._see_leases(now)
        return self._strays(now)

    def confirm(self) -> None:
        """Forget the leases whose end was found: it is recorded. Raises redis-py's errors."""
        self._channel.forget(self._ended)
        self._ended.clear()

    def _see_leases(self, now: float) -> None:
        """Claimed attempts whose lease has ended, or of which Redis knows nothing any more, are lost."""
        if now - self._seen_leases_at > max(configured_lease() / 3, 3 * LOOK_SECONDS):
            # We could not look, so workers may not have been able to renew: they get the time to do so.
            self._channel.extend_leases()
        ended = self._channel.ended_leases()
        for number, attempt in ended:
            reason = "its worker fell silent: the lease ran out"
            self.losses.append(Lost(number=number, attempt=attempt, reason=reason))
        self._see_forgotten()
        self._ended = sorted(ended)
        self._seen_leases_at = now

    def _see_forgotten(self) -> None:
        claimed = [sent for sent in self._in_flight if sent.claimed]
        leased = self._channel.leased([(sent.number, sent.attempt) for sent in claimed])
        for sent, known in zip(claimed, leased, strict=True):
            sent.missed = 0 if known else sent.missed + 1
            if sent.missed >= MISSED_LOOKS:
                reason = "Redis has forgotten it, and no worker tells of it any more"
                self.losses.append(Lost(number=sent.number, attempt=sent.attempt, reason=reason, claimed=False))

    def _strays(self, now: float) -> list[tuple[int, int]]:
        """What should long have been claimed, and what waits for a class that has died out."""
        return [
            (sent.number, sent.attempt) for sent in self._in_flight if not sent.claimed and self._is_stray(sent, now)
        ]

    def _is_stray(self, sent: Sent, now: float) -> bool:
        return self._fleet.is_deserted(sent, now, DESERTED_SECONDS) or self._fleet.has_waited(
            sent.compute_class, sent.at, now, UNCLAIMED_SECONDS
        )
