"""How messages come to a worker: its Celery consumer, which can be paused, and is started anew when it hangs."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shadho_celery.clock import Clock, SystemClock

log = logging.getLogger(__name__)

#: seconds without a message after which a worker with a free slot looks whether any wait for it
QUIET_SECONDS = 10.0


class Intake:
    """The one queue that a worker takes messages from.

    Its methods are called from any thread; what they do is done by the consumer's own.
    """

    def __init__(self, consumer: Any, queue: str, clock: Clock | None = None) -> None:
        """`consumer` is Celery's, as its `worker_ready` signal brings it."""
        self._consumer = consumer
        self._queue = queue
        self._clock = clock or SystemClock()
        self._paused = False
        self._waited = False
        self._heard_at = self._clock.now()

    def heard(self) -> None:
        """A message has come."""
        self._heard_at = self._clock.now()
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
            self.heard()
            self._consumer.call_soon(self._consumer.add_task_queue, self._queue)

    def check(self, is_wanted: Callable[[], bool]) -> None:
        """To be called now and then while a slot is free: connect anew where messages wait and none comes.

        `is_wanted` tells whether there should be any.

        A connection that was cut in the middle of an acknowledgement may leave Celery waiting for it for ever, with
        the slot's place in its prefetch count taken.
        """
        if self._paused or self._clock.now() - self._heard_at < QUIET_SECONDS or not is_wanted():
            return
        # Seen waiting twice: another worker's might be taken at this very moment.
        waits, before = self._depth() > 0, self._waited
        self.heard()
        self._waited = waits and not before
        if waits and before:
            log.warning("messages wait in %s and none comes; connecting to the broker anew", self._queue)
            self._consumer.call_soon(_break)
            _cut(self._consumer)

    def _depth(self) -> int:
        """Messages that wait in the queue, 0 where that cannot be told."""
        try:
            with self._consumer.app.connection_for_read(heartbeat=0) as connection:
                connection.ensure_connection(max_retries=1, timeout=3)
                return int(connection.default_channel.queue_declare(self._queue, passive=True).message_count)
        except Exception:
            # No such queue, no broker, no permission: all of them somebody else's matter.
            return 0


def _break() -> None:
    """End the consumer's loop as a lost connection does: Celery then begins again with a new one."""
    raise ConnectionResetError("the worker gave its connection up")


def _cut(consumer: Any) -> None:
    """End the connection to RabbitMQ under the consumer: its thread may hang in the middle of a read."""
    # Nobody promises that the socket is found there; where it is not, the next heartbeat must do.
    with suppress(Exception):
        consumer.connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)
