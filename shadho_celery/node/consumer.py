"""Consumer: pause and resume a worker's messages, and reconnect when Celery's consumer hangs."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import celery.worker.consumer
from celery.worker import state

from shadho_celery.core.bounds import BROKER_CONNECT_SECONDS, BROKER_HEARTBEAT_SECONDS
from shadho_celery.core.checks import short
from shadho_celery.core.clock import Clock, SystemClock
from shadho_celery.transport.broker import depths_on, opened
from shadho_celery.transport.refused_messages import AreRefused, drop_refused

log = logging.getLogger(__name__)

#: seconds without a message after which a worker with a free slot checks its queues for messages
QUIET_SECONDS = 10.0

#: seconds before a message returns to its queue because all slots of the worker are taken
FULL_SECONDS = 1.0


class CarefulConsumer(celery.worker.consumer.Consumer):  # type: ignore[misc]
    """Celery's consumer that skips messages with unreadable headers, and takes no more messages than it has slots.

    Such a message would end the worker, return to its queue, and end the next worker. From RabbitMQ 4 on, each queue
    has its own prefetch limit. A worker could then get as many messages from each of its two queues as it has slots,
    and the last ones would wait although other workers are free.
    """

    def create_task_handler(self, *arguments: Any, **options: Any) -> Callable[[Any], object]:
        handle = super().create_task_handler(*arguments, **options)

        def give_back(message: Any) -> None:
            message.reject_log_error(log, self.connection_errors, requeue=True)

        def on_task_received(message: Any) -> None:
            if len(state.reserved_requests) >= self.pool.num_processes:
                # The pause keeps the message from circulating fast.
                self.timer.call_after(FULL_SECONDS, self.call_soon, (give_back, message))
                return
            try:
                handle(message)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                log.error("a message was refused: its headers cannot be read (%s)", short(error))
                message.reject_log_error(log, self.connection_errors)

        return on_task_received


class Consumer:
    """The queues that a worker consumes: that of its class, and that of its class on its machine.

    Its methods may be called from any thread. The consumer's own thread does the work.
    """

    def __init__(self, consumer: Any, queues: Sequence[str], clock: Clock | None = None) -> None:
        """`consumer` is Celery's, from its `worker_ready` signal."""
        self._consumer = consumer
        self._queues = queues
        self._clock = clock or SystemClock()
        #: reasons for taking no messages
        self._paused: set[str] = set()
        self._waited = False
        self._message_at = self._clock.now()

    def note_message(self) -> None:
        """Record that a message has arrived."""
        self._message_at = self._clock.now()
        self._waited = False

    def pause(self, reason: str = "breaker") -> None:
        """Take no more messages until `resume` is called for each reason."""
        if not self._paused:
            for queue in self._queues:
                self._consumer.call_soon(self._consumer.cancel_task_queue, queue)
        self._paused.add(reason)

    def resume(self, reason: str = "breaker") -> None:
        """Take messages again, unless there is another reason not to."""
        if self._paused == {reason}:
            self.note_message()
            for queue in self._queues:
                # This also declares the queue: a machine's queue may have expired during the pause.
                self._consumer.call_soon(self._consumer.add_task_queue, queue)
        self._paused.discard(reason)

    def reconnect_if_stuck(self, is_wanted: Callable[[], bool]) -> None:
        """Reconnect if messages wait in a queue and none arrives. Call this now and then while a slot is free.

        `is_wanted` tells whether any study may have sent messages. If a connection was cut during an acknowledgement,
        Celery may wait for it for ever, and count it against its prefetch limit.
        """
        if self._paused or self._clock.now() - self._message_at < QUIET_SECONDS or not is_wanted():
            return
        # Only at the second look in a row: at the first, another worker may be about to take the message.
        waiting = self._are_waiting()
        waits, before = bool(waiting), self._waited
        self.note_message()
        self._waited = waits and not before
        if waits and before:
            log.warning("messages wait in %s but none arrives; reconnecting to the broker", " and ".join(waiting))
            self._consumer.call_soon(_break)
            _cut(self._consumer)

    def drop_refused(self, are_refused: AreRefused) -> None:
        """Delete refused messages in bulk, and take none meanwhile: doing both at the same time halves the speed."""
        self.pause("bulk")
        try:
            connection = self._connection()
            with opened(connection):
                for queue in self._queues:
                    if dropped := drop_refused(connection, queue, are_refused):
                        log.warning("deleted %d messages in %s: they were for trials that have ended", dropped, queue)
        finally:
            self.resume("bulk")

    def _are_waiting(self) -> list[str]:
        """Return the queues in which messages wait; none if the broker does not answer."""
        try:
            connection = self._connection()
            with opened(connection):
                return [queue for queue, depth in depths_on(connection, self._queues).items() if depth]
        except Exception:
            # No broker or no permission: a new connection would not help.
            return []

    def _connection(self) -> Any:
        # Through its heartbeat, RabbitMQ notices that this machine is gone, and takes back messages that were only
        # examined.
        return self._consumer.app.connection_for_read(
            heartbeat=BROKER_HEARTBEAT_SECONDS, connect_timeout=BROKER_CONNECT_SECONDS
        )


def _break() -> None:
    """End the consumer's loop as if the connection was lost: Celery then starts a new one."""
    raise ConnectionResetError("the worker closed its connection")


def _cut(consumer: Any) -> None:
    """Shut down the consumer's socket to RabbitMQ, because its thread may hang in a read."""
    # The socket is not part of py-amqp's interface. Without it, the next heartbeat finds the connection dead.
    with suppress(Exception):
        consumer.connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)
