"""What is sent when the broker or Redis is away, when it is tried again, and which attempts travel together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import pytest
import redis

from shadho_celery.core.attempts import Attempts, Sent
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, TrialState
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.dispatch import AHEAD_SECONDS, MAX_AHEAD, MAX_BUNDLE, PACE_SECONDS, RETRY_SECONDS, Dispatch


@dataclass
class Services:
    """A broker and a Redis that may be away, with what they were told in its order."""

    told: list[Any] = field(default_factory=list)
    messages: list[tuple[str, Payload]] = field(default_factory=list)
    broker_error: ServiceError | None = None
    redis_error: redis.RedisError | None = None
    looks: int = 0

    def look(self) -> None:
        self.looks += 1

    def publish(self, payloads: Iterable[tuple[str, Payload]]) -> None:
        batch = list(payloads)
        if self.broker_error is not None:
            raise self.broker_error
        self.messages += batch
        self.told += [attempt.number for _, payload in batch for attempt in payload.attempts]

    def reopen(self, attempts: Sequence[tuple[int, int]]) -> None:
        if self.redis_error is not None:
            raise self.redis_error
        self.told += attempts


def attempt_of(number: int, **changes: Any) -> Attempt:
    about = {"attempt": 1, "subspace": "all", "params": {}, "compute_class": "cpu", **changes}
    return Attempt(number=number, **about)


class Rig:
    def __init__(self, *, may_watch: bool = True) -> None:
        self.clock, self.services, self.in_flight = ManualClock(), Services(), Attempts[Sent]()
        self.workers: Any = MagicMock(classes=[ComputeClass(name="cpu", slots=2)], able={"a"})
        services: Any = self.services
        self.dispatch = Dispatch(
            Payload(study="s", module="m", attempts=[], timeout=2.5),
            services,
            services,
            self.workers,
            self.in_flight,
            self.clock,
            may_watch,
        )

    def send(self, *attempts: int | Attempt) -> None:
        """Send attempts, told by their number where nothing else matters."""
        sent = [each if isinstance(each, Attempt) else attempt_of(each) for each in attempts]
        for each in sent:
            self.in_flight.put(each.number, each.attempt, Sent(each, 0.0))
        self.dispatch.to_publish += sent
        self.dispatch.send()

    def told(self) -> list[Any]:
        """Return the calls of the services since the last call."""
        told, self.services.told = self.services.told, []
        return told

    def bundles(self) -> list[tuple[str, list[int]]]:
        """Queue, and numbers of the trials, of each message since the last call."""
        messages, self.services.messages = self.services.messages, []
        return [(name, [attempt.number for attempt in payload.attempts]) for name, payload in messages]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_what_is_sent_is_sent_once(rig: Rig) -> None:
    rig.send(0, 1)
    assert rig.told() == [0, 1]
    rig.send(2)
    assert rig.told() == [2]


def test_a_broker_that_is_away_is_asked_again_after_a_while_and_not_for_what_was_taken_back(rig: Rig) -> None:
    rig.services.broker_error = away = ServiceError("the broker is away")
    rig.send(0, 1)
    assert rig.dispatch.refusal is away
    rig.services.broker_error = None
    rig.in_flight.lose(0, 1)
    rig.clock.advance_to(RETRY_SECONDS / 2)
    rig.send(2)
    assert (rig.told(), rig.dispatch.refusal) == ([], away)
    rig.clock.advance_to(RETRY_SECONDS)
    rig.send()
    assert (rig.told(), rig.dispatch.refusal) == ([1, 2], None)


def test_nothing_is_sent_before_redis_lets_it_follow(rig: Rig) -> None:
    """An outage of Redis is no refusal of the broker's: it is tried again at once."""
    rig.services.redis_error = redis.ConnectionError("cut off")
    rig.dispatch.reopened += [(0, 1)]
    rig.send(1)
    assert (rig.told(), rig.dispatch.refusal) == ([], None)
    rig.services.redis_error = None
    rig.send()
    assert rig.told() == [(0, 1), 1]


def test_another_attempt_may_follow_although_the_broker_is_away(rig: Rig) -> None:
    """Without it, an attempt that was not sent yet looks as if its trial had ended."""
    rig.services.broker_error = ServiceError("the broker is away")
    rig.send(0)
    rig.dispatch.reopened += [(1, 1)]
    rig.send(attempt_of(1, attempt=2))
    assert rig.told() == [(1, 1)]


def test_a_redis_that_is_of_no_use_is_an_error(rig: Rig) -> None:
    rig.services.redis_error = redis.ResponseError("ERR unknown command")
    rig.dispatch.reopened += [(0, 1)]
    with pytest.raises(ServiceError, match="unknown command"):
        rig.send()


# Messages


def test_a_message_says_what_holds_for_its_attempts(rig: Rig) -> None:
    rig.send(attempt_of(3, seed=7, budget=0.5, origin=1))
    [(name, payload)] = rig.services.messages
    assert (name, payload.study, payload.module, payload.timeout, payload.replica) == ("cpu", "s", "m", 2.5, None)
    [attempt] = payload.attempts
    assert (attempt.number, attempt.seed, attempt.budget, attempt.origin, attempt.not_on) == (3, 7, 0.5, 1, None)


def test_the_time_limit_of_replicas_is_their_coordinators(rig: Rig) -> None:
    attempt = Attempt(number=0, attempt=1, subspace="all", params={}, slots=2)
    payload = rig.dispatch.payload([attempt], None)
    assert (payload.attempts, payload.timeout) == ([attempt], None)


@pytest.mark.parametrize(
    ("may_watch", "able", "watched"), [(True, {"a", "b"}, True), (True, {"a"}, False), (False, {"a", "b"}, False)]
)
def test_failures_count_against_a_worker_only_where_others_could_have_run_the_trial(
    may_watch: bool, able: set[str], watched: bool
) -> None:
    rig = Rig(may_watch=may_watch)
    rig.workers.able = able
    rig.send(0)
    [(_, payload)] = rig.services.messages
    assert payload.watched is watched


def settled(rig: Rig, seconds: float) -> None:
    """Have the class's trials take so many seconds, for long."""
    for _ in range(100):
        rig.dispatch.pace.tell("cpu", seconds)


def bundled(rig: Rig, *attempts: int | Attempt) -> list[tuple[str, list[int]]]:
    rig.send(*attempts)
    return rig.bundles()


def test_trials_of_which_nothing_is_known_travel_alone(rig: Rig) -> None:
    assert bundled(rig, *range(4)) == [("cpu", [number]) for number in range(4)]


def test_a_trial_that_is_tried_again_travels_alone(rig: Rig) -> None:
    """It may have ended its worker, and with it all trials of its message."""
    for _ in range(100):
        rig.dispatch.pace.tell("cpu", 0.0)
    rig.send(*[attempt_of(number, attempt=1 + number % 2) for number in range(8)])
    assert sorted(numbers for _, numbers in rig.bundles()) == [[0, 2], [1], [3], [4, 6], [5], [7]]


def test_short_trials_travel_together_so_that_every_slot_gets_its_part(rig: Rig) -> None:
    settled(rig, 0.0039)
    assert bundled(rig, *range(20)) == [("cpu", list(range(start, start + 5))) for start in (0, 5, 10, 15)]
    assert bundled(rig, *range(4)) == [("cpu", [0, 1]), ("cpu", [2, 3])]
    settled(rig, 0.0)
    assert [len(numbers) for _, numbers in bundled(rig, *range(64))] == [MAX_BUNDLE] * 4
    settled(rig, 1.0)
    assert bundled(rig, *range(4)) == [("cpu", [number]) for number in range(4)]


def test_an_attempt_of_several_slots_or_that_not_every_machine_may_have_travels_alone(rig: Rig) -> None:
    settled(rig, 0.001)
    rig.workers.classes = [ComputeClass(name="cpu", slots=1)]
    running = attempt_of(0, state=TrialState.RUNNING, host="here")
    rig.in_flight.put(0, 1, Sent(running, 0.0))
    rig.send(attempt_of(0, attempt=2), attempt_of(1, slots=2), 2, 3, 4)
    sent = [attempt for _, payload in rig.services.messages for attempt in payload.attempts]
    assert {attempt.number: attempt.not_on for attempt in sent if attempt.not_on} == {0: "here"}
    assert sorted(numbers for _, numbers in rig.bundles()) == [[0], [1], [2, 3, 4]]


def test_each_class_has_its_own_queue_and_pace(rig: Rig) -> None:
    settled(rig, 0.001)
    rig.workers.classes = [ComputeClass(name="cpu", slots=1), ComputeClass(name="gpu", slots=1)]
    sent = bundled(rig, *(attempt_of(number, compute_class=("cpu", "gpu")[number % 2]) for number in range(4)))
    assert sorted(sent) == [("cpu", [0, 2]), ("gpu", [1]), ("gpu", [3])]


def test_an_attempt_for_one_machine_travels_alone_and_in_the_machines_own_queue(rig: Rig) -> None:
    settled(rig, 0.001)
    rig.workers.classes = [ComputeClass(name="cpu", slots=1)]
    bound = [attempt_of(number, only_on="a") for number in (1, 2)]
    assert bundled(rig, 0, *bound, 3) == [("cpu", [0, 3]), ("cpu,a", [1]), ("cpu,a", [2])]


# Pace


def test_as_many_trials_are_kept_waiting_as_a_class_runs_in_a_turn(rig: Rig) -> None:
    cpu = ComputeClass(name="cpu", slots=4)
    assert rig.dispatch.pace.ahead(cpu) == 0, "before the first has ended"
    settled(rig, AHEAD_SECONDS / 5)
    assert rig.dispatch.pace.ahead(cpu) == 4 * 5
    assert rig.dispatch.pace.ahead(ComputeClass(name="cpu", slots=4, allowance=2.0)) == 2 * 5
    assert rig.dispatch.pace.ahead(ComputeClass(name="cpu", slots=40, allowance=20.5, turn=0)) == 20 // 2, "no more"
    settled(rig, 0.0)
    assert rig.dispatch.pace.ahead(ComputeClass(name="cpu", slots=1000)) == MAX_AHEAD


def test_the_first_short_trial_is_not_believed(rig: Rig) -> None:
    rig.dispatch.pace.tell("cpu", 0.0)
    assert rig.dispatch.pace.seconds["cpu"] > 0.1


def test_turns_wait_for_events_to_gather_only_where_the_queues_hold_work_ahead(rig: Rig) -> None:
    cpu = [ComputeClass(name="cpu", slots=4)]
    for _ in range(2):
        rig.dispatch.pace.turn(cpu)
    assert rig.clock.now() == 0.0
    settled(rig, 0.01)
    for _ in range(3):
        rig.dispatch.pace.turn(cpu)
    assert rig.clock.now() == pytest.approx(3 * PACE_SECONDS)
    rig.clock.sleep(1.0)
    rig.dispatch.pace.turn(cpu)
    assert rig.clock.now() == pytest.approx(1.0 + 3 * PACE_SECONDS)
