"""What is sent when the broker or Redis is away, and when it is tried again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import pytest
import redis

from shadho_celery.core.clock import ManualClock
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.in_flight import InFlight, Sent
from shadho_celery.fleet.messages import Messages
from shadho_celery.fleet.outbox import RETRY_SECONDS, Outbox
from shadho_celery.fleet.pace import Pace


@dataclass
class Services:
    """A broker and a Redis that may be away, with what they were told in its order."""

    told: list[Any] = field(default_factory=list)
    broker_error: ServiceError | None = None
    redis_error: redis.RedisError | None = None

    def publish(self, payloads: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        batch = [payload for _, payload in payloads]
        if self.broker_error is not None:
            raise self.broker_error
        self.told += [attempt["number"] for payload in batch for attempt in payload["attempts"]]

    def reopen(self, attempts: Sequence[tuple[int, int]]) -> None:
        if self.redis_error is not None:
            raise self.redis_error
        self.told += attempts


class Rig:
    def __init__(self) -> None:
        self.clock, self.services, self.in_flight = ManualClock(), Services(), InFlight()
        fleet: Any = MagicMock(classes=[], able=set())
        messages = Messages(
            study="s",
            module="m",
            trial_timeout=None,
            may_watch=True,
            fleet=fleet,
            in_flight=self.in_flight,
            pace=Pace(self.clock),
        )
        services: Any = self.services
        self.outbox = Outbox(services, services, messages, self.in_flight, self.clock)

    def send(self, *numbers: int) -> None:
        for number in numbers:
            trial = Trial(number=number, subspace="all", params={}, state=TrialState.QUEUED, attempt=1)
            self.in_flight.add(Sent(number, 1, "cpu", 0.0, trial=trial))
            self.outbox.add([trial])
        self.outbox.send()

    def told(self) -> list[Any]:
        """What the services were told since the last call."""
        told, self.services.told = self.services.told, []
        return told


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
    assert rig.outbox.refusal is away
    rig.services.broker_error = None
    rig.in_flight.remove(0)
    rig.clock.advance_to(RETRY_SECONDS / 2)
    rig.send(2)
    assert (rig.told(), rig.outbox.refusal) == ([], away)
    rig.clock.advance_to(RETRY_SECONDS)
    rig.send()
    assert (rig.told(), rig.outbox.refusal) == ([1, 2], None)


def test_nothing_is_sent_before_redis_lets_it_follow(rig: Rig) -> None:
    """An outage of Redis is no refusal of the broker's: it is tried again at once."""
    rig.services.redis_error = redis.ConnectionError("cut off")
    rig.outbox.reopen([(0, 1)])
    rig.send(1)
    assert (rig.told(), rig.outbox.refusal) == ([], None)
    rig.services.redis_error = None
    rig.send()
    assert rig.told() == [(0, 1), 1]


def test_a_redis_that_is_of_no_use_is_an_error(rig: Rig) -> None:
    rig.services.redis_error = redis.ResponseError("WRONGTYPE")
    rig.outbox.reopen([(0, 1)])
    with pytest.raises(ServiceError, match="WRONGTYPE"):
        rig.send()
