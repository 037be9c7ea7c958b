"""Consumer: how messages come to a worker, can be paused, and come again when Celery's consumer hangs."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shadho_celery.core.clock import Clock, SystemClock

log = logging.getLogger(__name__)

#: seconds without a message after which a worker with a free slot looks whether any wait for it
QUIET_SECONDS = 10.0


class Consumer:
    """The one queue that a worker consumes.

    Its methods are called from any thread; what they do is done by the consumer's own.
    """

    def __init__(self, consumer: Any, queue: str, clock: Clock | None = None) -> None:
        """`consumer` is Celery's, as its `worker_ready` signal brings it."""
        self._consumer = consumer
        self._queue = queue
        self._clock = clock or SystemClock()
        self._paused = False
        self._waited = False
        self._message_at = self._clock.now()

    def note_message(self) -> None:
        """Take note of a message that has come."""
        self._message_at = self._clock.now()
        self._waited = False

    def pause(self) -> None:
        """Take nothing more from the queue."""
        if not self._paused:
            self._paused = True
            self._consumer.call_soon(self._consumer.cancel_task_queue, self._queue)

    def resume(self) -> None:
        """Take messages again."""
        if self._paused:
            self._paused = False
            self.note_message()
            self._consumer.call_soon(self._consumer.add_task_queue, self._queue)

    def reconnect_if_stuck(self, is_wanted: Callable[[], bool]) -> None:
        """Connect anew where messages wait and none comes; to be called now and then while a slot is free.

        `is_wanted` tells whether there should be any.

        A connection that was cut in the middle of an acknowledgement may leave Celery waiting for it for ever, with
        the slot's place in its prefetch count taken.
        """
        if self._paused or self._clock.now() - self._message_at < QUIET_SECONDS or not is_wanted():
            return
        # Seen waiting twice: another worker's might be taken at this very moment.
        waits, before = self._depth() > 0, self._waited
        self.note_message()
        self._waited = waits and not before
        if waits and before:
            log.warning("messages wait in %s and none comes; connecting to the broker anew", self._queue)
            self._consumer.call_soon(_break)
            _cut(self._consumer)

    def _depth(self) -> int:
        """Return the messages that wait in the queue, 0 where that cannot be told."""
        try:
            with self._consumer.app.connection_for_read(heartbeat=0) as connection:
                connection.ensure_connection(max_retries=1, timeout=3)
                return int(connection.default_channel.queue_declare(self._queue, passive=True).message_count)
        except Exception:
            # No such queue, no broker, no permission: none of them is cured by connecting anew.
            return 0


def _break() -> None:
    """End the consumer's loop as a lost connection does: Celery then begins again with a new one."""
    raise ConnectionResetError("the worker gave its connection up")


def _cut(consumer: Any) -> None:
    """End the connection to RabbitMQ under the consumer: its thread may hang in the middle of a read."""
    # An attribute of py-amqp, not of its interface: where the socket is not there, the next heartbeat must do.
    with suppress(Exception):
        consumer.connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)
