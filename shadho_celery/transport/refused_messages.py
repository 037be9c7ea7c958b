"""Bulk deletion of messages whose attempts no worker can claim any more.

A worker needs a millisecond or more to refuse a message, and an ended study may leave very many messages. Redis alone
decides which attempts are refused, by the study and the attempts in the message's body. Signature and protocol version
do not matter, because claims of these attempts are refused in any case.
"""

from __future__ import annotations

import base64
import math
import time
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import amqp
import kombu
import redis
from msgspec import Struct

from shadho_celery.core.bounds import BROKER_HEARTBEAT_SECONDS, REMOVAL_SECONDS
from shadho_celery.core.checks import decoder
from shadho_celery.core.payload import StudyKey
from shadho_celery.core.trial import Number, Place
from shadho_celery.transport.broker import MAX_BODY, opened
from shadho_celery.transport.redis import Redis, run_on


class AreRefused(Protocol):
    """Returns those of a study's (number, attempt) pairs that no worker can claim any more.

    If `replicas` is True, the messages are for replicas. It then returns the attempts that will not run any more,
    because a replica can join only a running attempt.
    """

    def __call__(
        self, study: str, attempts: Collection[tuple[int, int]], *, replicas: bool
    ) -> Collection[tuple[int, int]]: ...


#: number of messages that are examined together
LOOK = 1000

#: seconds to wait for RabbitMQ's next message, which another consumer may have taken
NEXT_SECONDS = 0.2

M = TypeVar("M", bound=Hashable)


def drop_refused(connection: kombu.Connection, queue: str, are_refused: AreRefused, seconds: float = math.inf) -> int:
    """Delete the refused messages of a queue, for at most this many seconds. Return their number.

    The next LOOK messages are examined together, and this repeats as long as some of them are deleted. All other
    messages keep their places.
    """
    drop = _DROP.get(connection.transport.driver_type)
    dropped, end = 0, time.monotonic() + seconds
    while drop and time.monotonic() < end and (fresh := drop(connection, queue, are_refused, end)):
        dropped += fresh
    return dropped


def remove_refused(connection: kombu.Connection, queues: Iterable[str], are_refused: AreRefused) -> int:
    """Delete the refused messages of these queues, for at most REMOVAL_SECONDS. Return their number.

    This opens a new connection to the broker of `connection`. Every error ends the deletion silently: the scheduler's
    user may not have the permission to read queues, and workers refuse the remaining messages.
    """
    end, dropped = time.monotonic() + REMOVAL_SECONDS, 0
    # With a heartbeat, as in `node.consumer`, the broker puts the examined messages back if this machine fails.
    other = connection.clone(heartbeat=BROKER_HEARTBEAT_SECONDS)
    with suppress(Exception), opened(other):
        for queue in queues:
            dropped += drop_refused(other, queue, are_refused, end - time.monotonic())
    return dropped


def _drop_from_redis(connection: kombu.Connection, queue: str, are_refused: AreRefused, _: float) -> int:
    channel = connection.default_channel
    client: Redis = redis.Redis(connection_pool=channel.pool)
    key = channel.global_keyprefix + queue
    items = client.lrange(key, -LOOK, -1)
    stale = _refused({item: _read_item(item) for item in items}, are_refused)
    return int(run_on(client, "drop", [key], len(items), *stale)) if stale else 0


def _drop_from_rabbitmq(connection: kombu.Connection, queue: str, are_refused: AreRefused, end: float) -> int:
    # Use a separate channel: when it closes, all unacknowledged messages return to their places in the queue at once.
    channel = connection.channel()
    try:
        try:
            waiting = channel.queue_declare(queue, passive=True).message_count
        except amqp.NotFound:
            return 0
        # RabbitMQ sends the next messages while these are examined.
        channel.basic_qos(0, 2 * LOOK, False)
        # Messages that arrive after the `waiting` ones return to their places too.
        arrived: list[amqp.Message] = []
        consumer = channel.basic_consume(queue, callback=arrived.append)
        dropped, goes_on = 0, True
        while goes_on:
            found = _first(arrived, min(LOOK, waiting - dropped), connection.connection)
            stale = _refused({each.delivery_tag: _read(each.body) for each in found}, are_refused)
            goes_on = len(stale) == len(found) > 0 and dropped + len(stale) < waiting and time.monotonic() < end
            if not goes_on:
                # Cancel before the last acknowledgement, which would bring more messages.
                channel.basic_cancel(consumer)
            if len(stale) == len(found) > 0:
                channel.basic_ack(stale[-1], multiple=True)
            else:
                for tag in stale:
                    channel.basic_ack(tag)
            dropped += len(stale)
        return dropped
    finally:
        channel.close()


def _first(arrived: list[amqp.Message], count: int, connection: amqp.Connection) -> list[amqp.Message]:
    """Remove the first `count` messages that have arrived and return them; fewer if no other message comes in time."""
    with suppress(TimeoutError):
        while len(arrived) < count:
            connection.drain_events(NEXT_SECONDS)
    found, arrived[:count] = arrived[:count], []
    return found


_DROP = {"redis": _drop_from_redis, "amqp": _drop_from_rabbitmq}


class _Attempt(Struct):
    """The fields of an attempt in a message that are needed here."""

    number: Number
    attempt: Place


class _Sent(Struct):
    """The fields of a message's payload that are needed here."""

    study: StudyKey
    attempts: list[_Attempt]
    replica: Any = None

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """(number, attempt) pairs of the message's attempts."""
        return {(each.number, each.attempt) for each in self.attempts}


class _Item(Struct):
    """The field of an item in a Redis queue that is needed here."""

    body: str


_decode_body = decoder(tuple[tuple[_Sent], Any, Any])
_decode_item = decoder(_Item)


def _refused(messages: Mapping[M, _Sent | None], are_refused: AreRefused) -> list[M]:
    """Return the keys of those messages whose attempts are all refused. A value of None is not a message of ours."""
    asked: dict[tuple[str, bool], set[tuple[int, int]]] = defaultdict(set)
    found = {key: (sent.study, sent.replica is not None, sent.pairs) for key, sent in messages.items() if sent}
    for study, replicas, pairs in found.values():
        asked[study, replicas] |= pairs
    refused = {
        (study, replicas): set(are_refused(study, pairs, replicas=replicas))
        for (study, replicas), pairs in asked.items()
    }
    return [key for key, (study, replicas, pairs) in found.items() if pairs <= refused[study, replicas]]


def _read_item(item: bytes | str) -> _Sent | None:
    """Return the needed fields of an item in a Redis queue, or None if it is not a message with attempts."""
    try:
        return _read(base64.b64decode(_decode_item(item).body))
    except (ValueError, RecursionError):
        return None


def _read(body: bytes) -> _Sent | None:
    """Return the needed fields of a message's body, or None if it does not contain attempts."""
    try:
        (sent,), *_ = _decode_body(body if len(body) <= MAX_BODY else b"")
    except (ValueError, RecursionError):
        return None
    return sent  # type: ignore[no-any-return]
