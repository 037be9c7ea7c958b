"""Redis as the broker: kombu's transport, changed so that a worker skips items that are not messages and reuses its
client.

kombu takes one item after another from a queue's list, and stores it in a hash until it is acknowledged. An item that
kombu cannot read would stop the worker. Here the worker logs a warning and continues.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any

import celery.app.amqp
import kombu.transport.redis
import kombu.transport.virtual

from shadho_celery.core.checks import one_line
from shadho_celery.fleet import broker

log = logging.getLogger(__name__)


#: maximum number of bytes of an item; it is larger than MAX_BODY, because an item contains the body in base64
MAX_ITEM = 2 * broker.MAX_BODY


class NotAMessage(ValueError):
    """An item in a queue is JSON, but not in the format of a message."""


class Message(kombu.transport.virtual.Message, broker.Message):  # type: ignore[misc]
    """A message that raises NotAMessage, before it counts as delivered, unless its format is correct."""

    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        try:
            super().__init__(payload, channel=channel, **options)
            delivery = [self.delivery_tag, self.delivery_info["exchange"], self.delivery_info["routing_key"]]
            if [part for part in delivery if not isinstance(part, str)]:
                raise TypeError("its delivery info is not text")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise NotAMessage(f"{type(error).__name__}: {error}") from None


class Channel(kombu.transport.redis.Channel):  # type: ignore[misc]
    """kombu's channel for Redis, which skips items that are too long or not messages, and keeps one client."""

    Message = Message
    _kept: Any = None

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        # kombu creates a client for each message that it sends, takes or acknowledges, which costs as much as the call
        # itself.
        if client is None and (self._kept is None or self._kept.connection_pool is not self.pool):
            self._kept = self._create_client()
        yield self._kept if client is None else client

    def _create_client(self, asynchronous: bool = False) -> Any:
        client = super()._create_client(asynchronous)
        client.set_response_callback("BRPOP", _short)
        return client

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, NotAMessage) as error:
            log.error("skipped an item in the queue that is not a message: %s", one_line(error))
            raise Empty from None


def _short(answer: Any, **_: Any) -> tuple[bytes, bytes] | None:
    """Return the queue and the item in an answer of BRPOP. Raises NotAMessage if the item is too long."""
    if answer and len(answer[1]) > MAX_ITEM:
        raise NotAMessage(f"it has more than {MAX_ITEM:,} bytes")
    return tuple(answer) if answer else None


class Transport(kombu.transport.redis.Transport):  # type: ignore[misc]
    """kombu's transport with our channel."""

    Channel = Channel


class Connection(broker.Connection):
    """A connection to any broker; for Redis it uses our transport instead of kombu's."""

    def get_transport_cls(self) -> Any:
        found = super().get_transport_cls()
        return Transport if found is kombu.transport.redis.Transport else found


class AMQP(celery.app.amqp.AMQP):  # type: ignore[misc]
    """Celery's component that creates connections, here with our `Connection`."""

    Connection = Connection
