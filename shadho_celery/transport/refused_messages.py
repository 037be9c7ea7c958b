"""Refused messages: those whose attempts no worker can claim any more, dropped from a queue in bulk.

One by one a worker would take a millisecond and more for each, and an ended study may have left very many.
"""

from __future__ import annotations

import base64
import math
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import amqp
import kombu
import msgspec
import redis
from msgspec import Struct

from shadho_celery.core.payload import Payload
from shadho_celery.transport.broker import TASK, RefusedMessage, read_message
from shadho_celery.transport.redis import Redis, run_on
from shadho_celery.transport.signing import Signer

#: returns those of a study's (number, attempt) pairs that no worker can claim any more
AreRefused = Callable[[str, Collection[tuple[int, int]]], Collection[tuple[int, int]]]

#: messages that are looked at together
LOOK = 1000

#: seconds to wait for the next of RabbitMQ's messages: another consumer may have taken it
NEXT_SECONDS = 0.2

M = TypeVar("M", bound=Hashable)


def drop_refused(
    connection: kombu.Connection, queue: str, signer: Signer, are_refused: AreRefused, seconds: float = math.inf
) -> int:
    """Drop the refused messages of a queue, for so many seconds; return their number.

    The next LOOK messages are looked at together, again and again while some of them are dropped. All others keep
    their places.
    """
    drop = _DROP.get(connection.transport.driver_type)
    dropped, end = 0, time.monotonic() + seconds
    while drop and time.monotonic() < end and (fresh := drop(connection, queue, signer, are_refused)):
        dropped += fresh
    return dropped


def _drop_from_redis(connection: kombu.Connection, queue: str, signer: Signer, are_refused: AreRefused) -> int:
    channel = connection.default_channel
    client: Redis = redis.Redis(connection_pool=channel.pool)
    key = channel.global_keyprefix + queue
    items = client.lrange(key, -LOOK, -1)
    stale = _refused({item: _read_item(item, signer) for item in items}, are_refused)
    return int(run_on(client, "drop", [key], len(items), *stale)) if stale else 0


def _drop_from_rabbitmq(connection: kombu.Connection, queue: str, signer: Signer, are_refused: AreRefused) -> int:
    # A channel of its own: when it closes, all messages that were not acknowledged return to their places at once.
    channel = connection.channel()
    try:
        found = _next_messages(connection, channel, queue)
        stale = _refused({each.delivery_tag: _read(each.headers, each.body, signer) for each in found}, are_refused)
        if len(stale) == len(found) > 0:
            channel.basic_ack(stale[-1], multiple=True)
        else:
            for tag in stale:
                channel.basic_ack(tag)
        return len(stale)
    finally:
        channel.close()


def _next_messages(connection: kombu.Connection, channel: Any, queue: str) -> list[Any]:
    """Return the next messages of RabbitMQ's queue, not acknowledged."""
    found: list[Any] = []
    try:
        count = min(LOOK, channel.queue_declare(queue, passive=True).message_count)
    except amqp.NotFound:
        return found
    if count:
        channel.basic_qos(0, count, False)
        consumer = channel.basic_consume(queue, callback=found.append)
        with suppress(socket.timeout):
            while len(found) < count:
                connection.drain_events(timeout=NEXT_SECONDS)
        # Before the first acknowledgement, which would bring the next message.
        channel.basic_cancel(consumer)
    return found


_DROP = {"redis": _drop_from_redis, "amqp": _drop_from_rabbitmq}


def _refused(messages: Mapping[M, Payload | None], are_refused: AreRefused) -> list[M]:
    """Return the keys of those messages all of whose attempts are refused; None stands for any other message."""
    by_study: dict[str, set[tuple[int, int]]] = defaultdict(set)
    found = {key: payload for key, payload in messages.items() if payload is not None}
    for payload in found.values():
        by_study[payload.study].update(_attempts(payload))
    refused = {study: set(are_refused(study, attempts)) for study, attempts in by_study.items()}
    return [key for key, payload in found.items() if _attempts(payload) <= refused[payload.study]]


class _Item(Struct):
    """Fields of an item of Redis' queues that are read."""

    body: str
    headers: dict[str, Any]


def _read_item(item: bytes | str, signer: Signer) -> Payload | None:
    """Return the payload of an item of Redis' queues if it is a message with attempts to claim, else None."""
    try:
        outside = msgspec.json.decode(item, type=_Item)
        return _read(outside.headers, base64.b64decode(outside.body), signer)
    except (ValueError, RecursionError):
        return None


def _read(headers: Any, body: bytes | str, signer: Signer) -> Payload | None:
    """Return the payload of a message with attempts to claim; None for any other message."""
    try:
        if headers.get("task") != TASK:
            return None
        (plain,), *_ = msgspec.json.decode(body)
        payload = read_message(plain, headers, signer)
    except (AttributeError, TypeError, ValueError, RecursionError, RefusedMessage):
        return None
    # A replica does not claim its attempt, which runs elsewhere.
    return payload if payload.replica is None else None


def _attempts(payload: Payload) -> set[tuple[int, int]]:
    return {(attempt.number, attempt.attempt) for attempt in payload.attempts}
