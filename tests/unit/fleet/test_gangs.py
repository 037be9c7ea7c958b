"""Which seats of which gangs are published, and when: values in, messages out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import pytest

from shadho_celery.core.trial import Assembling, Unseated
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.gangs import MAX_PAUSE, Gangs, Room
from shadho_celery.transport.seats import SchedulerSeats, Seat

CALL = Assembling(number=0, attempt=1, call=1, address="h:1", token="secret", at=0.0)
NO_ROOM = {"cpu": Room(spare=0, idle=0)}


@dataclass
class Table:
    """Seats as Redis has them, and the messages that were published."""

    stand: dict[Seat, str] = field(default_factory=dict)
    wanted: set[Seat] = field(default_factory=set)
    forgotten: list[tuple[int, int]] = field(default_factory=list)
    messages: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    #: True while the broker takes nothing
    refuses: bool = False

    def states(self, seats: Sequence[Seat]) -> list[str]:
        return [self.stand.get(seat, "never") for seat in seats]

    def ask_back(self, seats: Sequence[Seat]) -> None:
        self.wanted |= set(seats)

    def clear(self, seats: Sequence[Seat]) -> None:
        for seat in seats:
            self.stand.pop(seat, None)
            self.wanted.discard(seat)

    def forget(self, attempts: Sequence[tuple[int, int]]) -> None:
        self.forgotten += attempts

    def publish(self, payloads: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        if self.refuses:
            raise ServiceError("the broker is away")
        self.messages += payloads

    def ranks(self) -> list[int]:
        """Ranks of the replicas whose messages were published since the last call."""
        ranks = [payload["replica"]["rank"] for _, payload in self.messages]
        self.messages.clear()
        return ranks

    def sit(self, state: str, *ranks: int, number: int = 0, call: int = 1) -> None:
        self.stand |= {Seat(number=number, attempt=1, call=call, rank=rank): state for rank in ranks}


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def gangs(table: Table) -> Gangs:
    return Gangs(cast("SchedulerSeats", table), table.publish, 60.0)


def tend(gangs: Gangs, now: float, rooms: Mapping[str, Room] | None = None, waited: bool = False) -> None:
    gangs.tend(now, NO_ROOM if rooms is None else rooms, lambda name, at: waited)


def assemble(gangs: Gangs, slots: int = 3, now: float = 0.0, **changes: Any) -> None:
    call = replace(CALL, **changes)
    gangs.open(call, "cpu", slots, {"study": "s", "attempts": [{"number": call.number}]}, now)


def test_each_seat_beside_the_coordinators_is_published_once(gangs: Gangs, table: Table) -> None:
    assert not gangs
    assemble(gangs)
    assert gangs
    for now in (0.0, 1.0, 30.0):
        tend(gangs, now)
    place = {"address": "h:1", "token": "secret", "call": 1}
    assert table.messages == [
        ("cpu", {"study": "s", "attempts": [{"number": 0}], "replica": {**place, "rank": rank}}) for rank in (1, 2)
    ]


def test_a_message_that_nobody_takes_while_a_slot_is_free_is_sent_again(gangs: Gangs, table: Table) -> None:
    assemble(gangs)
    tend(gangs, 0)
    table.sit("held", 1)
    assert table.ranks() == [1, 2]
    tend(gangs, 31, waited=True)
    assert table.ranks() == [2]


@pytest.mark.parametrize("state", ["lost", "left"])
def test_a_seat_whose_replica_has_gone_is_filled_again_at_once_after_a_long_life(
    gangs: Gangs, table: Table, state: str
) -> None:
    assemble(gangs)
    tend(gangs, 0)
    table.sit("held", 1, 2)
    tend(gangs, 500)
    table.ranks()
    table.sit(state, 2)
    tend(gangs, 501)
    assert table.ranks() == [2]
    assert gangs.seats.states([Seat(number=0, attempt=1, call=1, rank=2)]) == ["never"], "what was said is forgotten"


def test_one_that_goes_soon_is_filled_after_a_pause_that_grows(gangs: Gangs, table: Table) -> None:
    assemble(gangs, slots=2)
    sent = []
    for now in range(300):
        tend(gangs, now)
        if table.ranks():
            sent.append(now)
            table.sit("left", 1)
    pauses = [after - before for before, after in pairwise(sent)]
    assert pauses[:5] == [2, 4, 8, 16, 32]
    assert set(pauses[5:]) == {int(MAX_PAUSE)}


def test_a_replica_whose_work_is_done_is_not_replaced(gangs: Gangs, table: Table) -> None:
    assemble(gangs)
    tend(gangs, 0)
    table.ranks()
    table.sit("done", 1, 2)
    tend(gangs, 500, waited=True)
    assert table.ranks() == []
    assert gangs.overdue(500) == []


def test_a_gang_that_has_not_come_together_in_time_is_given_back_once(gangs: Gangs, table: Table) -> None:
    assemble(gangs)
    tend(gangs, 0)
    table.ranks()
    table.sit("held", 1)
    tend(gangs, 59)
    table.sit("lost", 1)
    table.sit("held", 2)
    tend(gangs, 59.5)
    assert gangs.overdue(59.9) == []
    [given_back] = gangs.overdue(60)
    assert (given_back.number, given_back.attempt, given_back.failed) == (0, 1, False)
    assert given_back.reason == "its gang was not complete within 60 s"
    assert gangs.overdue(61) == []
    table.ranks()
    tend(gangs, 500, waited=True)
    assert table.ranks() == [], "its seats are of no use any more"


def test_seats_that_are_held_and_lost_again_do_not_make_a_gang(gangs: Gangs, table: Table) -> None:
    """Its replicas fail before they say hello, say; while all of them are at it, they may take their time."""
    assemble(gangs)
    table.sit("held", 1, 2)
    tend(gangs, 10)
    assert gangs.overdue(10) == []
    tend(gangs, 70)
    assert gangs.overdue(70) == []
    table.sit("left", 1)
    tend(gangs, 71)
    assert [gang.number for gang in gangs.overdue(71)] == [0]


def test_one_that_has_told_that_it_is_complete_is_its_coordinators_business(gangs: Gangs, table: Table) -> None:
    assemble(gangs)
    table.sit("held", 1, 2)
    tend(gangs, 10)
    assemble(gangs, assembled=True)
    table.sit("lost", 1, 2)
    tend(gangs, 90)
    assert gangs.overdue(1000) == []


def test_one_that_an_earlier_life_was_told_of_is_complete_from_the_beginning(gangs: Gangs) -> None:
    assemble(gangs, assembled=True)
    tend(gangs, 0)
    assert gangs.overdue(1000) == []


def test_that_a_gang_was_complete_tells_nothing_of_the_attempts_next_one(gangs: Gangs) -> None:
    assemble(gangs, call=2, token="another")
    assemble(gangs, call=1, assembled=True)
    tend(gangs, 0)
    assert len(gangs.overdue(60)) == 1


def test_replicas_that_fail_are_told_of_and_are_why_their_gang_is_given_back(gangs: Gangs) -> None:
    assemble(gangs)
    error = "Traceback (most recent call last):\n  File\nValueError: no such thing"
    gangs.failed(Unseated(number=0, attempt=1, call=1, rank=2, error=error, host="node7", at=1.0))
    gangs.failed(Unseated(number=8, attempt=1, call=1, rank=2, error=error, host="node7", at=1.0))
    said = "failed on node7: ValueError: no such thing"
    assert gangs.notices == [f"Warning: replica 2 of trial {number} {said}" for number in (0, 8)]
    [given_back] = gangs.overdue(60)
    assert given_back.failed
    assert given_back.reason == f"its gang was not complete within 60 s; replica 2 of trial 0 {said}"


def test_a_trial_that_has_ended_has_no_seats_and_redis_forgets_them(gangs: Gangs, table: Table) -> None:
    assemble(gangs)
    assemble(gangs, number=1)
    table.sit("held", 1, 2)
    gangs.close(0, 1)
    gangs.close(5)
    assert gangs
    tend(gangs, 0)
    assert {payload["attempts"][0]["number"] for _, payload in table.messages} == {1}
    assert table.forgotten == [(0, 1)]
    assert not table.stand
    gangs.close(1)
    tend(gangs, 1)
    assert not gangs


def test_a_second_call_makes_new_seats_and_one_heard_twice_does_not(gangs: Gangs, table: Table) -> None:
    assemble(gangs)
    tend(gangs, 0)
    assemble(gangs)
    tend(gangs, 1)
    assert table.ranks() == [1, 2]
    assemble(gangs, call=2, token="another")
    assemble(gangs)
    tend(gangs, 2)
    assert {payload["replica"]["call"] for _, payload in table.messages} == {2}
    assert table.forgotten == [], "the latest call of the attempt is still to be remembered"


def test_replicas_that_hold_their_seats_and_never_get_ready_are_waited_for_ten_times_as_long(
    gangs: Gangs, table: Table
) -> None:
    assemble(gangs)
    table.sit("held", 1, 2)
    tend(gangs, 0)
    assert gangs.overdue(599.0) == []
    [late] = gangs.overdue(601.0)
    assert late.reason == "its gang was not complete within 600 s"


def test_what_the_broker_does_not_take_is_published_later(gangs: Gangs, table: Table) -> None:
    assemble(gangs)
    table.refuses = True
    with pytest.raises(ServiceError):
        tend(gangs, 0)
    table.refuses = False
    tend(gangs, 1)
    assert table.ranks() == [1, 2]


# Backups


def complete(gangs: Gangs, table: Table, backups: int, number: int = 0) -> None:
    """A gang of three, complete, with so many seats of backups."""
    assemble(gangs, number=number, backups=backups)
    tend(gangs, 0)
    table.sit("held", 1, 2, number=number)
    tend(gangs, 0)
    assemble(gangs, number=number, backups=backups, assembled=True)
    table.ranks()


def test_backups_are_called_into_idle_slots_of_the_studys_part_once_the_gang_is_complete(
    gangs: Gangs, table: Table
) -> None:
    assemble(gangs, backups=5)
    tend(gangs, 0, {"cpu": Room(spare=9, idle=9)})
    assert table.ranks() == [1, 2]
    table.sit("held", 1, 2)
    tend(gangs, 0, {"cpu": Room(spare=9, idle=9)})
    assert table.ranks() == []
    assemble(gangs, backups=5, assembled=True)
    for room, ranks in [
        (Room(spare=0, idle=9), []),
        (Room(spare=9, idle=0), []),
        (Room(spare=2, idle=1), [3]),
        (Room(spare=2, idle=9), [4]),
        (Room(spare=9, idle=9), [5, 6, 7]),
    ]:
        tend(gangs, 1, {"cpu": room})
        assert table.ranks() == ranks, room
    assert gangs.backups("cpu") == 5
    assert gangs.backups("gpu") == 0


def test_backups_leave_when_trials_want_their_slots_the_last_ones_first(gangs: Gangs, table: Table) -> None:
    complete(gangs, table, backups=3)
    tend(gangs, 1, {"cpu": Room(spare=3, idle=3)})
    assert table.ranks() == [3, 4, 5]
    table.sit("held", 3, 4)
    tend(gangs, 2, {"cpu": Room(spare=2, idle=0)})
    assert {seat.rank for seat in table.wanted} == {5}, "one that nobody has taken yet is not to come"
    assert gangs.backups("cpu") == 2
    for _ in range(2):
        tend(gangs, 3, {"cpu": Room(spare=1, idle=0)})
        assert {seat.rank for seat in table.wanted} == {4, 5}, "who was asked is not replaced by another"
    table.sit("left", 4)
    tend(gangs, 4, {"cpu": Room(spare=1, idle=0)})
    assert {seat.rank for seat in table.wanted} == {4, 5}
    tend(gangs, 100, {"cpu": Room(spare=3, idle=2)})
    assert table.ranks() == [4, 5]
    assert not table.wanted


def test_the_seats_of_backups_need_not_be_held_and_do_not_stand_in_for_others(gangs: Gangs, table: Table) -> None:
    assemble(gangs, backups=1)
    assemble(gangs, number=1, backups=1)
    table.sit("held", 1, 2)
    table.sit("held", 1, 3, number=1)
    tend(gangs, 1)
    assert [gang.number for gang in gangs.overdue(60)] == [1]
