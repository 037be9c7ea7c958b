"""Redis as the broker: a worker passes over items that are no messages, and drops refused messages in bulk.

kombu takes one item after another from a queue's list, and puts each into a hash until it is acknowledged. An item
that it cannot read ends the worker, one item each. Here it is named in the log, and the worker lives on.
"""

from __future__ import annotations

import base64
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from queue import Empty
from typing import Any

import celery.app.amqp
import kombu.transport.redis
import kombu.transport.virtual
import msgspec
import redis
from msgspec import Struct

from shadho_celery.core.checks import one_line
from shadho_celery.core.payload import Payload
from shadho_celery.transport import broker
from shadho_celery.transport.broker import TASK, RefusedMessage, read_message
from shadho_celery.transport.redis import Redis, run_on
from shadho_celery.transport.signing import Signer

log = logging.getLogger(__name__)

#: returns those of a study's (number, attempt) pairs that no worker can claim any more
AreRefused = Callable[[str, Collection[tuple[int, int]]], Collection[tuple[int, int]]]

#: messages at which `drop_refused` looks at once
LOOK = 1000


class NotAMessage(ValueError):
    """JSON that lacks the form of a message."""


class Message(kombu.transport.virtual.Message):  # type: ignore[misc]
    """A message whose form is checked before it counts as delivered."""

    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        try:
            super().__init__(payload, channel=channel, **options)
            delivery = [self.delivery_tag, self.delivery_info["exchange"], self.delivery_info["routing_key"]]
            if not all(isinstance(part, str) for part in delivery):
                raise TypeError("its delivery is not described by texts")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise NotAMessage(f"{type(error).__name__}: {error}") from None


class Channel(kombu.transport.redis.Channel):  # type: ignore[misc]
    """A channel that outlives items of its queues that are no messages."""

    Message = Message

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, NotAMessage) as error:
            log.error("an item in the queue is no message, and is passed over: %s", one_line(error))
            raise Empty from None


class Transport(kombu.transport.redis.Transport):  # type: ignore[misc]
    """kombu's transport with our channel."""

    Channel = Channel


class Connection(broker.Connection):
    """A connection to any broker, with our transport in place of kombu's where that is Redis."""

    def get_transport_cls(self) -> Any:
        found = super().get_transport_cls()
        return Transport if found is kombu.transport.redis.Transport else found


class AMQP(celery.app.amqp.AMQP):  # type: ignore[misc]
    """Celery's part that makes connections."""

    Connection = Connection


class _Item(Struct):
    """Fields of a queue's item that are read."""

    body: str
    headers: dict[str, Any]


def drop_refused(channel: Any, queue: str, signer: Signer, are_refused: AreRefused) -> int:
    """Drop those of the next LOOK messages whose attempts would all be refused; return their number.

    One by one, a worker would take a millisecond and more for each. `channel` is kombu's. All other items of the
    queue stay as they are.
    """
    client: Redis = redis.Redis(connection_pool=channel.pool)
    key = channel.global_keyprefix + queue
    items = client.lrange(key, -LOOK, -1)
    found = {item: payload for item in items if (payload := _read(item, signer)) is not None}
    by_study: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for payload in found.values():
        by_study[payload.study].update(_attempts(payload))
    refused = {study: set(are_refused(study, attempts)) for study, attempts in by_study.items()}
    stale = [item for item, payload in found.items() if _attempts(payload) <= refused[payload.study]]
    return int(run_on(client, "drop", [key], len(items), *stale)) if stale else 0


def _read(item: bytes | str, signer: Signer) -> Payload | None:
    """Return the payload of a message with attempts to claim; None for any other item."""
    try:
        outside = msgspec.json.decode(item, type=_Item)
        if outside.headers.get("task") != TASK:
            return None
        (plain,), *_ = msgspec.json.decode(base64.b64decode(outside.body))
        payload = read_message(plain, outside.headers, signer)
    except (TypeError, ValueError, RecursionError, RefusedMessage):
        return None
    # A replica does not claim its attempt, which runs elsewhere.
    return payload if payload.replica is None else None


def _attempts(payload: Payload) -> set[tuple[int, int]]:
    return {(attempt.number, attempt.attempt) for attempt in payload.attempts}
