"""Gangs: see to it that the seats of a study's gangs are filled, and notice gangs that do not come together.

A trial that takes N slots has N - 1 seats besides its coordinator's; each is published until a worker holds it, and
again when its holder has died, for as long as the trial runs. Seats of backup replicas are published while slots idle,
and asked back when trials want those. A gang that has not told within `wait_seconds` that its replicas have come gives
everything back: the slots it waits for may be held by another gang that waits, too. While all of its seats are held it
waits for no other, and its replicas may take ten times as long to get ready. Those that fail do not hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from shadho_celery.core.checks import one_line
from shadho_celery.core.failures import headline
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import MAX_SLOTS, Called, GangEvent, ReplicaFailed, ReplicaSeat
from shadho_celery.fleet.dispatch import Dispatch
from shadho_celery.fleet.in_flight import InFlight
from shadho_celery.fleet.lease_monitor import LOOK_SECONDS, UNCLAIMED_SECONDS
from shadho_celery.fleet.workers import Workers
from shadho_celery.transport.seats import SchedulerSeats, Seat

#: seconds for which a slot has been free after which it idles, and a backup replica may have it
IDLE_SECONDS = 2.0

#: the most seconds until a seat whose replica has failed or died is published again; the first time it takes two
MAX_PAUSE = 60.0

#: times as long that a gang has whose seats are all held: its replicas import and load what its trial has long loaded
READY_FACTOR = 10


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
    def takes_a_slot(self) -> bool:
        return self.state == "held" or (self.state == "never" and self.times > 0 and not self.asked_back)

    def is_due(self, now: float, had_free_slot: Callable[[float], bool]) -> bool:
        """Return whether it is to be published; `had_free_slot` tells whether its class had one since a moment."""
        if self.state == "never":
            return not self.times or self.asked_back or had_free_slot(self.published_at)
        return self.state in ("lost", "left") and now - self.published_at >= min(MAX_PAUSE, 2.0**self.times)


@dataclass
class _Gang:
    """The gang of one attempt."""

    call: Called
    compute_class: str
    #: the message for a replica, but for its seat
    payload: Payload
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

    def message(self, place: _Place) -> tuple[str, Payload]:
        gang, rank = self.call.gang, place.seat.rank
        seat = ReplicaSeat(address=gang.address, token=gang.token, call=self.call.call, rank=rank)
        return self.compute_class, replace(self.payload, replica=seat)


@dataclass(frozen=True, kw_only=True)
class Overdue:
    """A gang that did not come together."""

    number: int
    attempt: int
    reason: str
    #: True where its replicas fail, which the trial is to blame for
    failed: bool


class Gangs:
    """The gangs of one study."""

    def __init__(
        self, seats: SchedulerSeats, dispatch: Dispatch, workers: Workers, in_flight: InFlight, wait_seconds: float
    ) -> None:
        self._seats = seats
        self._dispatch = dispatch
        self._workers = workers
        self._in_flight = in_flight
        self._wait_seconds = wait_seconds
        #: what the operator should know
        self.notices: list[str] = []
        self._gangs: dict[tuple[int, int], _Gang] = {}
        #: seats and attempts that are over, for as long as Redis does not answer
        self._over: list[tuple[tuple[int, int], list[Seat]]] = []
        #: attempts of an earlier life that may have called for replicas
        self._unheard: list[tuple[int, int]] = []
        self._tended_at = -math.inf

    def expect(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Ask at the next `tend` for the calls of these (number, attempt) pairs, which run since an earlier life."""
        self._unheard += attempts

    def hear(self, event: GangEvent, now: float) -> None:
        """Deal with an event from inside a gang: at once, and not at the next look."""
        if isinstance(event, Called):
            self._open(event, now)
        else:
            self._note_failure(event)
        self._tended_at = -math.inf

    def close(self, number: int, attempt: int | None = None) -> None:
        """Free the seats of an attempt that has ended; without `attempt` of all of its trial's."""
        for key in [key for key in self._gangs if key[0] == number and attempt in (None, key[1])]:
            self._over.append((key, [place.seat for place in self._gangs.pop(key).places]))

    def tend(self, now: float) -> list[Overdue]:
        """See every LOOK_SECONDS which seats are held, ask back those that are wanted, publish free ones.

        Returns the gangs that have not come together: their attempts are to be given up. Raises redis-py's errors; the
        rest is done the next time.
        """
        if self._unheard:
            for call in self._seats.calls(self._unheard):
                self._open(call, now)
            self._unheard.clear()
        is_early = now - self._tended_at < LOOK_SECONDS
        if not (self._gangs or self._over) or is_early or self._dispatch.is_waiting(now):
            return []
        self._tended_at = now
        self._forget()
        self._see()
        spare = {each.name: self._spare(each) for each in self._workers.classes}
        for name, slots in spare.items():
            self._ask_back(name, self.backups(name) - slots)
        self._fill(now)
        for each in self._workers.classes:
            idle = each.slots - each.busy if self._idles(each, now) else 0
            self._fill_backups(now, each.name, min(idle, spare[each.name] - self.backups(each.name)))
        return [] if self._dispatch.is_waiting(now) else self._overdue(now)

    def backups(self, compute_class: str) -> int:
        """Return the slots of a class that backup replicas take, or will when their message comes through."""
        return sum(place.takes_a_slot for _, place in self._backups(compute_class))

    def _open(self, call: Called, now: float) -> None:
        """Enter a call for replicas: from now on there are seats to be filled. Or it tells that they have come."""
        sent = self._in_flight.find(call.number, call.attempt)
        if sent is None:
            return
        before = self._gangs.get((call.number, call.attempt))
        if before is not None:
            if before.call.call >= call.call:
                before.is_complete |= call.gang.assembled and before.call.call == call.call
                return
            # The trial trains a second time: the first gang's seats are over.
            self.close(call.number, call.attempt)
        slots = sent.attempt.slots
        places = [
            _Place(Seat(number=call.number, attempt=call.attempt, call=call.call, rank=rank), rank >= slots)
            for rank in range(1, slots + min(call.gang.backups, MAX_SLOTS))
        ]
        payload = self._dispatch.for_replicas(sent.attempt)
        name = str(sent.attempt.compute_class)
        gang = _Gang(call, name, payload, now, places, is_complete=call.gang.assembled)
        self._gangs[call.number, call.attempt] = gang

    def _note_failure(self, event: ReplicaFailed) -> None:
        """Take note of a replica that failed: its seat is published again after a while."""
        text = f"replica {event.rank} of trial {event.number} failed on {event.host}: {one_line(headline(event.error))}"
        self.notices.append(f"Warning: {text}")
        gang = self._gangs.get((event.number, event.attempt))
        if gang is not None:
            gang.failure = text

    def _overdue(self, now: float) -> list[Overdue]:
        """Return the gangs that have waited long enough for replicas, once each."""
        found = []
        for (number, attempt), gang in self._gangs.items():
            patience = self._wait_seconds * (READY_FACTOR if gang.is_seated else 1)
            if gang.is_complete or gang.is_given_back or now - gang.since < patience:
                continue
            gang.is_given_back = True
            reason = f"its gang was not complete within {patience:g} s"
            reason += f"; {gang.failure}" if gang.failure else ""
            found.append(Overdue(number=number, attempt=attempt, reason=reason, failed=bool(gang.failure)))
        return found

    def _spare(self, compute_class: ComputeClass) -> int:
        """Return the slots of this study's part that its trials leave for backup replicas."""
        name = compute_class.name
        taken = sum(sent.attempt.slots for sent in self._in_flight if sent.attempt.compute_class == name)
        return math.ceil(compute_class.share) - taken

    def _idles(self, compute_class: ComputeClass, now: float) -> bool:
        """Return whether a slot of the class has been free for a while."""
        return self._workers.had_free_slot(compute_class.name, -math.inf, now, IDLE_SECONDS)

    def _backups(self, compute_class: str) -> Iterator[tuple[_Gang, _Place]]:
        for gang in self._gangs.values():
            if gang.compute_class == compute_class:
                yield from ((gang, place) for place in gang.places if place.is_backup)

    def _forget(self) -> None:
        while self._over:
            key, seats = self._over[0]
            if key not in self._gangs:
                self._seats.forget([key])
            self._seats.clear(seats)
            del self._over[0]

    def _see(self) -> None:
        places = [place for gang in self._gangs.values() for place in gang.places]
        for place, state in zip(places, self._seats.states([place.seat for place in places]), strict=True):
            place.state = state

    def _ask_back(self, compute_class: str, count: int) -> None:
        """Have so many backups leave, the last ones first; those that were asked before count."""
        taking = [place for _, place in self._backups(compute_class) if place.takes_a_slot]
        wanted = list(reversed(taking))[: max(0, count)]
        new = [place for place in wanted if not place.asked_back]
        self._seats.ask_back([place.seat for place in new])
        for place in new:
            place.asked_back = True

    def _is_due(self, gang: _Gang, place: _Place, now: float) -> bool:
        name = gang.compute_class
        return place.is_due(now, lambda at: self._workers.had_free_slot(name, at, now, UNCLAIMED_SECONDS))

    def _fill(self, now: float) -> None:
        """Publish the free seats of all gangs that are not given back, but for the backups'."""
        due = [
            (gang, place)
            for gang in self._gangs.values()
            for place in gang.places
            if not (place.is_backup or gang.is_given_back) and self._is_due(gang, place, now)
        ]
        self._publish(due, now)

    def _fill_backups(self, now: float, name: str, most: int) -> None:
        """Publish at most so many seats of backups in a class."""
        due = [
            (gang, place) for gang, place in self._backups(name) if gang.is_complete and self._is_due(gang, place, now)
        ]
        self._publish(due[: max(0, most)], now)

    def _publish(self, due: Sequence[tuple[_Gang, _Place]], now: float) -> None:
        if not due or self._dispatch.is_waiting(now):
            return
        # What was said of a seat before must not be taken for what becomes of this message.
        self._seats.clear([place.seat for _, place in due if place.times or place.state != "never"])
        if self._dispatch.publish([gang.message(place) for gang, place in due]):
            for _, place in due:
                place.state, place.published_at, place.asked_back = "never", now, False
                place.times += 1
