"""Gangs: fill the seats of a study's gangs, and find gangs that stay incomplete.

A gang is the processes of one trial that takes several slots: a coordinator and its replicas. A trial that takes N
slots has N - 1 seats for replicas. A seat is published as a message until a worker takes it, and again if that worker
dies while the trial runs. Seats of backup replicas are published while slots are idle. When trials want these slots,
the slots are reclaimed.

If a coordinator has not reported within `wait_seconds` that its replicas have arrived, the gang gives all its slots
back, because two gangs may each hold slots that the other gang needs. Once all seats of a gang are taken, no other gang
can block it, so its replicas may take ten times as long to get ready. A replica that fails gives its seat back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from shadho_celery.core.attempts import Attempts, Sent
from shadho_celery.core.checks import one_line
from shadho_celery.core.failures import headline
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import MAX_SLOTS, Called, GangEvent, Lost, ReplicaSeat
from shadho_celery.fleet.dispatch import LOOK_SECONDS, UNCLAIMED_SECONDS, Dispatch
from shadho_celery.fleet.redis import flush
from shadho_celery.fleet.seats import SchedulerSeats, Seat
from shadho_celery.fleet.workers import Workers

#: seconds for which a slot must be idle before a backup replica may use it
IDLE_SECONDS = 2.0

#: maximum seconds until a seat whose replica has failed or died is published again; the first pause is two seconds
MAX_PAUSE = 60.0

#: factor by which `wait_seconds` is longer for a gang whose seats are all taken, because its replicas must still import
#: modules and load data before they reach the coordinator
READY_FACTOR = 10


@dataclass(frozen=True, kw_only=True)
class Seated:
    """Number of slots that a gang has, as the live view shows it."""

    #: slots that the trial takes, and below it how many of them have a process of the gang, including the coordinator
    slots: int
    taken: int
    #: further slots that the gang wants for backup replicas, and below it how many of them it has
    backups: int
    backups_taken: int
    #: True until the gang's coordinator has reported that its replicas have arrived
    waits: bool


@dataclass
class _Place:
    """A seat for one replica of a gang, with its state, and how often the message that offers it was published."""

    gang: _Gang = field(repr=False)
    seat: Seat
    is_backup: bool
    #: ``never`` taken, ``taken`` now, ``lost``, ``left`` or ``done``
    state: str = "never"
    published_at: float = -math.inf
    #: number of times the message of this seat was published
    times: int = 0
    #: True if the backup replica in this seat was asked to leave, because trials want the slot
    asked_back: bool = False

    @property
    def takes_a_slot(self) -> bool:
        return self.state == "taken" or (self.state == "never" and self.times > 0 and not self.asked_back)

    def message(self) -> tuple[str, Payload]:
        """Return the name of the seat's queue, and the message that offers the seat."""
        call = self.gang.call
        seat = ReplicaSeat(address=call.gang.address, token=call.gang.token, call=call.call, rank=self.seat.rank)
        return self.gang.compute_class, replace(self.gang.payload, replica=seat)


@dataclass
class _Gang:
    """The gang of one attempt: its call for replicas and its seats."""

    call: Called
    compute_class: str
    #: the message for a replica, without its seat
    payload: Payload
    #: time at which the attempt's call for replicas was received
    since: float
    places: list[_Place] = field(default_factory=list)
    #: True after the coordinator has reported that its replicas have arrived
    is_complete: bool = False
    #: True after the attempt was given up because the gang stayed incomplete for too long
    is_given_back: bool = False
    #: description of the last failure of a replica
    failure: str = ""

    @property
    def seated(self) -> Seated:
        backups = [place.state in ("taken", "done") for place in self.places if place.is_backup]
        others = [place.state in ("taken", "done") for place in self.places if not place.is_backup]
        return Seated(
            slots=1 + len(others),
            taken=1 + sum(others),
            backups=len(backups),
            backups_taken=sum(backups),
            waits=not self.is_complete,
        )


@dataclass
class Gangs:
    """The gangs of one study."""

    seats: SchedulerSeats
    dispatch: Dispatch
    workers: Workers
    in_flight: Attempts[Sent]
    wait_seconds: float

    def __post_init__(self) -> None:
        #: True once an attempt may have called for replicas; until then, `tend` and `close` have nothing to do
        self.is_needed = False
        #: warnings for the operator
        self.notices: list[str] = []
        self._gangs: dict[tuple[int, int], _Gang] = {}
        #: pending calls that remove the seats of ended gangs; they are repeated until Redis answers
        self._over: list[Callable[[], object]] = []
        #: attempts that an earlier scheduler started and that may have called for replicas
        self._unheard: list[tuple[int, int]] = []
        self._tended_at = -math.inf

    def expect(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Let the next `tend` read the calls of these (number, attempt) pairs, which an earlier scheduler started."""
        self._unheard += attempts
        self.is_needed = True

    def hear(self, event: GangEvent, now: float) -> None:
        """Handle an event from a gang. The next `tend` then acts at once, even if LOOK_SECONDS have not passed."""
        if isinstance(event, Called):
            self._open(event, now)
        else:
            # The replica has given its seat back. `tend` publishes the seat again after a pause.
            failure = one_line(headline(event.error))
            text = f"rank {event.rank} of trial {event.number} failed on {event.host}: {failure}"
            self.notices.append(text)
            if (gang := self._gangs.get((event.number, event.attempt))) is not None:
                gang.failure = text
        self._tended_at = -math.inf
        self.is_needed = True

    def seated(self) -> dict[tuple[int, int], Seated]:
        """Return the slots of each gang, by number and attempt, as of the last `tend`."""
        return {key: gang.seated for key, gang in self._gangs.items()}

    def close(self, number: int, attempt: int | None = None) -> None:
        """Free the seats of an ended attempt, or of all attempts of its trial if `attempt` is not given."""
        for key in [key for key in self._gangs if key[0] == number and attempt in (None, key[1])]:
            self._over.append(partial(self._forget, key, [place.seat for place in self._gangs.pop(key).places]))

    def tend(self, now: float) -> list[Lost]:
        """Every LOOK_SECONDS, read the states of seats, reclaim the slots that trials want, and publish free seats.

        Returns a Lost event for each attempt that must be given up because its gang has stayed incomplete for too long.
        Raises redis-py's errors; the next call continues.
        """
        if self._unheard:
            for call in self.seats.calls(self._unheard):
                self._open(call, now)
            self._unheard.clear()
        is_early = now - self._tended_at < LOOK_SECONDS
        if not (self._gangs or self._over) or is_early or self.dispatch.is_waiting(now):
            return []
        self._tended_at = now
        flush(self._over)
        places = [place for gang in self._gangs.values() for place in gang.places]
        for place, state in zip(places, self.seats.states([place.seat for place in places]), strict=True):
            place.state = state
        # Slots of each class that the study may use and its trials do not take: they are left for backup replicas.
        spare = {each.name: each.limit for each in self.workers.classes}
        for sent in self.in_flight:
            if (name := str(sent.attempt.compute_class)) in spare:
                spare[name] -= sent.attempt.slots
        for name, slots in spare.items():
            self._ask_back(name, self.backups(name) - slots)
        # Publish the free seats of all gangs that are not given back. Those of backup replicas follow below.
        free = [place for place in places if not (place.is_backup or place.gang.is_given_back)]
        self._publish([place for place in free if self._is_due(place, now)], now)
        for each in self.workers.classes:
            idles = self.workers.had_free_slot(each.name, -math.inf, now, IDLE_SECONDS)
            idle = each.slots - each.busy if idles else 0
            most = max(0, min(idle, spare[each.name] - self.backups(each.name)))
            complete = [place for place in self._backups(each.name) if place.gang.is_complete]
            self._publish([place for place in complete if self._is_due(place, now)][:most], now)
        return [] if self.dispatch.is_waiting(now) else self._overdue(now)

    def backups(self, compute_class: str) -> int:
        """Return the number of slots in a class that backup replicas take, or will take once their messages arrive."""
        return sum(place.takes_a_slot for place in self._backups(compute_class))

    def _open(self, call: Called, now: float) -> None:
        """Record an attempt's call for replicas, or its report that they have arrived."""
        sent = self.in_flight.find(call.number, call.attempt)
        if sent is None:
            return
        before = self._gangs.get((call.number, call.attempt))
        if before is not None:
            if before.call.call >= call.call:
                before.is_complete |= call.gang.assembled and before.call.call == call.call
                return
            # The trial trains another model, so the seats of its earlier gang are no longer needed.
            self.close(call.number, call.attempt)
        slots = sent.attempt.slots
        # Replicas have no time limit of their own: they end with their coordinator.
        payload = self.dispatch.payload([sent.attempt], None)
        gang = _Gang(call, str(sent.attempt.compute_class), payload, now, is_complete=call.gang.assembled)
        for rank in range(1, slots + min(call.gang.backups, MAX_SLOTS)):
            seat = Seat(number=call.number, attempt=call.attempt, call=call.call, rank=rank)
            gang.places.append(_Place(gang, seat, rank >= slots))
        self._gangs[call.number, call.attempt] = gang

    def _overdue(self, now: float) -> list[Lost]:
        """Return a Lost event for each gang that has waited too long for replicas. Each gang is returned only once."""
        found = []
        for (number, attempt), gang in self._gangs.items():
            seated = gang.seated
            patience = self.wait_seconds * (READY_FACTOR if seated.taken == seated.slots else 1)
            if gang.is_complete or gang.is_given_back or now - gang.since < patience:
                continue
            gang.is_given_back = True
            reason = f"its gang was not complete within {patience:g} s"
            reason += f"; {gang.failure}" if gang.failure else ""
            # If a replica has failed, the loss counts against the trial (`claimed`).
            found.append(Lost(number=number, attempt=attempt, reason=reason, claimed=bool(gang.failure)))
        return found

    def _backups(self, compute_class: str) -> list[_Place]:
        gangs = [gang for gang in self._gangs.values() if gang.compute_class == compute_class]
        return [place for gang in gangs for place in gang.places if place.is_backup]

    def _forget(self, key: tuple[int, int], seats: Sequence[Seat]) -> None:
        if key not in self._gangs:
            self.seats.forget([key])
        self.seats.clear(seats)

    def _ask_back(self, compute_class: str, count: int) -> None:
        """Ask `count` backup replicas of a class to leave, the last ones first. Replicas that were asked before count
        too.
        """
        taking = [place for place in self._backups(compute_class) if place.takes_a_slot]
        wanted = list(reversed(taking))[: max(0, count)]
        new = [place for place in wanted if not place.asked_back]
        self.seats.ask_back([place.seat for place in new])
        for place in new:
            place.asked_back = True

    def _is_due(self, place: _Place, now: float) -> bool:
        """Return whether a seat should be published, for the first time or again."""
        if place.state == "never":
            name = place.gang.compute_class
            had_free_slot = self.workers.had_free_slot(name, place.published_at, now, UNCLAIMED_SECONDS)
            return not place.times or place.asked_back or had_free_slot
        return place.state in ("lost", "left") and now - place.published_at >= min(MAX_PAUSE, 2.0**place.times)

    def _publish(self, due: Sequence[_Place], now: float) -> None:
        if not due or self.dispatch.is_waiting(now):
            return
        # Clear the old states of these seats, so that they are not mistaken for answers to the new messages.
        self.seats.clear([place.seat for place in due if place.times or place.state != "never"])
        if self.dispatch.publish([place.message() for place in due]):
            for place in due:
                place.state, place.published_at, place.asked_back = "never", now, False
                place.times += 1
