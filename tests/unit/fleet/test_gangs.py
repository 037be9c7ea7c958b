"""Which seats of which gangs are published, and when: values in, messages out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest
from msgspec.structs import replace

from shadho_celery.core.attempts import Attempts, Sent
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Called, GangCall, Lost, ReplicaFailed, ReplicaSeat
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.dispatch import RETRY_SECONDS, Dispatch
from shadho_celery.fleet.gangs import IDLE_SECONDS, MAX_PAUSE, Gangs, Seated
from shadho_celery.fleet.seats import SchedulerSeats, Seat


@dataclass
class Table:
    """Seats as Redis has them, and the messages that were published."""

    stand: dict[Seat, str] = field(default_factory=dict)
    wanted: set[Seat] = field(default_factory=set)
    forgotten: list[tuple[int, int]] = field(default_factory=list)
    called: list[Called] = field(default_factory=list)
    messages: list[tuple[str, Payload]] = field(default_factory=list)
    #: True while the broker takes nothing
    refuses: bool = False

    def states(self, seats: Sequence[Seat]) -> list[str]:
        return [self.stand.get(seat, "never") for seat in seats]

    def calls(self, attempts: Sequence[tuple[int, int]]) -> list[Called]:
        return [call for call in self.called if (call.number, call.attempt) in attempts]

    def ask_back(self, seats: Sequence[Seat]) -> None:
        self.wanted |= set(seats)

    def clear(self, seats: Sequence[Seat]) -> None:
        for seat in seats:
            self.stand.pop(seat, None)
            self.wanted.discard(seat)

    def forget(self, attempts: Sequence[tuple[int, int]]) -> None:
        self.forgotten += attempts

    def publish(self, payloads: Iterable[tuple[str, Payload]]) -> None:
        if self.refuses:
            raise ServiceError("the broker is away")
        self.messages += payloads

    def ranks(self) -> list[int]:
        """Ranks of the replicas whose messages were published since the last call."""
        ranks = [payload.replica.rank for _, payload in self.messages if payload.replica is not None]
        self.messages.clear()
        return ranks

    def sit(self, state: str, *ranks: int, number: int = 0, call: int = 1) -> None:
        self.stand |= {Seat(number=number, attempt=1, call=call, rank=rank): state for rank in ranks}


@dataclass
class Slots:
    """Stands in for the workers: classes, and whether a slot has been free for long enough to idle, or to wait."""

    classes: list[ComputeClass] = field(default_factory=list)
    able: set[str] = field(default_factory=set)
    idles: bool = True
    waited: bool = False

    def had_free_slot(self, compute_class: str, at: float, now: float, seconds: float) -> bool:
        assert compute_class == "cpu"
        return self.idles if seconds == IDLE_SECONDS else self.waited


class Rig:
    """The gangs of a study whose trials take three slots each of class cpu."""

    def __init__(self) -> None:
        self.clock, self.table, self.slots, self.in_flight = ManualClock(), Table(), Slots(), Attempts[Sent]()
        services: Any = self.table
        workers: Any = self.slots
        dispatch = Dispatch(
            Payload(study="s", module="m", attempts=[]),
            services,
            services,
            workers,
            self.in_flight,
            self.clock,
            may_watch=False,
        )
        self.gangs = Gangs(cast("SchedulerSeats", self.table), dispatch, workers, self.in_flight, 60.0)

    def run(self, number: int = 0, slots: int = 3) -> None:
        """Have a trial run."""
        attempt = Attempt(number=number, attempt=1, subspace="all", params={}, compute_class="cpu", slots=slots)
        self.in_flight.put(number, 1, Sent(attempt, 0.0))

    def call(self, number: int = 0, slots: int = 3, call: int = 1, **gang: Any) -> None:
        """Have a trial call for replicas, or with `assembled` tell that they have come."""
        if self.in_flight.find(number, 1) is None:
            self.run(number, slots)
        told = GangCall(**{"address": "h:1", "token": "secret", **gang})
        self.gangs.hear(Called(number=number, attempt=1, call=call, gang=told, at=0.0), self.clock.now())

    def end(self, number: int) -> None:
        """Have a trial end."""
        self.in_flight.finish(number, 1, well=True)
        self.gangs.close(number)

    def leave(self, spare: int, idle: int) -> None:
        """Have the trials leave so many slots of the study's part, of which so many idle."""
        taken = sum(sent.attempt.slots for sent in self.in_flight)
        self.slots.classes = [ComputeClass(name="cpu", slots=idle, allowance=taken + spare)]

    def tend(self, at: float) -> list[Lost]:
        self.clock.advance_to(at)
        return self.gangs.tend(self.clock.now())


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def table(rig: Rig) -> Table:
    return rig.table


def test_each_seat_beside_the_coordinators_is_published_once(rig: Rig, table: Table) -> None:
    rig.tend(0)
    rig.call()
    for now in (0, 1, 30):
        rig.tend(now)
    attempt = Attempt(number=0, attempt=1, subspace="all", params={}, compute_class="cpu", slots=3)
    assert table.messages == [
        (
            "cpu",
            Payload(
                study="s",
                module="m",
                attempts=[attempt],
                replica=ReplicaSeat(address="h:1", token="secret", call=1, rank=rank),
            ),
        )
        for rank in (1, 2)
    ]


def test_a_gang_counts_its_slots_and_those_of_its_backups(rig: Rig, table: Table) -> None:
    rig.call(backups=2)
    table.sit("taken", 1)
    rig.tend(0)
    assert rig.gangs.seated() == {(0, 1): Seated(slots=3, taken=2, backups=2, backups_taken=0, waits=True)}
    rig.call(backups=2, assembled=True)
    table.sit("taken", 2, 4)
    rig.tend(5)
    assert rig.gangs.seated() == {(0, 1): Seated(slots=3, taken=3, backups=2, backups_taken=1, waits=False)}
    rig.end(0)
    assert not rig.gangs.seated()


def test_one_whose_trial_is_not_in_flight_has_no_seats(rig: Rig, table: Table) -> None:
    told = GangCall(address="h:1", token="secret")
    rig.gangs.hear(Called(number=0, attempt=1, call=1, gang=told, at=0.0), 0.0)
    rig.tend(0)
    assert table.ranks() == []


def test_what_an_earlier_scheduler_was_called_for_is_taken_up(rig: Rig, table: Table) -> None:
    rig.run()
    table.called = [Called(number=0, attempt=1, call=2, gang=GangCall(address="h:1", token="secret"), at=0.0)]
    rig.gangs.expect([(0, 1)])
    rig.tend(0)
    assert table.ranks() == [1, 2]


def test_a_message_that_nobody_takes_while_a_slot_is_free_is_sent_again(rig: Rig, table: Table) -> None:
    rig.call()
    rig.tend(0)
    table.sit("taken", 1)
    assert table.ranks() == [1, 2]
    rig.slots.waited = True
    rig.tend(31)
    assert table.ranks() == [2]


@pytest.mark.parametrize("state", ["lost", "left"])
def test_a_seat_whose_replica_has_gone_is_filled_again_at_once_after_a_long_life(
    rig: Rig, table: Table, state: str
) -> None:
    rig.call()
    rig.tend(0)
    table.sit("taken", 1, 2)
    rig.tend(500)
    table.ranks()
    table.sit(state, 2)
    rig.tend(501)
    assert table.ranks() == [2]
    assert table.states([Seat(number=0, attempt=1, call=1, rank=2)]) == ["never"], "what was said is forgotten"


def test_one_that_goes_soon_is_filled_after_a_pause_that_grows(rig: Rig, table: Table) -> None:
    rig.call(slots=2)
    rig.call(assembled=True)
    sent = []
    for now in range(300):
        rig.tend(now)
        if table.ranks():
            sent.append(now)
            table.sit("left", 1)
    pauses = [after - before for before, after in pairwise(sent)]
    assert pauses[:5] == [2, 4, 8, 16, 32]
    assert set(pauses[5:]) == {int(MAX_PAUSE)}


def test_a_replica_whose_work_is_done_is_not_replaced(rig: Rig, table: Table) -> None:
    rig.call()
    rig.tend(0)
    table.ranks()
    table.sit("done", 1, 2)
    rig.slots.waited = True
    assert rig.tend(500) == []
    assert table.ranks() == []


def test_a_gang_that_has_not_come_together_in_time_is_given_back_once(rig: Rig, table: Table) -> None:
    rig.call()
    rig.tend(0)
    table.ranks()
    table.sit("taken", 1)
    rig.tend(57)
    table.sit("lost", 1)
    table.sit("taken", 2)
    assert rig.tend(59.9) == []
    [given_back] = rig.tend(61)
    assert (given_back.number, given_back.attempt, given_back.claimed) == (0, 1, False)
    assert given_back.reason == "its gang was not complete within 60 s"
    assert rig.tend(62) == []
    table.ranks()
    rig.slots.waited = True
    assert rig.tend(500) == []
    assert table.ranks() == [], "its seats are of no use any more"


def test_seats_that_are_held_and_lost_again_do_not_make_a_gang(rig: Rig, table: Table) -> None:
    """Its replicas fail before they say hello, say; while all of them are at it, they may take their time."""
    rig.call()
    table.sit("taken", 1, 2)
    assert rig.tend(10) == []
    assert rig.tend(70) == []
    table.sit("left", 1)
    assert [gang.number for gang in rig.tend(71)] == [0]


def test_one_that_has_told_that_it_is_complete_is_its_coordinators_business(rig: Rig, table: Table) -> None:
    rig.call()
    table.sit("taken", 1, 2)
    rig.tend(10)
    rig.call(assembled=True)
    table.sit("lost", 1, 2)
    assert rig.tend(90) == []
    assert rig.tend(1000) == []


def test_one_that_an_earlier_life_was_told_of_is_complete_from_the_beginning(rig: Rig) -> None:
    rig.call(assembled=True)
    rig.tend(0)
    assert rig.tend(1000) == []


def test_that_a_gang_was_complete_tells_nothing_of_the_attempts_next_one(rig: Rig) -> None:
    rig.call(call=2, token="another")
    rig.call(call=1, assembled=True)
    rig.tend(0)
    assert len(rig.tend(60)) == 1


def test_replicas_that_fail_are_told_of_and_are_why_their_gang_is_given_back(rig: Rig) -> None:
    rig.call()
    error = "Traceback (most recent call last):\n  File\nValueError: no such thing"
    failure = ReplicaFailed(number=0, attempt=1, call=1, rank=2, error=error, host="node7", at=1.0)
    rig.gangs.hear(failure, 1.0)
    rig.gangs.hear(replace(failure, number=8), 1.0)
    said = "failed on node7: ValueError: no such thing"
    assert rig.gangs.notices == [f"rank 2 of trial {number} {said}" for number in (0, 8)]
    [given_back] = rig.tend(60)
    assert given_back.claimed
    assert given_back.reason == f"its gang was not complete within 60 s; rank 2 of trial 0 {said}"


def test_a_trial_that_has_ended_has_no_seats_and_redis_forgets_them(rig: Rig, table: Table) -> None:
    rig.call()
    rig.call(number=1)
    table.sit("taken", 1, 2)
    rig.gangs.close(0, 1)
    rig.gangs.close(5)
    rig.tend(0)
    assert {payload.attempts[0].number for _, payload in table.messages} == {1}
    assert table.forgotten == [(0, 1)]
    assert not table.stand
    rig.gangs.close(1)
    rig.tend(1)
    assert table.forgotten == [(0, 1), (1, 1)]
    table.ranks()
    rig.slots.waited = True
    rig.tend(500)
    assert (table.ranks(), table.forgotten) == ([], [(0, 1), (1, 1)]), "there is nothing to tend"


def test_a_second_call_makes_new_seats_and_one_heard_twice_does_not(rig: Rig, table: Table) -> None:
    rig.call()
    rig.tend(0)
    rig.call()
    rig.tend(1)
    assert table.ranks() == [1, 2]
    rig.call(call=2, token="another")
    rig.call()
    rig.tend(2)
    assert {payload.replica.call for _, payload in table.messages if payload.replica} == {2}
    assert table.forgotten == [], "the latest call of the attempt is still to be remembered"


def test_replicas_that_hold_their_seats_and_never_get_ready_are_waited_for_ten_times_as_long(
    rig: Rig, table: Table
) -> None:
    rig.call()
    table.sit("taken", 1, 2)
    rig.tend(0)
    assert rig.tend(599) == []
    [late] = rig.tend(601)
    assert late.reason == "its gang was not complete within 600 s"


def test_what_the_broker_does_not_take_is_published_later(rig: Rig, table: Table) -> None:
    rig.call()
    table.refuses = True
    rig.tend(0)
    table.refuses = False
    rig.tend(RETRY_SECONDS / 2)
    assert table.ranks() == [], "it is not asked at once"
    rig.tend(RETRY_SECONDS)
    assert table.ranks() == [1, 2]


def test_while_the_broker_takes_nothing_no_gang_is_overdue(rig: Rig, table: Table) -> None:
    rig.call()
    table.refuses = True
    assert rig.tend(60) == []
    table.refuses = False
    assert len(rig.tend(60 + RETRY_SECONDS)) == 1


# Backups


def complete(rig: Rig, backups: int, number: int = 0) -> None:
    """Have a gang of three come together, with so many seats for backups."""
    rig.call(number=number, backups=backups)
    rig.tend(0)
    rig.table.sit("taken", 1, 2, number=number)
    rig.call(number=number, backups=backups, assembled=True)
    rig.table.ranks()


def test_backups_are_called_into_idle_slots_of_the_studys_part_once_the_gang_is_complete(
    rig: Rig, table: Table
) -> None:
    rig.call(backups=5)
    rig.leave(spare=9, idle=9)
    rig.tend(0)
    assert table.ranks() == [1, 2]
    table.sit("taken", 1, 2)
    rig.tend(1)
    assert table.ranks() == []
    rig.call(backups=5, assembled=True)
    rig.slots.idles = False
    rig.tend(2)
    assert table.ranks() == [], "they have not been free for long"
    rig.slots.idles = True
    for turn, (spare, idle, ranks) in enumerate([(0, 9, []), (9, 0, []), (2, 1, [3]), (2, 9, [4]), (9, 9, [5, 6, 7])]):
        rig.leave(spare, idle)
        rig.tend(3 + turn)
        assert table.ranks() == ranks, (spare, idle)
    assert rig.gangs.backups("cpu") == 5
    assert rig.gangs.backups("gpu") == 0


def test_backups_leave_when_trials_want_their_slots_the_last_ones_first(rig: Rig, table: Table) -> None:
    complete(rig, backups=3)
    rig.leave(spare=3, idle=3)
    rig.tend(1)
    assert table.ranks() == [3, 4, 5]
    table.sit("taken", 3, 4)
    rig.leave(spare=2, idle=0)
    rig.tend(2)
    assert {seat.rank for seat in table.wanted} == {5}, "one that nobody has taken yet is not to come"
    assert rig.gangs.backups("cpu") == 2
    rig.leave(spare=1, idle=0)
    for now in (3, 4):
        rig.tend(now)
        assert {seat.rank for seat in table.wanted} == {4, 5}, "who was asked is not replaced by another"
    table.sit("left", 4)
    rig.tend(5)
    assert {seat.rank for seat in table.wanted} == {4, 5}
    rig.leave(spare=3, idle=2)
    rig.tend(100)
    assert table.ranks() == [4, 5]
    assert not table.wanted


def test_the_seats_of_backups_need_not_be_held_and_do_not_stand_in_for_others(rig: Rig, table: Table) -> None:
    rig.call(backups=1)
    rig.call(number=1, backups=1)
    table.sit("taken", 1, 2)
    table.sit("taken", 1, 3, number=1)
    rig.tend(1)
    assert [gang.number for gang in rig.tend(60)] == [1]


def test_a_trials_end_leaves_its_slots_to_the_backups_of_others(rig: Rig, table: Table) -> None:
    complete(rig, backups=2)
    rig.run(number=1, slots=2)
    rig.slots.classes = [ComputeClass(name="cpu", slots=5)]
    rig.tend(1)
    assert table.ranks() == []
    rig.end(1)
    rig.tend(2)
    assert table.ranks() == [3, 4]
