"""The books of gangs: which trials have called for replicas, which of their seats are free, and who is to fill them.

A trial that takes N slots has N - 1 seats besides its coordinator's; each is published until somebody holds it, and
again when its holder has died, for as long as the trial runs. Seats of backup replicas are published while slots idle,
and asked back when trials want those. A gang that has not told within `wait_seconds` that its replicas have come gives
everything back: what it waits for may be held by another gang that waits, too. While all of its seats are held it waits
for nobody, and its replicas may take ten times as long to get ready. Those that fail do not hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shadho_celery.payloads import MAX_REPLICAS
from shadho_celery.seats import SchedulerSeats, Seat
from shadho_celery.standing import gist
from shadho_celery.trial import Assembling, Unseated

#: the most seconds until a seat whose replica has failed or died is published again; the first time it takes two
MAX_PAUSE = 60.0

#: characters of an error that a notice shows
SHOWN = 200

#: times as long that a gang has whose seats are all held: its replicas import and load what its trial has long loaded
READY = 10

Publish = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], None]


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a class has left for backup replicas."""

    #: slots of this study's part that its trials do not take
    spare: int
    #: slots of the class in which nothing has run for a while
    idle: int


@dataclass
class _Place:
    """A seat, and what was done to fill it."""

    seat: Seat
    is_backup: bool
    #: how it stands: ``never`` taken, ``held``, ``lost``, ``left`` or ``done``
    state: str = "never"
    published_at: float = -math.inf
    #: times it was published
    times: int = 0
    #: True for a backup whose slot is wanted
    asked_back: bool = False

    @property
    def is_taking_a_slot(self) -> bool:
        return self.state == "held" or (self.state == "never" and self.times > 0 and not self.asked_back)

    def is_due(self, now: float, has_waited: Callable[[float], bool]) -> bool:
        """Whether it is to be published; `has_waited` tells whether a slot has been free since a moment, and long."""
        if self.state == "never":
            return not self.times or self.asked_back or has_waited(self.published_at)
        return self.state in ("lost", "left") and now - self.published_at >= min(MAX_PAUSE, 2.0**self.times)


@dataclass
class _Gang:
    """The gang of one attempt."""

    call: Assembling
    compute_class: str
    #: the message for a replica, but for its seat
    payload: Mapping[str, Any]
    #: since when it is waited for
    since: float
    places: list[_Place]
    #: True once its coordinator has told that its replicas have come; and once it was given back
    is_complete: bool = False
    is_given_back: bool = False
    #: how its last replica failed
    failure: str = ""

    @property
    def is_seated(self) -> bool:
        """True while all its seats are held, but for those of backups."""
        return all(place.state in ("held", "done") for place in self.places if not place.is_backup)

    def message(self, place: _Place) -> tuple[str, Mapping[str, Any]]:
        call = self.call
        replica = {"address": call.address, "token": call.token, "call": call.call, "rank": place.seat.rank}
        return self.compute_class, {**self.payload, "replica": replica}


@dataclass(frozen=True, kw_only=True)
class Overdue:
    """A gang that did not come together."""

    number: int
    attempt: int
    reason: str
    #: True where its replicas fail, which the trial is to blame for
    failed: bool


@dataclass
class Gangs:
    """The gangs of one study."""

    seats: SchedulerSeats
    publish: Publish
    wait_seconds: float
    #: what the operator should know
    notices: list[str] = field(default_factory=list)
    _gangs: dict[tuple[int, int], _Gang] = field(default_factory=dict)
    #: seats and attempts that are over, for as long as Redis does not answer
    _over: list[tuple[tuple[int, int], list[Seat]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """True where there is something to tend."""
        return bool(self._gangs or self._over)

    def open(self, call: Assembling, compute_class: str, slots: int, payload: Mapping[str, Any], now: float) -> None:
        """A trial of `slots` slots has called for replicas; `payload` is the message for them, but for their seat.

        Or it tells that those of this call have come.
        """
        before = self._gangs.get((call.number, call.attempt))
        if before is not None:
            if before.call.call >= call.call:
                before.is_complete |= call.assembled and before.call.call == call.call
                return
            # The trial trains a second time: of the first gang's seats nobody is to know any more.
            self.close(call.number, call.attempt)
        places = [
            _Place(Seat(number=call.number, attempt=call.attempt, call=call.call, rank=rank), rank >= slots)
            for rank in range(1, slots + min(call.backups, MAX_REPLICAS))
        ]
        gang = _Gang(call, compute_class, payload, now, places, is_complete=call.assembled)
        self._gangs[call.number, call.attempt] = gang

    def close(self, number: int, attempt: int | None = None) -> None:
        """An attempt has ended; without `attempt` all of its trial's."""
        for key in [key for key in self._gangs if key[0] == number and attempt in (None, key[1])]:
            self._over.append((key, [place.seat for place in self._gangs.pop(key).places]))

    def failed(self, event: Unseated) -> None:
        """Take note of a replica that failed: its seat is published again after a while."""
        text = f"replica {event.rank} of trial {event.number} failed on {event.host}: {gist(event.error)[:SHOWN]}"
        self.notices.append(f"Warning: {text}")
        gang = self._gangs.get((event.number, event.attempt))
        if gang is not None:
            gang.failure = text

    def tend(self, now: float, rooms: Mapping[str, Room], has_waited: Callable[[str, float], bool]) -> None:
        """See who sits where, ask back what is wanted, publish what is free.

        `rooms` by class; `has_waited` tells whether a class has had a free slot since a moment, and long. Raises
        redis-py's errors, and ServiceError where the broker takes nothing: what was not done is done the next time.
        """
        self._forget()
        self._see()
        for name, room in rooms.items():
            self._ask_back(name, self.backups(name) - room.spare)
        self._fill(now, has_waited)
        for name, room in rooms.items():
            self._fill_idle(now, name, min(room.idle, room.spare - self.backups(name)), has_waited)

    def overdue(self, now: float) -> list[Overdue]:
        """The gangs that have waited long enough for replicas, once each: their attempts are to be given up."""
        found = []
        for (number, attempt), gang in self._gangs.items():
            patience = self.wait_seconds * (READY if gang.is_seated else 1)
            if gang.is_complete or gang.is_given_back or now - gang.since < patience:
                continue
            gang.is_given_back = True
            reason = f"its gang was not complete within {patience:g} s"
            reason += f"; {gang.failure}" if gang.failure else ""
            found.append(Overdue(number=number, attempt=attempt, reason=reason, failed=bool(gang.failure)))
        return found

    def backups(self, compute_class: str) -> int:
        """Slots of a class that backup replicas take, or will when their message comes through."""
        return sum(place.is_taking_a_slot for _, place in self._backups(compute_class))

    def _backups(self, compute_class: str) -> Iterator[tuple[_Gang, _Place]]:
        for gang in self._gangs.values():
            if gang.compute_class == compute_class:
                yield from ((gang, place) for place in gang.places if place.is_backup)

    def _forget(self) -> None:
        while self._over:
            key, seats = self._over[0]
            if key not in self._gangs:
                self.seats.forget([key])
            self.seats.clear(seats)
            del self._over[0]

    def _see(self) -> None:
        places = [place for gang in self._gangs.values() for place in gang.places]
        for place, state in zip(places, self.seats.states([place.seat for place in places]), strict=True):
            place.state = state

    def _ask_back(self, compute_class: str, count: int) -> None:
        """Have so many backups leave, the last ones first; those that were asked before count."""
        taking = [place for _, place in self._backups(compute_class) if place.is_taking_a_slot]
        wanted = list(reversed(taking))[: max(0, count)]
        new = [place for place in wanted if not place.asked_back]
        self.seats.ask_back([place.seat for place in new])
        for place in new:
            place.asked_back = True

    def _fill(self, now: float, has_waited: Callable[[str, float], bool]) -> None:
        """Publish the free seats of all gangs that are not given back, but for the backups'."""
        due = [
            (gang, place)
            for gang in self._gangs.values()
            for place in gang.places
            if not (place.is_backup or gang.is_given_back)
            and place.is_due(now, lambda at, gang=gang: has_waited(gang.compute_class, at))  # type: ignore[misc]
        ]
        self._send(due, now)

    def _fill_idle(self, now: float, name: str, room: int, has_waited: Callable[[str, float], bool]) -> None:
        """Publish as many backups' seats in a class as it has `room` for."""
        due = [
            (gang, place)
            for gang, place in self._backups(name)
            if gang.is_complete and place.is_due(now, lambda at: has_waited(name, at))
        ]
        self._send(due[: max(0, room)], now)

    def _send(self, due: Sequence[tuple[_Gang, _Place]], now: float) -> None:
        if not due:
            return
        # What was said of a seat before must not be taken for what becomes of this message.
        self.seats.clear([place.seat for _, place in due if place.times or place.state != "never"])
        self.publish([gang.message(place) for gang, place in due])
        for _, place in due:
            place.state, place.published_at, place.asked_back = "never", now, False
            place.times += 1
