"""Sees to it that the seats of a study's gangs are filled, and notices gangs that do not come together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shadho_celery.errors import ServiceError
from shadho_celery.executors import lookout
from shadho_celery.executors.fleet import Fleet
from shadho_celery.executors.gangs import Gangs, Overdue, Room
from shadho_celery.executors.in_flight import InFlight
from shadho_celery.executors.messages import Messages
from shadho_celery.executors.outbox import Outbox
from shadho_celery.hardware import ComputeClass
from shadho_celery.trial import Assembling, GangEvent

#: seconds for which a slot has been free after which it idles, and a backup replica may have it
IDLE_SECONDS = 2.0


class Usher:
    """Tends the gangs of one study beside its trials in flight."""

    def __init__(self, gangs: Gangs, fleet: Fleet, in_flight: InFlight, messages: Messages, outbox: Outbox) -> None:
        self._gangs = gangs
        self._fleet = fleet
        self._in_flight = in_flight
        self._messages = messages
        self._outbox = outbox
        self._tended_at = -math.inf
        #: attempts of an earlier life that may have called for replicas
        self._unheard: list[tuple[int, int]] = []

    def expect(self, attempts: Sequence[tuple[int, int]]) -> None:
        """These (number, attempt) pairs run since an earlier life, and may have called for replicas then."""
        self._unheard += attempts

    def hear(self, event: GangEvent, now: float) -> None:
        """Deal with what happened inside a gang."""
        if isinstance(event, Assembling):
            self._assemble(event, now)
        else:
            self._gangs.failed(event)
        # At once, and not at the next look.
        self._tended_at = -math.inf

    def tend(self, now: float) -> list[Overdue]:
        """Every LOOK_SECONDS: see who sits where and publish free seats.

        Returns the gangs that have not come together: their attempts are to be given up. Raises redis-py's errors.
        """
        if self._unheard:
            for call in self._gangs.seats.calls(self._unheard):
                self._assemble(call, now)
            self._unheard.clear()
        if not self._gangs or now - self._tended_at < lookout.LOOK_SECONDS or self._outbox.waits(now):
            return []
        self._tended_at = now

        def has_waited(compute_class: str, at: float) -> bool:
            return self._fleet.has_waited(compute_class, at, now, lookout.UNCLAIMED_SECONDS)

        try:
            self._gangs.tend(now, {each.name: self._room(each, now) for each in self._fleet.classes}, has_waited)
        except ServiceError as error:
            self._outbox.refused(error, now)
            return []
        return self._gangs.overdue(now)

    def _assemble(self, call: Assembling, now: float) -> None:
        """A trial has called for its replicas: from now on there are seats to be filled."""
        sent = self._in_flight.find(call.number, call.attempt)
        if sent is not None and sent.trial is not None:
            self._gangs.open(call, sent.compute_class, sent.slots, self._messages.for_replicas(sent.trial), now)

    def _room(self, compute_class: ComputeClass, now: float) -> Room:
        """What this study's trials leave of a class for backup replicas."""
        taken = sum(sent.slots for sent in self._in_flight if sent.compute_class == compute_class.name)
        idles = self._fleet.has_waited(compute_class.name, -math.inf, now, IDLE_SECONDS)
        return Room(
            spare=math.ceil(compute_class.share) - taken,
            idle=compute_class.slots - compute_class.busy if idles else 0,
        )
