"""Redis decides who runs what: one claim an attempt, one result a trial, nothing forgotten before it is recorded."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import services
from services import MARK as LENT
from services.cases import cases
from services.channels import Channel

from shadho_celery.core.failures import read_failure
from shadho_celery.core.hardware import Gpu, Machine
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import (
    Called,
    Event,
    GangCall,
    GangEvent,
    Lost,
    Outcome,
    Report,
    Result,
    Started,
    TrialState,
)
from shadho_celery.errors import LockLost, ServiceError, StudyLocked
from shadho_celery.fleet import channel as channel_module
from shadho_celery.fleet import registry as registry_module
from shadho_celery.fleet.channel import (
    ERASED_SECONDS,
    HOLD_SECONDS,
    MAX_STRIKES,
    Breaker,
    Claim,
    Quarantine,
    SchedulerChannel,
)
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import MAX_ANNOUNCEMENT, Host, Registry, StudyWants, Worker
from shadho_celery.fleet.seats import SchedulerSeats, Seat, WorkerSeats
from shadho_celery.fleet.signing import READ_SECONDS, UNSIGNED, Signer
from shadho_celery.store.base import holder_name
from shadho_celery.store.sql import LOCK_SECONDS

S = TrialState

#: the keys of a rotation
OLD, NEW = b"a key of sixteen bytes", b"another key of sixteen bytes"

#: seconds of a lease that is meant to run out
SHORT = 0.03


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def worker(client: Any) -> Channel:
    return Channel(client)


@pytest.fixture
def scheduler(client: Any) -> SchedulerChannel:
    return SchedulerChannel(client, "k1")


@pytest.fixture
def quarantine(client: Any) -> Quarantine:
    return Quarantine(client, "k1")


def started(number: int = 0, attempt: int = 1) -> Started:
    return Started(number=number, attempt=attempt, host="h", at=1.5)


def result(number: int = 0, attempt: int = 1, loss: float = 0.5) -> Result:
    return Result(number=number, attempt=attempt, outcome=Outcome(state=S.COMPLETE, loss=loss), at=2.5)


def report(step: int = 1, *, number: int = 0) -> Report:
    return Report(number=number, attempt=1, step=step, loss=0.25, at=2.0)


def taken_back(number: int, attempt: int) -> Lost:
    return Lost(number=number, attempt=attempt, reason="taken back", claimed=False)


def ended(scheduler: SchedulerChannel) -> list[tuple[int, int]]:
    """The ended leases, once there are any."""
    services.wait_until(lambda: bool(scheduler.ended_leases()), seconds=5)
    return scheduler.ended_leases()


# Claim


def test_of_many_workers_that_claim_at_once_one_gets_the_attempt(redis_url: str, scheduler: SchedulerChannel) -> None:
    ready = threading.Barrier(8)
    claimed: list[bool] = []

    def claim() -> None:
        with connect(redis_url) as client:
            channel = Channel(client)
            ready.wait()
            claimed.append(channel.claim("k1", started()))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == [False] * 7 + [True]
    assert len(scheduler.drain(0)) == 1


def test_an_older_or_equal_attempt_is_refused_and_a_newer_one_is_not(worker: Channel) -> None:
    assert all(worker.claim(study, started(number)) for study in ("k1", "k2") for number in (1, 10, 11))
    assert worker.claim("k1", started(attempt=2))
    assert not worker.claim("k1", started(attempt=1))
    assert not worker.claim("k1", started(attempt=2))
    assert worker.claim("k1", started(attempt=3))
    # By number, not by letters.
    assert worker.claim("k1", started(attempt=10))
    assert not worker.claim("k1", started(attempt=9))


# Finish


def test_a_result_is_taken_only_from_a_live_lease(worker: Channel, scheduler: SchedulerChannel) -> None:
    worker.claim("k1", started())
    assert not worker.finish("k1", result(attempt=2))
    assert worker.finish("k1", result())
    assert not worker.finish("k1", result())
    assert scheduler.drain(0) == [started(), result()]


# Leases


def test_a_lease_that_ran_out_is_told_until_it_is_forgotten_and_its_result_is_refused(
    client: Any, scheduler: SchedulerChannel
) -> None:
    dying = Channel(client, lease_seconds=SHORT)
    dying.claim("k1", started(number=12, attempt=3))
    assert ended(scheduler) == scheduler.ended_leases() == [(12, 3)]
    assert not dying.finish("k1", result(number=12, attempt=3))
    assert dying.renew("k1", [(12, 3)]) == ["gone"]
    assert scheduler.states([(12, 3), (12, 2), (12, 4), (13, 1)]) == ["leased", "leased", "free", "free"]
    assert SchedulerChannel(client, "k1").ended_leases() == [(12, 3)], "a new scheduler is told too"
    scheduler.forget([(12, 3)])
    assert scheduler.ended_leases() == []
    assert not dying.finish("k1", result(number=12, attempt=3))
    assert scheduler.drain(0) == [started(number=12, attempt=3)]


def test_a_lease_that_is_renewed_does_not_run_out(client: Any, scheduler: SchedulerChannel) -> None:
    short = Channel(client, lease_seconds=SHORT)
    short.claim("k1", started(0))
    short.claim("k1", started(1))
    Channel(client).renew("k1", [(1, 1)])
    assert ended(scheduler) == [(0, 1)]
    assert short.finish("k1", result(1))


def test_what_was_given_up_is_lost_at_once_unless_it_has_ended(worker: Channel, scheduler: SchedulerChannel) -> None:
    for number in range(3):
        worker.claim("k1", started(number))
    worker.claim("k2", started())
    worker.finish("k1", result(2))
    scheduler.drain(0)
    scheduler.give_up([(0, 1), (1, 1), (2, 1), (3, 1)], "gone")
    lost = [Lost(number=number, attempt=1, reason="gone", claimed=False) for number in (0, 1, 3)]
    assert scheduler.drain(0) == lost
    assert worker.renew("k1", [(0, 1)]) == ["gone"]
    assert worker.renew("k2", [(0, 1)]) == ["ok"]
    assert not worker.finish("k1", result(0))
    assert not worker.claim("k1", started(3))
    assert worker.claim("k1", started(3, attempt=2))


def test_a_claim_and_a_result_may_be_said_again_when_the_answer_was_lost(
    worker: Channel, scheduler: SchedulerChannel
) -> None:
    for _ in range(2):
        assert worker.finish_and_claim("k1", None, started(0), delivery="d1") == (False, Claim.TAKEN)
    assert worker.finish_and_claim("k1", None, started(0), delivery="d2") == (False, Claim.REFUSED)
    for _ in range(2):
        assert worker.finish_and_claim("k1", result(0), None, delivery="d1") == (True, Claim.REFUSED)
    assert worker.finish_and_claim("k1", result(0), None, delivery="d2") == (False, Claim.REFUSED)
    assert scheduler.drain(0) == [started(0), result(0)]


def test_a_message_with_a_great_number_of_attempts_does_not_freeze_redis(private_redis: services.RedisServer) -> None:
    """A worker refuses such a message, but any client of Redis can run the script."""
    with connect(private_redis.url) as client:
        worker = Channel(client)
        assert worker.claim("k1", started(attempt=2**53 - 1))
        assert worker.finish("k1", failed(0, attempt=2**53 - 1))
        assert client.ping()


def test_refused_results_are_counted(worker: Channel, scheduler: SchedulerChannel) -> None:
    assert scheduler.refused() == 0
    worker.claim("k1", started(0))
    scheduler.give_up([(0, 1)], "gone")
    for _ in range(2):
        assert not worker.finish("k1", result(0))
    assert scheduler.refused() == 2


def test_what_runs_is_known_again_to_a_redis_that_has_lost_its_memory(
    client: Any, worker: Channel, scheduler: SchedulerChannel
) -> None:
    worker.claim("k1", started(0))
    client.delete(*client.keys("shadho:k1:*"))
    assert worker.renew("k1", [(0, 1)]) == ["ok"]
    assert not worker.claim("k1", started(0)), "its message may be delivered again"
    assert worker.finish("k1", result(0))
    worker.claim("k1", started(1))
    client.delete(*client.keys("shadho:k1:*"))
    assert worker.finish("k1", result(1)), "it had no time to renew"


def test_leases_that_nobody_could_renew_can_be_extended_and_ended_ones_cannot(
    client: Any, scheduler: SchedulerChannel
) -> None:
    short = Channel(client, lease_seconds=SHORT)
    short.claim("k1", started(0))
    time.sleep(2 * SHORT)
    assert ended(scheduler) == [(0, 1)]
    short.claim("k1", started(1))
    scheduler.extend_leases()
    time.sleep(2 * SHORT)
    assert ended(scheduler) == [(0, 1)]


def test_another_attempt_may_follow_one_that_has_ended_where_it_is_reopened(
    worker: Channel, scheduler: SchedulerChannel
) -> None:
    worker.claim("k1", started(0))
    scheduler.reopen([(0, 1)])
    assert not worker.claim("k1", started(0)), "it runs"
    worker.finish("k1", result(0))
    scheduler.reopen([(0, 0), (1, 1)])
    assert not worker.claim("k1", started(0, attempt=2)), "a later attempt than those named has ended it"
    scheduler.reopen([(0, 1)])
    assert not worker.claim("k1", started(0)), "the attempt itself"
    assert worker.claim("k1", started(0, attempt=2))


def test_where_an_earlier_attempt_has_ended_the_trial_those_after_the_named_one_may_follow(
    worker: Channel, scheduler: SchedulerChannel
) -> None:
    worker.claim("k1", started(0))
    worker.finish("k1", result(0))
    scheduler.reopen([(0, 2)])
    assert not worker.claim("k1", started(0, attempt=2))
    assert worker.claim("k1", started(0, attempt=3))


def missed(number: int, attempt: int) -> Lost:
    return Lost(
        number=number,
        attempt=attempt,
        reason="Redis has no record that it runs, and no result arrived",
        claimed=False,
    )


def test_an_attempt_that_redis_has_as_ended_and_its_scheduler_as_unfinished_may_be_followed_by_another(
    worker: Channel, scheduler: SchedulerChannel
) -> None:
    """As where the store was restored from a copy: the result was confirmed, and is in no stream any more."""
    for attempt in (1, 2, 3):
        worker.claim("k1", started(attempt=attempt))
    worker.finish("k1", result(attempt=3))
    scheduler.drain(0)
    assert scheduler.states([(0, 1)]) == ["void"]
    scheduler.take_back_missing([(0, 1)])
    assert scheduler.drain(0) == [missed(0, 1)]
    assert not worker.claim("k1", started(attempt=1))
    assert worker.claim("k1", started(attempt=2))
    assert worker.finish("k1", result(attempt=2))


def test_where_a_later_attempt_runs_than_its_scheduler_knows_the_earlier_one_is_not_missing(
    worker: Channel, scheduler: SchedulerChannel
) -> None:
    worker.claim("k1", started(attempt=3))
    scheduler.drain(0)
    assert scheduler.states([(0, 1), (0, 2), (0, 3)]) == ["leased"] * 3
    scheduler.take_back_missing([(0, 1), (0, 3)])
    assert scheduler.drain(0) == []
    scheduler.give_up([(0, 3)], "gone")
    assert scheduler.states([(0, 1), (0, 3), (0, 4)]) == ["void", "void", "free"]
    scheduler.take_back_missing([(0, 1)])
    assert scheduler.drain(0)[1:] == [missed(0, 1)]
    assert worker.claim("k1", started(attempt=2))


def test_an_attempt_that_may_be_claimed_after_all_is_not_taken_back_as_missing(
    worker: Channel, scheduler: SchedulerChannel
) -> None:
    """A copy, whose trial another attempt seemed to have ended when it failed, until the scheduler said otherwise."""
    worker.claim("k1", started())
    worker.finish("k1", failed(0))
    assert scheduler.states([(0, 2)]) == ["void"]
    scheduler.reopen([(0, 1)])
    scheduler.drain(0)
    scheduler.take_back_missing([(0, 2), (1, 1)])
    assert scheduler.drain(0) == []
    assert worker.claim("k1", started(attempt=2))


# Strikes


def failed(number: int, error: str = "disk full", attempt: int = 1) -> Result:
    return Result(number=number, attempt=attempt, outcome=Outcome(state=S.FAILED, error=error), at=2.5)


def fail(channel: Channel, number: int, error: str = "disk full") -> Claim:
    claim = channel.finish_and_claim("k1", None, started(number), watched=True)[1]
    if claim is Claim.TAKEN:
        channel.finish_and_claim("k1", failed(number, error), None, watched=True)
    return claim


def test_a_worker_that_fails_trials_in_a_row_gets_no_more_until_its_circuit_breaker_is_closed(
    client: Any, quarantine: Quarantine
) -> None:
    bad, good = (Channel(client, worker=name) for name in ("bad", "good"))
    claims = [fail(bad, number) for number in range(MAX_STRIKES + 1)]
    assert claims == [Claim.TAKEN] * MAX_STRIKES + [Claim.BREAKER_OPEN]
    assert (quarantine.state("bad"), quarantine.state("good")) == (Breaker.OPEN, Breaker.CLOSED)
    assert good.claim("k1", started(MAX_STRIKES)), "the attempt is not spent"
    quarantine.half_open("bad")
    assert [fail(bad, number) for number in (11, 12)] == [Claim.TAKEN, Claim.BREAKER_OPEN]
    quarantine.half_open("bad")
    assert [bad.claim("k1", started(number)) for number in (21, 22)] == [True, False], "one slot has it"
    bad.finish("k1", result(21))
    assert [bad.claim("k1", started(number)) for number in (23, 24)] == [True, True]
    quarantine.close("bad")
    assert quarantine.state("bad") is Breaker.CLOSED
    assert fail(bad, 13) is Claim.TAKEN
    assert Quarantine(client, "k2").state("bad") is Breaker.CLOSED


def test_a_success_closes_a_workers_circuit_breaker_and_known_failures_do_not_count(
    client: Any, quarantine: Quarantine
) -> None:
    worker = Channel(client, worker="w")
    for number in range(MAX_STRIKES - 1):
        fail(worker, number)
    worker.claim("k1", started(2))
    worker.finish("k1", result(2))
    assert fail(worker, 3) is Claim.TAKEN
    quarantine.close("w", read_failure("disk full").cause)
    assert {fail(worker, number) for number in range(5, 15)} == {Claim.TAKEN}
    unwatched = Channel(client, worker="u")
    for number in range(20, 30):
        unwatched.claim("k1", started(number))
        assert unwatched.finish("k1", failed(number, "another"))


def test_a_quarantined_worker_stays_quarantined(
    client: Any, scheduler: SchedulerChannel, quarantine: Quarantine
) -> None:
    worker = Channel(client, worker="w")
    worker.claim("k1", started(0))
    quarantine.quarantine("w")
    assert worker.finish("k1", result(0)), "what it runs it may finish"
    assert quarantine.state("w") is Breaker.QUARANTINED
    assert worker.finish_and_claim("k1", None, started(1))[1] is Claim.BREAKER_OPEN
    scheduler.erase()
    quarantine.reset()
    assert quarantine.state("w") is Breaker.QUARANTINED


def test_a_quarantine_under_other_code_is_over(quarantine: Quarantine) -> None:
    quarantine.reset("0" * 12)
    quarantine.quarantine("w")
    quarantine.close("v", "a kind that trials cause")
    quarantine.reset("0" * 12)
    assert quarantine.state("w") is Breaker.QUARANTINED
    quarantine.reset("1" * 12)
    assert quarantine.state("w") is Breaker.CLOSED
    quarantine.quarantine("w")
    quarantine.reset("1" * 12)
    assert quarantine.state("w") is Breaker.QUARANTINED


def test_nothing_to_ask_after_is_no_question(worker: Channel, scheduler: SchedulerChannel) -> None:
    assert worker.renew("k1", []) == []
    assert scheduler.states([]) == []
    assert scheduler.ended_leases() == []
    scheduler.forget([])
    scheduler.cancel([], running=True)
    scheduler.confirm()
    assert scheduler.drain(0) == []


# Cancel


def test_cancel_takes_back_what_is_unclaimed_so_that_nobody_can_claim_it(
    worker: Channel, scheduler: SchedulerChannel
) -> None:
    scheduler.cancel([(0, 1), (1, 2)], running=False)
    assert scheduler.drain(0) == [taken_back(0, 1), taken_back(1, 2)]
    assert not worker.claim("k1", started(0, 1))
    assert not worker.claim("k1", started(1, 1))
    assert not worker.claim("k1", started(1, 2))
    assert worker.claim("k1", started(0, 2))


def test_a_worker_may_decline_what_nobody_has_claimed_while_another_attempt_runs(
    client: Any, scheduler: SchedulerChannel
) -> None:
    """It may not where the trial has ended, or where this attempt runs."""
    one, other = Channel(client, worker="one"), Channel(client, worker="other")
    assert other.claim("k1", started())
    for _ in range(2):
        one.decline("k1", 0, 2, "it takes too long here", is_too_long=True)
    lost = Lost(number=0, attempt=2, reason="it takes too long here", claimed=False, is_too_long=True)
    assert scheduler.drain(0) == [started(), lost]
    assert not one.claim("k1", started(attempt=2))
    assert other.renew("k1", [(0, 1)]) == ["ok"]
    assert other.claim("k1", started(attempt=3))
    one.decline("k1", 0, 3, "for another machine")
    assert other.finish("k1", result())
    one.decline("k1", 0, 4, "for another machine")
    assert scheduler.drain(0) == [started(attempt=3), result()]


def test_taking_back_twice_is_told_once(scheduler: SchedulerChannel) -> None:
    for _ in range(2):
        scheduler.cancel([(0, 1)], running=True)
    assert scheduler.drain(0) == [taken_back(0, 1)]


@pytest.mark.parametrize(
    ("how", "answer"), [((False, False), "ok"), ((True, False), "cancel"), ((True, True), "prune")]
)
def test_what_runs_is_asked_to_stop_only_where_that_is_wanted_and_knows_whether_it_is_pruned(
    worker: Channel, scheduler: SchedulerChannel, how: tuple[bool, bool], answer: str
) -> None:
    running, pruned = how
    for number in range(2):
        worker.claim("k1", started(number))
    scheduler.drain(0)
    scheduler.cancel([(0, 1)], running=running, pruned=pruned)
    assert scheduler.drain(0) == []
    assert worker.renew("k1", [(0, 1), (1, 1)]) == [answer, "ok"]
    assert worker.renew("k1", [(0, 1)]) == [answer], "the lease itself is kept"
    assert worker.told("k1", [0, 1]) == [answer, "ok"]
    assert [worker.report("k1", report(number=number)) for number in range(2)] == [answer, "ok"]
    assert worker.finish("k1", result())


def test_what_has_ended_is_not_taken_back(worker: Channel, scheduler: SchedulerChannel) -> None:
    worker.claim("k1", started())
    worker.finish("k1", result())
    scheduler.drain(0)
    scheduler.cancel([(0, 1)], running=True)
    assert scheduler.drain(0) == []


def test_a_wish_to_stop_does_not_reach_the_next_attempt(
    client: Any, worker: Channel, scheduler: SchedulerChannel
) -> None:
    Channel(client, lease_seconds=SHORT).claim("k1", started(attempt=1))
    scheduler.cancel([(0, 1)], running=True, pruned=True)
    scheduler.forget(ended(scheduler))
    assert worker.claim("k1", started(attempt=2))
    assert worker.renew("k1", [(0, 2)]) == ["ok"]
    scheduler.cancel([(0, 2)], running=True)
    assert worker.renew("k1", [(0, 2)]) == ["cancel"], "nor that it was pruned"


# The lock


def holder_elsewhere(client: Any) -> str:
    """Have the scheduler of another machine hold the study; return its name."""
    client.set("shadho:k1:holder", "elsewhere 1 1:1:", px=60_000)
    return "elsewhere 1 1:1:"


def test_a_second_scheduler_of_a_study_is_refused_in_one_line_while_the_first_lives(
    client: Any, scheduler: SchedulerChannel
) -> None:
    """Each has a copy of the store, where it holds the lock with a fencing number of its own."""
    scheduler.lock()
    scheduler.lock()
    second = SchedulerChannel(client, "k1", fence=1)
    with pytest.raises(StudyLocked, match=rf"on {socket.gethostname()} \(process {os.getpid()}\), .*stop it first"):
        second.lock()
    second.unlock()
    scheduler.confirm()
    SchedulerChannel(client, "k2", fence=1).lock()
    scheduler.unlock()
    second.lock()


def test_a_schedulers_lock_passes_on_when_it_has_died_and_from_another_machine_when_it_expires(
    client: Any, scheduler: SchedulerChannel
) -> None:
    host, pid, _, namespace = holder_name().split(" ")
    client.set("shadho:k1:holder", f"{host} {pid} 1 {namespace}:7:", px=60_000)
    scheduler.lock()
    assert 0 < client.pttl("shadho:k1:holder") <= 1000 * HOLD_SECONDS <= 1000 * LOCK_SECONDS
    held = holder_elsewhere(client)
    with pytest.raises(StudyLocked, match="elsewhere"):
        scheduler.lock()
    assert client.get("shadho:k1:holder") == held
    client.delete("shadho:k1:holder")
    scheduler.lock()


def test_no_trial_of_a_removed_study_goes_on_and_one_that_is_run_from_another_store_is_left_alone(
    client: Any, worker: Channel, scheduler: SchedulerChannel
) -> None:
    worker.claim("k1", started(3))
    holder_elsewhere(client)
    assert scheduler.remove(11) == "elsewhere (process 1)"
    assert worker.renew("k1", [(3, 1)]) == ["ok"]
    client.delete("shadho:k1:holder")
    assert scheduler.remove(11) == ""
    assert worker.renew("k1", [(3, 1)]) == ["gone"]
    attempts = [(number, attempt) for number in range(13) for attempt in (1, 2)]
    assert worker.are_refused("k1", attempts) == [each for each in attempts if each[0] < 11]
    assert not worker.claim("k1", started(10))
    assert client.keys("shadho:k1:*") == ["shadho:k1:done"]
    assert client.ttl("shadho:k1:done") > 0


def test_a_scheduler_that_lost_its_lock_stops_and_removes_nothing(
    client: Any, worker: Channel, scheduler: SchedulerChannel
) -> None:
    scheduler.lock()
    worker.claim("k1", started())
    assert scheduler.drain(0) == [started()]
    held = holder_elsewhere(client)
    with pytest.raises(LockLost):
        scheduler.confirm()
    assert client.xlen("shadho:k1:events") == 1
    scheduler.unlock()
    assert client.get("shadho:k1:holder") == held


@pytest.mark.parametrize("forged", ["x", "elsewhere 1 1:1", "elsewhere 1 1:1:", f"elsewhere 1 1:1:{64 * 'a'}"])
def test_a_lock_that_is_not_signed_with_the_fleets_key_counts_for_nothing(client: Any, forged: str) -> None:
    scheduler = SchedulerChannel(client, "k1", Signer(b"k" * 32))
    client.set("shadho:k1:holder", forged)
    scheduler.lock()
    client.set("shadho:k1:holder", forged)
    scheduler.confirm()
    other = SchedulerChannel(client, "k1", Signer(b"k" * 32), fence=1)
    with pytest.raises(StudyLocked):
        other.lock()
    assert scheduler.forged == 2


def test_a_scheduler_keeps_its_lock_through_a_rotation_of_the_keys(client: Any, tmp_path: Path) -> None:
    """Schedulers of either step see that it is held, and after the last one its value is signed with the new key."""
    key, clock = tmp_path / "shadho.key", ManualClock()
    for step, keys in enumerate([(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]):
        key.write_bytes(b"\n".join(keys))
        key.chmod(0o600)
        if not step:
            scheduler = SchedulerChannel(client, "k1", Signer.of_file(key, clock))
            scheduler.lock()
        with pytest.raises(StudyLocked):
            SchedulerChannel(client, "k1", Signer(*keys), fence=1).lock()
        clock.sleep(READ_SECONDS)
        scheduler.confirm()
        assert scheduler.forged == 0
    held, _, signature = client.get("shadho:k1:holder").rpartition(":")
    assert Signer(NEW).is_signed(f"k1{held}", signature)
    scheduler.unlock()
    assert not client.exists("shadho:k1:holder")


def test_a_redis_that_is_full_is_emptied_although_it_takes_no_lock(private_redis: services.RedisServer) -> None:
    with connect(private_redis.url) as client:
        scheduler = SchedulerChannel(client, "k1")
        Channel(client).claim("k1", started())
        assert scheduler.drain(0) == [started()]
        client.config_set("maxmemory", "1")
        scheduler.confirm()
        assert client.xlen("shadho:k1:events") == 0


# Events


def test_events_come_in_order_and_once(worker: Channel, scheduler: SchedulerChannel) -> None:
    worker.claim("k1", started())
    worker.report("k1", report(1))
    assert scheduler.drain(0) == [started(), report(1)]
    assert scheduler.drain(0) == []
    outcome = Outcome(state=S.FAILED, error="Traceback 文字 \x00 \ud800", metrics={"ü": 'quoted "\n'})
    odd = Result(number=0, attempt=1, outcome=outcome, host="knoten-ü", at=2.5)
    worker.report("k1", report(2))
    worker.finish("k1", odd)
    assert scheduler.drain(0) == [report(2), odd]


def test_what_was_not_confirmed_is_seen_again_by_the_next_scheduler_and_what_was_is_not(
    client: Any, worker: Channel
) -> None:
    first = SchedulerChannel(client, "k1")
    worker.claim("k1", started())
    for step in range(2):
        worker.report("k1", report(step))
    assert len(first.drain(0)) == 3
    assert len(SchedulerChannel(client, "k1").drain(0)) == 3
    worker.report("k1", report(3))
    first.confirm()
    second = SchedulerChannel(client, "k1")
    assert second.drain(0) == [report(3)]
    second.confirm()
    second.confirm()
    assert SchedulerChannel(client, "k1").drain(0) == []


def test_more_events_than_one_read_takes_come_in_several(
    client: Any, worker: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "READ", 4)
    scheduler = SchedulerChannel(client, "k1")
    worker.claim("k1", started())
    for step in range(10):
        worker.report("k1", report(step))
    seen: list[Event | GangEvent] = []
    while events := scheduler.drain(0):
        assert len(events) <= 4
        seen += events
        scheduler.confirm()
    assert seen == [started(), *(report(step) for step in range(10))]


def test_events_whose_ids_went_back_are_read(client: Any, scheduler: SchedulerChannel) -> None:
    """As after a failover to a server without the last entries, whose clock is behind; and later passes the old one."""
    client.xadd("shadho:k1:events", {"e": sealed(report(1))}, id="2000-5")
    assert scheduler.drain(0) == [report(1)]
    client.delete("shadho:k1:events")
    for moment, step in (("1000-0", 2), ("1500-0", 3), ("3000-0", 4)):
        client.xadd("shadho:k1:events", {"e": sealed(report(step))}, id=moment)
    scheduler.confirm()
    assert scheduler.drain(0) == [report(2), report(3), report(4)]
    client.xadd("shadho:k1:events", {"e": sealed(report(5))})
    scheduler.confirm()
    assert scheduler.drain(0) == [report(5)]
    scheduler.confirm()
    assert scheduler.drain(0) == []
    assert client.xlen("shadho:k1:events") == 0


def test_a_drain_that_waits_ends_with_the_first_event(redis_url: str, scheduler: SchedulerChannel) -> None:
    """It would wait a minute; the test's own limit is below that."""

    def later() -> None:
        with connect(redis_url) as client:
            Channel(client).claim("k1", started())

    timer = threading.Timer(0.05, later)
    timer.start()
    assert scheduler.drain(25_000) == [started()]
    timer.join()


def test_two_studies_do_not_see_each_others_events(client: Any, worker: Channel) -> None:
    one, two = SchedulerChannel(client, "k1"), SchedulerChannel(client, "k2")
    worker.claim("k1", started(0))
    worker.claim("k2", started(1))
    two.cancel([(1, 1)], running=True)
    assert one.drain(0) == [started(0)]
    assert two.drain(0) == [started(1)]
    assert worker.renew("k1", [(0, 1)]) == ["ok"]


def sealed(event: Event) -> str:
    return UNSIGNED.seal("k1", event)


# The end


def keys_of(client: Any) -> set[str]:
    return set(client.keys("*")) - {LENT}


def lived(worker: Channel, scheduler: SchedulerChannel) -> None:
    """Use every kind of key."""
    for number in range(3):
        worker.claim("k1", started(number))
    worker.finish("k1", result(0))
    scheduler.cancel([(1, 1), (5, 1)], running=True)
    scheduler.drain(0)


def test_an_erased_study_leaves_only_the_memory_of_its_attempts_which_refuses_its_messages_and_ends(
    client: Any, worker: Channel, scheduler: SchedulerChannel
) -> None:
    """A message may lie in a queue long after its study's end."""
    lived(worker, scheduler)
    worker.claim("k2", started())
    others = {key for key in keys_of(client) if ":k2:" in key}
    scheduler.erase()
    assert keys_of(client) - others == {"shadho:k1:attempts"}
    assert 0 < client.ttl("shadho:k1:attempts") <= ERASED_SECONDS
    assert client.ttl("shadho:k2:attempts") > 0
    for number, attempt in [(0, 1), (0, 2), (1, 1), (5, 1)]:
        assert not worker.claim("k1", started(number, attempt))
    assert not worker.finish("k1", result(1))
    assert "shadho:k1:events" not in keys_of(client)


def test_a_resumed_studys_attempts_do_not_end_meanwhile(
    client: Any, worker: Channel, scheduler: SchedulerChannel
) -> None:
    lived(worker, scheduler)
    scheduler.erase()
    client.expire("shadho:k1:attempts", 60)
    SchedulerChannel(client, "k1").ended_leases()
    assert client.ttl("shadho:k1:attempts") > ERASED_SECONDS - 60
    assert worker.claim("k1", started(5, 2))


def mortal(client: Any) -> bool:
    """Return True if each key of the study but the lock has a time to live of about a week."""
    kept = set(client.keys("shadho:k1:*")) - {"shadho:k1:holder"}
    return all(client.ttl(key) > ERASED_SECONDS - 60 for key in kept)


def test_every_key_of_a_study_ends_a_week_after_its_scheduler_and_workers(
    client: Any,
    worker: Channel,
    scheduler: SchedulerChannel,
    quarantine: Quarantine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Either of them renews all keys, those of gangs and circuit breakers, too."""
    lived(worker, scheduler)
    quarantine.quarantine("w")
    quarantine.close("other", "disk full")
    seats = WorkerSeats(client, worker="other")
    gang = GangCall(address="h:1", token="t")
    assert seats.call("k1", Called(number=1, attempt=1, call=1, gang=gang, at=1.0))
    assert seats.take("k1", Seat(number=2, attempt=1, call=1, rank=1), "d") is Claim.TAKEN
    scheduler_seats = SchedulerSeats(client, "k1")
    scheduler_seats.ask_back([Seat(number=9, attempt=1, call=1, rank=1)])
    monkeypatch.setattr(channel_module, "KEPT_ENDED", 1 - channel_module.ARCHIVED)
    scheduler.note_end(0, 1)
    scheduler.confirm()
    names = {key.rpartition(":")[2] for key in client.keys("shadho:k1:*")}
    assert names >= {"attempts", "leases", "events", "cancel", "breakers", "known", "gangs", "seats", "yields"}
    assert "done" in names
    scheduler.ended_leases()
    assert mortal(client)
    for key in client.keys("shadho:k1:*"):
        client.expire(key, 86400)
    worker.renew("k1", [(1, 1)])
    assert mortal(client)


def test_a_claim_alone_leaves_no_key_for_ever(client: Any, worker: Channel, scheduler: SchedulerChannel) -> None:
    worker.claim("k1", started())
    assert mortal(client)
    worker.count_refused("k2")
    assert client.ttl("shadho:k2:attempts") > 0
    client.delete(*client.keys("shadho:k1:*"))
    client.setbit("shadho:k1:done", 0, 1)
    assert not worker.finish("k1", result())
    assert client.ttl("shadho:k1:attempts") > 0
    worker = Channel(client, worker="w")
    worker.claim("k1", started(1))
    client.persist("shadho:k1:breakers")
    assert worker.finish_and_claim("k1", failed(1), None, watched=True)[0]
    assert client.ttl("shadho:k1:breakers") > 0


# Ended trials


@pytest.fixture
def settled(client: Any, worker: Channel, monkeypatch: pytest.MonkeyPatch) -> SchedulerChannel:
    """The channel of a study whose trials 0 to 99 have ended and are recorded."""
    monkeypatch.setattr(channel_module, "KEPT_ENDED", 0)
    monkeypatch.setattr(channel_module, "ARCHIVED", 10)
    channel = SchedulerChannel(client, "k1")
    for number in range(100):
        worker.claim("k1", started(number))
        worker.finish("k1", result(number))
        channel.note_end(number, 1)
        channel.confirm()
    channel.drain(0)
    channel.confirm()
    return channel


def test_recorded_ends_take_a_bit_each(client: Any, settled: SchedulerChannel) -> None:
    assert client.hlen("shadho:k1:attempts") == 0
    assert client.strlen("shadho:k1:done") == math.ceil(100 / 8)


@pytest.mark.parametrize("when", ["now", "erased", "resumed"])
def test_a_trial_whose_end_is_recorded_does_not_run_again(
    client: Any, worker: Channel, settled: SchedulerChannel, when: str
) -> None:
    worker.claim("k1", started(100))
    if when != "now":
        settled.erase()
        assert client.ttl("shadho:k1:done") > 0
    if when == "resumed":
        SchedulerChannel(client, "k1").ended_leases()
    for number in (0, 50, 99):
        assert not worker.claim("k1", started(number, attempt=2))
        assert not worker.finish("k1", result(number))
        assert worker.renew("k1", [(number, 1)]) == ["gone"]
        assert worker.are_refused("k1", [(number, 7)]) == [(number, 7)]
    settled.cancel([(0, 2)], running=True)
    settled.give_up([(0, 2)], "gone")
    assert settled.drain(0) == ([started(100)] if when == "now" else [])
    assert settled.refused() == 3
    assert worker.claim("k1", started(101))
    assert worker.claim("k1", started(2**40)), "a forged number is no error"


def test_a_recorded_trial_may_be_reopened_by_its_scheduler_for_later_attempts(
    client: Any, worker: Channel, settled: SchedulerChannel
) -> None:
    """A scheduler does so if its store was restored from an older copy."""
    settled.reopen([(7, 1)])
    assert not worker.claim("k1", started(7, attempt=1))
    assert worker.claim("k1", started(7, attempt=2))
    assert worker.finish("k1", result(7, attempt=2))
    assert not worker.claim("k1", started(7, attempt=3))


def test_an_end_is_not_settled_by_an_earlier_attempt(
    client: Any, worker: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt 1 failed and was tried again: the end of attempt 2 is not recorded yet."""
    monkeypatch.setattr(channel_module, "KEPT_ENDED", 0)
    monkeypatch.setattr(channel_module, "ARCHIVED", 1)
    scheduler = SchedulerChannel(client, "k1")
    worker.claim("k1", started())
    worker.finish("k1", failed(0))
    scheduler.note_end(0, 1)
    scheduler.reopen([(0, 1)])
    worker.claim("k1", started(attempt=2))
    worker.finish("k1", result(attempt=2))
    scheduler.confirm()
    SchedulerChannel(client, "k1").reopen([(0, 1)])
    assert not worker.claim("k1", started(attempt=2))


# Reports


def test_a_report_without_a_lease_is_refused_and_makes_no_keys(
    client: Any, worker: Channel, scheduler: SchedulerChannel
) -> None:
    assert worker.report("k1", report()) == "refused", "never claimed"
    worker.claim("k1", started())
    assert worker.report("k1", report()) == "ok"
    worker.finish("k1", result())
    assert worker.report("k1", report()) == "refused", "it has ended"
    assert scheduler.drain(0) == [started(), report(), result()]
    scheduler.erase()
    before = keys_of(client)
    assert worker.report("k1", report()) == "refused"
    assert keys_of(client) == before


def test_while_too_many_events_wait_reports_are_refused_and_results_are_not(
    worker: Channel, scheduler: SchedulerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_WAITING", 3)
    worker.claim("k1", started())
    assert [worker.report("k1", report(step)) for step in range(4)] == ["ok"] * 2 + ["refused"] * 2
    assert worker.finish_and_claim("k1", result(), started(1)) == (True, Claim.TAKEN)
    assert scheduler.drain(0) == [started(), report(0), report(1), result(), started(1)]
    scheduler.confirm()
    assert worker.report("k1", report(0, number=1)) == "ok"


# Who lives


@pytest.fixture(params=[Worker, StudyWants], ids=["worker", "study"])
def kind(request: pytest.FixtureRequest) -> type[Any]:
    found: type[Any] = request.param
    return found


@pytest.fixture
def registry(kind: type[Any], client: Any) -> Registry[Any]:
    return Registry(client, kind)


def facts(kind: type[Any]) -> list[Any]:
    """Two announcements of a kind."""
    if kind is Worker:
        machine = Machine(host="größe", cores=3, cards=(Gpu(name="größe"),))
        return [Worker(slots=1, imports=["a", "b"], machine=machine), Worker(slots=2, quarantined=True)]
    return [StudyWants(weight=1.5, wants={"größe": 1.0}, turns={"größe": 0.1 + 0.2}), StudyWants(weight=0.5)]


def test_who_announces_itself_lives_with_its_latest_facts(registry: Registry[Any], kind: type[Any]) -> None:
    first, latest = facts(kind)
    assert registry.living() == {}
    registry.announce("a", first)
    registry.announce("b", first)
    registry.announce("a", latest)
    assert registry.living() == {"a": latest, "b": first}


def test_who_falls_silent_is_forgotten(
    registry: Registry[Any], kind: type[Any], client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.announce("b", kind())
    monkeypatch.setattr(registry_module, "ANNOUNCE_SECONDS", SHORT)
    registry.announce("a", kind())
    services.wait_until(lambda: "a" not in registry.living(), seconds=5)
    assert registry.living() == {"b": kind()}
    assert all(":a" not in key for key in keys_of(client))
    [index] = [key for key in keys_of(client) if client.type(key) == "set"]
    assert client.smembers(index) == {"b"}


def test_who_withdraws_is_forgotten_at_once_and_without_a_trace(
    registry: Registry[Any], kind: type[Any], client: Any
) -> None:
    registry.announce("a", kind())
    registry.withdraw("a")
    registry.withdraw("never was there")
    assert registry.living() == {}
    assert keys_of(client) == set()


def test_with_a_key_only_announcements_count_that_it_signed_for_their_name(
    registry: Registry[Any], kind: type[Any], client: Any
) -> None:
    announced, _ = facts(kind)
    ours = Registry(client, kind, Signer(b"k" * 32))
    ours.announce("a", announced)
    for name, other in {"b": registry, "c": Registry(client, kind, Signer(b"another key of sixteen bytes"))}.items():
        other.announce(name, announced)
    [key] = client.keys("shadho:*:a")
    client.set(f"{key[:-1]}d", client.get(key))
    [index] = [key for key in keys_of(client) if client.type(key) == "set"]
    client.sadd(index, "d")
    assert (ours.living(), ours.refused) == ({"a": announced}, 3)
    assert (registry.living().keys(), registry.refused) == ({"a", "b", "c", "d"}, 0), "who has no key reads all"


@cases(
    "text",
    ["", "notjson", "[]", "5", "[" * 100_000, '{"slots": -1}', '{"slots": "1"}', '{"machine": {"memory": -1}}']
    + [json.dumps({"compute_class": name}) for name in (64 * "x", "\0", "\ud800")]
    + ['{"machine": {"cores": 1%s}}' % (400 * "0"), b"\xff{}x", "{" + MAX_ANNOUNCEMENT * " " + "}"],
)
def test_what_is_no_announcement_is_refused_and_counted(client: Any, text: str | bytes) -> None:
    for signer in (UNSIGNED, Signer(b"k" * 32)):
        registry = Registry(client, Worker, signer)
        registry.announce("a", Worker(slots=1))
        client.sadd("shadho:workers", "x")
        client.set("shadho:worker:x", text)
        assert (registry.living(), registry.refused) == ({"a": Worker(slots=1)}, 1)


def test_announcements_are_judged_again_when_the_keys_have_changed(
    client: Any, kind: type[Any], tmp_path: Path
) -> None:
    key, clock, (announced, _) = tmp_path / "shadho.key", ManualClock(), facts(kind)
    key.write_bytes(OLD)
    key.chmod(0o600)
    ours = Registry(client, kind, Signer.of_file(key, clock))
    for name, signed_by in {"a": OLD, "b": NEW}.items():
        Registry(client, kind, Signer(signed_by)).announce(name, announced)
    seen = []
    for keys in ((OLD,), (OLD, NEW), (NEW,)):
        key.write_bytes(b"\n".join(keys))
        clock.sleep(READ_SECONDS)
        seen.append((ours.living().keys(), ours.refused))
    assert seen == [({"a"}, 1), ({"a", "b"}, 0), ({"b"}, 1)]


def test_an_announcement_is_decoded_again_only_when_it_has_changed(registry: Registry[Any], kind: type[Any]) -> None:
    first, latest = facts(kind)
    for name in ("a", "b"):
        registry.announce(name, first)
    before = registry.living()
    registry.announce("b", latest)
    after = registry.living()
    assert after == {"a": first, "b": latest}
    assert after["a"] is before["a"]


def test_the_workers_of_one_hosts_cores_find_each_other_as_long_as_they_live(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(name: str, pool: str) -> Host:
        machine = Machine(cores=2, pool=pool)
        host = Host(client, name, machine)
        Registry(client, Worker).announce(name, Worker(slots=3, machine=machine))
        host.neighbours(joins=True)
        return host

    first, second, elsewhere = join("a", "p"), join("b", "p"), join("c", "q")
    assert [each.slots for each in first.neighbours(joins=False).values()] == [3]
    assert second.neighbours(joins=False).keys() == {"a"}
    assert elsewhere.neighbours(joins=False) == {}
    client.sadd("shadho:host:p", "c")
    assert first.neighbours(joins=False).keys() == {"b"}, "another host's worker may be named by anybody"
    Registry(client, Worker).withdraw("b")
    assert first.neighbours(joins=False) == {}
    client.set("shadho:host:p", "of a wrong type")
    assert first.neighbours(joins=False) == {}
    join("b", "p")
    first.neighbours(joins=True)
    assert second.neighbours(joins=False).keys() == {"a"}
    monkeypatch.setattr(registry_module, "ANNOUNCE_SECONDS", SHORT)
    join("a", "p")
    services.wait_until(lambda: not client.exists("shadho:host:p"), seconds=5)
    assert second.neighbours(joins=False) == {}
    join("of an earlier version", "")
    assert keys_of(client) >= {"shadho:host:q"}
    assert not client.exists("shadho:host:")


def test_workers_and_studies_of_one_name_are_not_mixed_up(client: Any) -> None:
    workers, studies = Registry(client, Worker), Registry(client, StudyWants)
    workers.announce("x", Worker(slots=3))
    studies.announce("x", StudyWants(weight=3.0))
    assert workers.living() == {"x": Worker(slots=3)}
    assert studies.living() == {"x": StudyWants(weight=3.0)}


# Connecting


def test_a_redis_that_does_not_answer_is_one_line_without_its_password() -> None:
    with pytest.raises(ServiceError) as caught:
        connect(f"redis://:secret@127.0.0.1:{services.free_port()}/0")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_scripts_are_found_again_after_the_server_has_forgotten_them(
    client: Any, worker: Channel, scheduler: SchedulerChannel
) -> None:
    """As after a restart, or a failover to a replica."""
    worker.claim("k1", started(0))
    client.script_flush()
    assert worker.claim("k1", started(1))
    assert worker.renew("k1", [(0, 1)]) == ["ok"]


def test_several_attempts_are_finished_and_claimed_in_one_step_and_each_has_its_own_answer(
    worker: Channel, scheduler: SchedulerChannel
) -> None:
    assert worker.claim("k1", started(2)), "in another delivery"
    claimed = worker.exchange("k1", [], [started(0), started(1), started(2)], "d")
    assert claimed == ([], [Claim.TAKEN, Claim.TAKEN, Claim.REFUSED])
    ended = worker.exchange("k1", [result(0), result(9), result(1)], [started(3)], "d")
    assert ended == ([True, True, True], [Claim.TAKEN]), "Redis has no record of trial 9"
    assert worker.exchange("k1", [result(2)], [], "d") == ([True], []), "by its lease"
    assert scheduler.drain(0) == [
        started(2), started(0), started(1), result(0), result(9), result(1), started(3), result(2)
    ]  # fmt: skip


def test_a_claimed_attempt_that_is_given_back_is_lost_unclaimed_and_may_follow_elsewhere(
    worker: Channel, scheduler: SchedulerChannel
) -> None:
    worker.exchange("k1", [], [started(0), started(1)], "d")
    worker.give_back("k1", [(1, 1)], "it waited")
    lost = Lost(number=1, attempt=1, reason="it waited", claimed=False, given_back=True)
    assert scheduler.drain(0) == [started(0), started(1), lost]
    assert worker.exchange("k1", [result(0), result(1)], [], "d") == ([True, False], [])
    assert worker.claim("k1", started(1, attempt=2))


# What whoever can write to Redis does to lock and leases


def test_the_lock_of_an_earlier_scheduler_that_is_written_again_counts_for_nothing(client: Any) -> None:
    scheduler = SchedulerChannel(client, "k1", fence=3)
    scheduler.lock()
    mine = client.get("shadho:k1:holder")
    client.set("shadho:k1:holder", "elsewhere 1 1:2:")
    scheduler.confirm()
    assert (client.get("shadho:k1:holder"), scheduler.forged) == (mine, 1)
    client.set("shadho:k1:holder", "elsewhere 1 1:4:")
    with pytest.raises(LockLost):
        scheduler.renew_lock()


def test_a_lock_that_would_never_end_gets_an_end(client: Any) -> None:
    client.set("shadho:k1:holder", "elsewhere 1 1:9:")
    with pytest.raises(StudyLocked):
        SchedulerChannel(client, "k1").lock()
    assert 0 < client.pttl("shadho:k1:holder") <= 1000 * HOLD_SECONDS


def test_whoever_writes_to_the_lock_without_pause_causes_an_outage_and_ends_nothing(client: Any) -> None:
    class Forger:
        """Writes another lock before each script."""

        def __getattr__(self, name: str) -> Any:
            client.set("shadho:k1:holder", f"forged {client.incr('forged')}")
            return getattr(client, name)

    scheduler: Any = SchedulerChannel(client, "k1")
    scheduler.lock()
    scheduler._client = Forger()
    with pytest.raises(redis.ConnectionError, match="keeps overwriting"):
        scheduler.confirm()
    scheduler._client = client
    scheduler.confirm()


def test_keeping_a_study_removes_no_event(client: Any, worker: Channel, scheduler: SchedulerChannel) -> None:
    scheduler.lock()
    worker.claim("k1", started())
    scheduler.drain(0)
    scheduler.renew_lock()
    assert client.xlen("shadho:k1:events") == 1
    scheduler.confirm()
    assert client.xlen("shadho:k1:events") == 0


def test_a_lease_with_an_end_beyond_any_has_ended(client: Any, worker: Channel, scheduler: SchedulerChannel) -> None:
    worker.claim("k1", started())
    client.zadd("shadho:k1:leases", {"0.1": 1000 * (time.time() + 30 * 86400)})
    assert scheduler.ended_leases() == [(0, 1)]
