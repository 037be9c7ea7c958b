"""Redis as the broker: a worker passes over items that are no messages, and a channel has one client.

kombu takes one item after another from a queue's list, and puts each into a hash until it is acknowledged. An item
that it cannot read ends the worker, one item each. Here it is named in the log, and the worker lives on.
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
from shadho_celery.transport import broker

log = logging.getLogger(__name__)


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
    """A channel that outlives items of its queues that are no messages, and keeps its client."""

    Message = Message
    _kept: Any = None

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        # kombu makes a client for each message that it sends, takes or acknowledges: as much work as the call itself.
        if client is None and (self._kept is None or self._kept.connection_pool is not self.pool):
            self._kept = self._create_client()
        yield self._kept if client is None else client

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
