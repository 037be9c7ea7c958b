"""With Redis as the broker a worker outlives items that are no messages, and drops refused messages in bulk."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from integration.fleets import fleet
from services.channels import Channel

from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Outcome, ReplicaSeat, Result, Started, TrialState
from shadho_celery.transport.broker import Publisher, message, queue
from shadho_celery.transport.channel import SchedulerChannel
from shadho_celery.transport.redis import connect
from shadho_celery.transport.redis_queues import Connection, drop_refused
from shadho_celery.transport.signing import UNSIGNED, Signer

#: items of a list that are no messages, in the ways that they can be none
JUNK: list[bytes] = [
    b"junk",
    b"",
    b"\xff\xfe",
    b"5",
    b"null",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"body": "", "properties": {"delivery_tag": "a"}}',
    b'{"body": "", "properties": {"delivery_tag": [], "delivery_info": {"exchange": "", "routing_key": "q"}}}',
    b'{"body": 5, "properties": {"delivery_tag": "a", "body_encoding": "base64", "delivery_info": {}}}',
    b'{"body": "!", "properties": {"delivery_tag": "a", "body_encoding": "base64", "delivery_info": {}}}',
    b'{"headers": [1], "properties": {"delivery_tag": "a", "delivery_info": {"exchange": "", "routing_key": "q"}}}',
]


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with connect(redis_url) as client:
        yield client


def payload(number: int, study: str = "k1", attempt: int = 1, **changes: Any) -> Payload:
    one = Attempt(number=number, attempt=attempt, params={"x": 0.5}, subspace="", seed=0, state=TrialState.QUEUED)
    return Payload(**{"study": study, "module": "my_study", "attempts": [one], **changes})


def ended(client: Any, *numbers: int, study: str = "k1") -> None:
    """Trials that have run and ended."""
    worker = Channel(client)
    for number in numbers:
        worker.claim(study, Started(number=number, attempt=1, host="h", at=0.0))
        outcome = Outcome(state=TrialState.COMPLETE, loss=0.5)
        worker.finish(study, Result(number=number, attempt=1, outcome=outcome, at=0.0))


def consumed(url: str, name: str, seconds: float = 0.5, **options: Any) -> list[Any]:
    """The tasks of all messages that a consumer gets."""
    found: list[Any] = []

    def keep(message: Any) -> None:
        found.append(message.headers["task"])
        message.ack()

    with (
        Connection(url, transport_options=options) as connection,
        connection.Consumer(queue(name), on_message=keep, accept=["json"]),
        suppress(socket.timeout),
    ):
        while True:
            connection.drain_events(timeout=seconds)
    return found


@pytest.mark.parametrize("item", JUNK, ids=lambda item: repr(item[:30]))
def test_an_item_that_is_no_message_is_passed_over_and_said(
    client: Any, redis_url: str, item: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client.lpush("q", item)
    Publisher(redis_url).publish([("q", payload(0))])
    assert consumed(redis_url, "q") == ["shadho.trial"]
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "no message" in said
    assert "\n" not in said
    assert len(said) < 300
    assert not client.exists("unacked", "q")


@pytest.mark.parametrize("prefix", ["", "ours:"])
def test_messages_of_trials_that_have_ended_are_dropped_in_bulk_and_nothing_else(
    client: Any, redis_url: str, prefix: str
) -> None:
    options = {"global_keyprefix": prefix}
    ended(client, 0, 1, 2)
    ended(client, 0, study="k2")
    SchedulerChannel(client, "k1").cancel([(3, 1)], running=False)
    attempts = payload(1).attempts + payload(9).attempts
    seat = ReplicaSeat(address="h:1", token="t", rank=1)
    kept = [payload(4), payload(3, attempt=2), payload(1, "k2"), payload(7, attempts=attempts)]
    kept.append(payload(0, replica=seat))
    stale = [payload(number) for number in (0, 1, 2, 3)] + [payload(0, "k2")]
    key = f"{prefix}q"
    foreign = json.dumps({"headers": {"task": "another"}, "body": base64.b64encode(b"[[], {}, {}]").decode()})
    with redis.Redis.from_url(redis_url) as raw:
        raw.lpush(key, foreign, *JUNK)
        Publisher(redis_url, options).publish([("q", one) for pair in zip(stale, kept, strict=True) for one in pair])
        before: Any = raw.lrange(key, 0, -1)
        # Messages of another priority, and those that were delivered, are in other keys.
        raw.rpush(f"{key}\x06\x163", *before)
        raw.hset("unacked", "tag", before[0])
        with Connection(redis_url, transport_options=options) as connection:
            dropped = [
                drop_refused(connection.default_channel, "q", UNSIGNED, Channel(client).are_refused) for _ in range(2)
            ]
        assert dropped == [len(stale), 0]
        assert raw.lrange(key, 0, -1) == [item for item in before if body_of(item) not in map(body, stale)]
        assert raw.lrange(f"{key}\x06\x163", 0, -1) == before
        assert raw.hgetall("unacked") == {b"tag": before[0]}


def body(each: Payload) -> Any:
    return json.loads(json.dumps(message(each)[0]))


def body_of(item: bytes) -> Any:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return json.loads(base64.b64decode(json.loads(item)["body"]))
    return None


def test_messages_that_a_worker_cannot_read_are_not_dropped(client: Any, redis_url: str) -> None:
    ended(client, 0)
    Publisher(redis_url).publish([("q", payload(0))])
    signer = Signer(b"a key of sixteen bytes")
    with Connection(redis_url) as connection:
        assert drop_refused(connection.default_channel, "q", signer, Channel(client).are_refused) == 0
        assert drop_refused(connection.default_channel, "q", UNSIGNED, Channel(client).are_refused) == 1


def test_after_a_failure_the_next_attempt_is_not_dropped(client: Any) -> None:
    """It may be a copy, to which the scheduler leaves the trial in a moment."""
    ended(client, 0)
    assert Channel(client).are_refused("k1", [(0, 1), (0, 2), (1, 1)]) == [(0, 1)]


@pytest.mark.timeout(180)
def test_junk_and_very_many_messages_of_an_ended_study_delay_the_next_study_by_seconds(
    client: Any, redis_url: str, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    name = unique("cpu")
    old = SchedulerChannel(client, "old")
    old.cancel([(number, 1) for number in range(20_000)], running=False)
    old.erase()
    Publisher(redis_url).publish([(name, payload(number, "old")) for number in range(20_000)])
    client.rpush(name, *JUNK)
    with fleet(tmp_path, redis_url, redis_url, name) as ours:
        ours.desk.write("my_study.py", "from hyperopt import hp\nSPACE = hp.uniform('x', 0, 1)\nobjective = float\n")
        [worker] = ours.workers(1, slots=2)
        ours.ended_well(ours.launch("my_study", 8), "my_study", 8, 90)
        assert worker.err.count("no message") == len(JUNK)
        assert client.llen(name) == 0
        assert "messages in" in worker.err, worker.err
        assert worker.err.count("refused at its claim") < 5000, "most were dropped in bulk"
