"""Refused messages are dropped in bulk and nothing else is, whichever the broker."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis
from integration.fleets import fleet
from integration.test_redis_queues import JUNK, payload
from services.channels import Channel

from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Outcome, ReplicaSeat, Result, Started, TrialState
from shadho_celery.fleet.executor import remove
from shadho_celery.transport import refused_messages
from shadho_celery.transport.broker import Publisher, message, queue
from shadho_celery.transport.channel import SchedulerChannel
from shadho_celery.transport.redis import connect
from shadho_celery.transport.refused_messages import drop_refused

OURS = {"global_keyprefix": "ours:"}


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with connect(redis_url) as client:
        yield client


@pytest.fixture(params=["redis", "redis with a prefix", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> Iterator[kombu.Connection]:
    """A connection to a broker; `Publisher` has its URL and options."""
    is_redis = request.param != "rabbitmq"
    url = request.getfixturevalue("redis_url") if is_redis else request.getfixturevalue("amqp_server")[0]
    with kombu.Connection(url, transport_options=OURS if "prefix" in request.param else {}) as connection:
        yield connection


@pytest.fixture
def name(broker: kombu.Connection, unique: Callable[[str], str]) -> Iterator[str]:
    """A queue of this test's alone."""
    name = unique("cpu")
    queue(name)(broker.default_channel).declare()
    yield name
    queue(name)(broker.default_channel).delete()


def publish(broker: kombu.Connection, name: str, *payloads: Payload) -> None:
    publisher = Publisher(broker.as_uri(include_password=True), broker.transport_options)
    publisher.publish([(name, each) for each in payloads])
    publisher.close()


def drop(broker: kombu.Connection, name: str, client: Any) -> int:
    return drop_refused(broker, name, Channel(client).are_refused)


def left(broker: kombu.Connection, name: str) -> list[Any]:
    """The bodies of the messages in a queue, in their order."""
    bound, found = queue(name)(broker.channel()), []
    while (each := bound.get(no_ack=True)) is not None:
        found.append(json.loads(each.body))
    return found


def ended(client: Any, *numbers: int, study: str = "k1") -> None:
    """Trials that have run and ended."""
    worker = Channel(client)
    for number in numbers:
        worker.claim(study, Started(number=number, attempt=1, host="h", at=0.0))
        outcome = Outcome(state=TrialState.COMPLETE, loss=0.5)
        worker.finish(study, Result(number=number, attempt=1, outcome=outcome, at=0.0))


def body(each: Payload) -> Any:
    return json.loads(json.dumps(message(each)[0]))


@pytest.mark.parametrize("look", [1000, 3])
def test_messages_of_trials_that_have_ended_are_dropped_and_all_others_keep_their_order(
    client: Any, broker: kombu.Connection, name: str, look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_messages, "LOOK", look)
    ended(client, 0, 1, 2)
    ended(client, 0, study="k2")
    SchedulerChannel(client, "k1").cancel([(3, 1)], running=False)
    attempts = payload(1).attempts + payload(9).attempts
    seat = ReplicaSeat(address="h:1", token="t", rank=1)
    Channel(client).claim("k1", Started(number=5, attempt=1, host="h", at=0.0))
    kept = [payload(4), payload(3, attempt=2), payload(1, "k2"), payload(7, attempts=attempts)]
    kept += [payload(5, replica=seat), payload(4, replica=seat)]
    stale = [payload(number) for number in (0, 1, 2, 3, 5)] + [payload(0, "k2"), payload(0, replica=seat)]
    publish(broker, name, *stale[:2], kept[0], stale[2], kept[1], *stale[3:], *kept[2:])
    assert drop(broker, name, client) == len(stale)
    assert drop(broker, name, client) == 0
    assert left(broker, name) == [body(each) for each in kept]


def test_foreign_messages_are_not_dropped(client: Any, broker: kombu.Connection, name: str) -> None:
    ended(client, 0)
    task = [payload(0).attempts, {}, {}]
    with kombu.Producer(broker.channel(), auto_declare=False) as producer:
        for headers in ({}, {"task": "another"}, {"task": "shadho.trial"}, {"task": ["shadho.trial"]}):
            producer.publish(json.dumps([[1], {}, task[1]]), routing_key=name, headers=headers)
        producer.publish("junk", routing_key=name, headers={"task": "shadho.trial"}, content_type="text/plain")
    publish(broker, name, payload(0))
    assert drop(broker, name, client) == 1
    bound = queue(name)(broker.channel())
    assert [bound.get(no_ack=True) is not None for _ in range(6)] == [True] * 5 + [False]


def test_refused_messages_of_another_version_or_key_and_large_ones_are_dropped(
    client: Any, broker: kombu.Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(client, 0)
    large = Attempt(number=0, attempt=1, params={"x": "long" * 100_000}, subspace="", seed=0)
    publish(broker, name, payload(0), payload(0, attempts=[large]), payload(1))
    with monkeypatch.context() as context:
        context.setattr("shadho_celery.transport.broker.PROTOCOL", 1)
        publish(broker, name, payload(0), payload(2))
    assert drop(broker, name, client) == 3
    assert left(broker, name) == [body(payload(1)), body(payload(2))]


def test_while_redis_does_not_tell_nothing_is_dropped(client: Any, broker: kombu.Connection, name: str) -> None:
    ended(client, 0)
    publish(broker, name, payload(0))

    def are_refused(*_: object, **__: object) -> list[tuple[int, int]]:
        raise redis.ConnectionError("away")

    with pytest.raises(redis.ConnectionError):
        drop_refused(broker, name, are_refused)
    assert left(broker, name) == [body(payload(0))]


def test_a_queue_that_there_is_not_has_none(client: Any, broker: kombu.Connection) -> None:
    assert drop(broker, "there-is-not", client) == 0


def test_items_of_redis_that_are_no_messages_and_those_in_other_keys_stay(client: Any, redis_url: str) -> None:
    ended(client, 0)
    foreign = json.dumps({"headers": {"task": "another"}, "body": base64.b64encode(b"[[], {}, {}]").decode()})
    with redis.Redis.from_url(redis_url) as raw, kombu.Connection(redis_url) as connection:
        raw.lpush("q", foreign, *JUNK)
        before: Any = raw.lrange("q", 0, -1)
        publish(connection, "q", payload(0))
        stale: Any = raw.lindex("q", 0)
        # Messages of another priority, and those that were delivered.
        raw.rpush("q\x06\x163", stale)
        raw.hset("unacked", "tag", stale)
        assert drop(connection, "q", client) == 1
        assert raw.lrange("q", 0, -1) == before
        assert raw.llen("q\x06\x163") == raw.hlen("unacked") == 1


def test_after_a_failure_the_next_attempt_is_not_dropped(client: Any) -> None:
    """It may be a copy, to which the scheduler leaves the trial in a moment."""
    ended(client, 0)
    assert Channel(client).are_refused("k1", [(0, 1), (0, 2), (1, 1)]) == [(0, 1)]


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_the_messages_of_a_removed_study_are_removed_and_an_absent_broker_does_not_matter(
    client: Any,
    redis_url: str,
    request: pytest.FixtureRequest,
    unique: Callable[[str], str],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, url = unique("cpu"), request.getfixturevalue(f"{kind}_url")
    monkeypatch.setenv("SHADHO_REDIS_URL", redis_url)
    monkeypatch.setenv("CELERY_BROKER_URL", f"{kind}://127.0.0.1:1")
    assert remove("k1", 3, [name]) == 0
    monkeypatch.setenv("CELERY_BROKER_URL", url)
    with kombu.Connection(url) as connection:
        publish(connection, name, payload(0), payload(0, "k2"), payload(2))
        assert remove("k1", 3, ["there-is-not", name]) == 2
        assert left(connection, name) == [body(payload(0, "k2"))]
        queue(name)(connection.default_channel).delete()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_many_messages_of_an_ended_study_are_refused_one_by_one_before_the_next_study_runs(
    client: Any, redis_url: str, request: pytest.FixtureRequest, tmp_path: Path, unique: Callable[[str], str], kind: str
) -> None:
    """And with Redis items that are no messages, too."""
    name, url = unique("cpu"), request.getfixturevalue(f"{kind}_url")
    old = SchedulerChannel(client, "old")
    old.cancel([(number, 1) for number in range(500)], running=False)
    old.erase()
    publisher = Publisher(url)
    publisher.publish([(name, payload(number, "old")) for number in range(500)])
    publisher.close()
    if url == redis_url:
        client.rpush(name, *JUNK)
    with fleet(tmp_path, url, redis_url, name) as ours:
        ours.desk.write("my_study.py", "from hyperopt import hp\nSPACE = hp.uniform('x', 0, 1)\nobjective = float\n")
        [worker] = ours.workers(1, slots=2)
        ours.ended_well(ours.launch("my_study", 8), "my_study", 8, 90)
        assert worker.err.count("not a message") == (len(JUNK) if url == redis_url else 0)
        assert client.llen(name) == 0
        assert worker.err.count("refused at its claim") == 500
