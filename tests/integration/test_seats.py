"""Redis decides who is a replica of what: one worker a seat, for as long as its trial's attempt runs."""

from __future__ import annotations

from typing import Any

import pytest
import redis
import services
from msgspec.structs import replace
from services.channels import Channel

from shadho_celery.core.trial import Called, GangCall, Outcome, ReplicaFailed, Result, Started, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.fleet.channel import Claim, Quarantine, SchedulerChannel
from shadho_celery.fleet.redis import own_address
from shadho_celery.fleet.seats import SchedulerSeats, Seat, WorkerSeats
from shadho_celery.fleet.signing import Signer

#: seconds of a lease that is meant to run out
SHORT = 0.03

SEAT = Seat(number=0, attempt=1, call=1, rank=1)
GANG = GangCall(address="10.0.0.1:5000", token="secret", backups=1)
CALL = Called(number=0, attempt=1, call=1, gang=GANG, at=2.5)


@pytest.fixture
def worker(client: Any) -> Channel:
    return Channel(client)


@pytest.fixture
def scheduler(client: Any) -> SchedulerChannel:
    return SchedulerChannel(client, "k1")


@pytest.fixture
def seats(client: Any, worker: Channel) -> WorkerSeats:
    """A worker's end, in a study whose trial 0 runs under its first attempt."""
    assert worker.claim("k1", started())
    return WorkerSeats(client, worker="w1")


@pytest.fixture
def books(client: Any) -> SchedulerSeats:
    return SchedulerSeats(client, "k1")


def started(attempt: int = 1) -> Started:
    return Started(number=0, attempt=attempt, host="h", at=1.5)


def result() -> Result:
    return Result(number=0, attempt=1, outcome=Outcome(state=TrialState.COMPLETE, loss=0.5), at=2.5)


def failure() -> ReplicaFailed:
    return ReplicaFailed(number=0, attempt=1, call=1, rank=1, error="no room", host="h", at=3.5, worker="w1")


# Calls


def test_a_call_for_replicas_reaches_the_scheduler_and_is_remembered(
    seats: WorkerSeats, scheduler: SchedulerChannel, books: SchedulerSeats
) -> None:
    """One that is started anew asks for what its former life was told."""
    assert seats.call("k1", CALL)
    assert scheduler.drain(0)[-1] == CALL
    assert books.calls([(5, 1), (0, 1), (0, 2)]) == [CALL]
    come = replace(CALL, gang=replace(GANG, assembled=True))
    assert seats.call("k1", come)
    assert scheduler.drain(0) == [come]
    assert books.calls([(0, 1)]) == [come]
    again = replace(CALL, call=2, gang=replace(GANG, token="another"))
    assert seats.call("k1", again)
    assert books.calls([(0, 1)]) == [again]
    books.forget([(0, 1)])
    assert books.calls([(0, 1)]) == books.calls([]) == []


def test_an_attempt_that_does_not_run_calls_nobody(seats: WorkerSeats, worker: Channel, books: SchedulerSeats) -> None:
    assert not seats.call("k1", replace(CALL, attempt=2))
    worker.finish("k1", result())
    assert not seats.call("k1", CALL)
    assert books.calls([(0, 1), (0, 2)]) == []


def test_a_call_signed_with_another_key_is_refused(client: Any, worker: Channel) -> None:
    """Replicas would compute for another study."""
    worker.claim("k1", started())
    WorkerSeats(client, worker="w1", signer=Signer(b"k" * 32)).call("k1", CALL)
    [call] = SchedulerSeats(client, "k1", Signer(b"k" * 32)).calls([(0, 1)])
    assert call == replace(CALL, gang=replace(GANG, token=call.gang.token))
    assert SchedulerSeats(client, "k1", Signer(b"x" * 32)).calls([(0, 1)]) == []


def test_with_a_key_the_token_of_a_call_is_encrypted_for_the_workers_of_its_seats_alone(
    client: Any, worker: Channel
) -> None:
    """Neither Redis nor the scheduler can read it, and it opens no seat of another call, attempt, trial or study."""
    worker.claim("k1", started())
    signer = Signer(b"k" * 32)
    seats = WorkerSeats(client, worker="w1", signer=signer)
    assert seats.call("k1", CALL)
    kept = [client.hgetall("shadho:k1:gangs"), client.xrange("shadho:k1:events")]
    [call] = SchedulerSeats(client, "k1", signer).calls([(0, 1)])
    assert GANG.token not in str([kept, call])
    assert seats.token("k1", SEAT, call.gang.token) == GANG.token
    assert seats.token("k1", replace(SEAT, rank=2), call.gang.token) == GANG.token
    others = [("k2", SEAT), *(("k1", replace(SEAT, **{name: 5})) for name in ("number", "attempt", "call"))]
    for study, seat in others:
        with pytest.raises(UsageError, match="was not encrypted with this worker's signing key"):
            seats.token(study, seat, call.gang.token)
    assert WorkerSeats(client, worker="w2").token("k1", SEAT, "clear") == "clear"


# Taking


def test_a_seat_has_one_holder(seats: WorkerSeats, books: SchedulerSeats, client: Any) -> None:
    """A worker that asks again, because the answer got lost, gets the same answer."""
    assert books.states([SEAT]) == ["never"]
    assert seats.take("k1", SEAT, "a") is Claim.TAKEN
    assert seats.take("k1", SEAT, "a") is Claim.TAKEN
    assert WorkerSeats(client, worker="w2").take("k1", SEAT, "b") is Claim.REFUSED
    assert seats.take("k1", replace(SEAT, rank=2), "c") is Claim.TAKEN
    assert books.states([SEAT, replace(SEAT, rank=2), replace(SEAT, rank=3)]) == ["taken", "taken", "never"]


@pytest.mark.parametrize("end", ["result", "lost", "given up", "cancelled", "never began"])
def test_a_seat_of_an_attempt_that_does_not_run_is_refused_and_its_replica_is_to_stop(
    client: Any, worker: Channel, scheduler: SchedulerChannel, end: str
) -> None:
    seats = WorkerSeats(client, worker="w1")
    if end == "lost":
        Channel(client, SHORT).claim("k1", started())
    elif end != "never began":
        worker.claim("k1", started())
    if end != "never began":
        assert seats.take("k1", SEAT, "a") is Claim.TAKEN
    if end == "result":
        assert worker.finish("k1", result())
    elif end == "lost":
        services.wait_until(lambda: scheduler.ended_leases() == [(0, 1)], seconds=5)
    elif end == "given up":
        scheduler.give_up([(0, 1)], "its gang was not complete")
    elif end == "cancelled":
        scheduler.cancel([(0, 1)], running=True)
    else:
        scheduler.cancel([(0, 1)], running=False)
    assert seats.take("k1", replace(SEAT, rank=2), "b") is Claim.REFUSED
    assert seats.renew("k1", [(SEAT, "a")]) == ["gone"]


def test_another_attempt_of_the_trial_has_seats_of_its_own(
    seats: WorkerSeats, worker: Channel, scheduler: SchedulerChannel
) -> None:
    seats.take("k1", SEAT, "a")
    scheduler.give_up([(0, 1)], "its gang was not complete")
    worker.claim("k1", started(2))
    assert seats.renew("k1", [(SEAT, "a")]) == ["gone"]
    assert seats.take("k1", replace(SEAT, attempt=2), "b") is Claim.TAKEN
    assert seats.renew("k1", [(replace(SEAT, attempt=2), "b")]) == ["ok"]


def test_seats_of_an_earlier_call_are_over_with_the_next_one(seats: WorkerSeats) -> None:
    seats.call("k1", CALL)
    assert seats.take("k1", SEAT, "a") is Claim.TAKEN
    seats.call("k1", replace(CALL, call=2))
    assert seats.take("k1", replace(SEAT, rank=2), "b") is Claim.REFUSED
    assert seats.take("k1", replace(SEAT, call=2), "c") is Claim.TAKEN


def test_a_worker_that_gets_no_trials_gets_no_seats(client: Any, seats: WorkerSeats) -> None:
    quarantine = Quarantine(client, "k1")
    quarantine.half_open("w1")
    assert seats.take("k1", SEAT, "a") is Claim.TAKEN
    quarantine.quarantine("w1")
    assert seats.take("k1", replace(SEAT, rank=2), "b") is Claim.BREAKER_OPEN


# Holding


def test_a_seat_that_is_not_renewed_is_lost_and_somebody_else_may_take_it(
    client: Any, seats: WorkerSeats, books: SchedulerSeats
) -> None:
    assert WorkerSeats(client, SHORT, "w2").take("k1", SEAT, "a") is Claim.TAKEN
    services.wait_until(lambda: books.states([SEAT]) == ["lost"], seconds=5)
    assert seats.take("k1", SEAT, "b") is Claim.TAKEN
    assert seats.renew("k1", [(SEAT, "a"), (SEAT, "b")]) == ["gone", "ok"]


def test_a_seat_that_is_renewed_late_is_held_on_where_nobody_has_taken_it(
    client: Any, seats: WorkerSeats, books: SchedulerSeats
) -> None:
    """Even where the scheduler has cleared it, to publish it again."""
    WorkerSeats(client, SHORT, "w2").take("k1", SEAT, "a")
    services.wait_until(lambda: books.states([SEAT]) == ["lost"], seconds=5)
    books.clear([SEAT])
    assert seats.renew("k1", [(SEAT, "a")]) == ["ok"]
    assert books.states([SEAT]) == ["taken"]


def test_after_redis_has_lost_its_memory_replicas_go_on(
    client: Any, seats: WorkerSeats, worker: Channel, books: SchedulerSeats
) -> None:
    """Their seats are recorded again, before their trial's worker has recorded it or after; no new replica gets in."""
    seats.take("k1", SEAT, "a")
    client.flushdb()
    assert seats.renew("k1", [(SEAT, "a")]) == ["ok"]
    assert seats.take("k1", replace(SEAT, rank=2), "b") is Claim.REFUSED
    assert worker.renew("k1", [(0, 1)]) == ["ok"]
    assert seats.renew("k1", [(SEAT, "a")]) == ["ok"]
    assert books.states([SEAT]) == ["taken"]


def test_a_backup_whose_slot_is_wanted_is_told_so_and_one_on_its_way_does_not_come(
    seats: WorkerSeats, books: SchedulerSeats
) -> None:
    backup, coming = replace(SEAT, rank=3), replace(SEAT, rank=4)
    seats.take("k1", SEAT, "a")
    seats.take("k1", backup, "b")
    books.ask_back([backup, coming])
    books.ask_back([])
    assert seats.renew("k1", [(SEAT, "a"), (backup, "b")]) == ["ok", "yield"]
    assert seats.take("k1", coming, "c") is Claim.REFUSED
    seats.leave("k1", backup, "b")
    assert books.states([backup, coming]) == ["left", "never"]
    books.clear([backup, coming])
    assert seats.take("k1", backup, "d") is Claim.TAKEN
    assert seats.renew("k1", [(backup, "d")]) == ["ok"]


# Leaving


def test_a_seat_that_was_left_is_free_and_one_whose_work_is_done_is_not(
    seats: WorkerSeats, books: SchedulerSeats
) -> None:
    other = replace(SEAT, rank=2)
    seats.take("k1", SEAT, "a")
    seats.take("k1", other, "b")
    seats.leave("k1", SEAT, "a")
    seats.leave("k1", other, "b", done=True)
    assert books.states([SEAT, other]) == ["left", "done"]
    assert seats.take("k1", SEAT, "c") is Claim.TAKEN
    assert seats.take("k1", other, "d") is Claim.REFUSED


def test_the_failure_of_a_replica_is_told_unless_its_seat_is_somebody_elses_by_then(
    seats: WorkerSeats, scheduler: SchedulerChannel, books: SchedulerSeats
) -> None:
    seats.take("k1", SEAT, "a")
    scheduler.drain(0)
    assert not seats.leave("k1", SEAT, "not its holder", failure=failure())
    assert scheduler.drain(0) == []
    assert books.states([SEAT]) == ["taken"]
    assert seats.leave("k1", SEAT, "a", failure=failure())
    assert scheduler.drain(0) == [failure()]
    assert books.states([SEAT]) == ["left"]


def test_who_fails_because_the_trial_has_ended_has_not_failed(
    seats: WorkerSeats, worker: Channel, scheduler: SchedulerChannel
) -> None:
    """Its coordinator's end of the line closes, and then it may see that before anything else."""
    seats.take("k1", SEAT, "a")
    worker.finish("k1", result())
    scheduler.drain(0)
    assert not seats.leave("k1", SEAT, "a", failure=failure())
    assert scheduler.drain(0) == []


def test_nothing_of_gangs_is_left_when_their_study_has_ended(
    client: Any, seats: WorkerSeats, worker: Channel, scheduler: SchedulerChannel, books: SchedulerSeats
) -> None:
    seats.call("k1", CALL)
    seats.take("k1", SEAT, "a")
    books.ask_back([SEAT])
    worker.finish("k1", result())
    scheduler.erase()
    seats.leave("k1", SEAT, "a", done=True)
    assert seats.renew("k1", [(SEAT, "a")]) == ["gone"]
    assert client.keys("shadho:k1:*") == ["shadho:k1:attempts"]


# Addresses


def test_a_machines_own_address_is_the_one_it_has_on_the_way_to_redis(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHADHO_HOST", raising=False)
    with redis.Redis.from_url("redis://") as unspecified, redis.Redis.from_url("unix:///nowhere.sock") as local:
        assert own_address(unspecified) in ("127.0.0.1", "::1")
        assert own_address(local) == "127.0.0.1"
    assert own_address(client) in ("127.0.0.1", "::1")
    monkeypatch.setenv("SHADHO_HOST", "node7.cluster")
    assert own_address(client) == "node7.cluster"
