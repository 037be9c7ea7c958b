"""Consumer: pauses a worker's messages, refuses unreadable ones, and reconnects if Celery's consumer hangs."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import celery.app.amqp
import celery.worker.consumer
from celery.worker import state

from shadho_celery.core.checks import short
from shadho_celery.core.system import BROKER_CONNECT_SECONDS, BROKER_HEARTBEAT_SECONDS, Clock, Outage, SystemClock
from shadho_celery.fleet.broker import Connection, depths_on, opened
from shadho_celery.node.logs import tell

log = logging.getLogger(__name__)

#: seconds without a message after which a worker with a free slot checks its queues for messages
QUIET_SECONDS = 10.0

#: beginnings of the lines that Celery logs at each try to reach the broker
_OUTAGE = ("consumer: Cannot connect", "consumer: Connection to broker lost")

#: seconds before a message returns to its queue because all slots of the worker are taken
FULL_SECONDS = 1.0


class AMQP(celery.app.amqp.AMQP):  # type: ignore[misc]
    """Celery's component that creates connections, here with our `Connection`."""

    Connection = Connection


class CarefulConsumer(celery.worker.consumer.Consumer):  # type: ignore[misc]
    """Celery's consumer, changed to skip messages with unreadable headers and to take no more messages than there are
    slots.

    Without this, a message with unreadable headers would end the worker, return to its queue, and end the next worker.
    Since RabbitMQ 4, each queue has its own prefetch limit, so a worker could get as many messages from each of its two
    queues as it has slots. Half of them would wait although other workers may be free.
    """

    #: number of slots that are taken in addition to one per message, by trials that take several
    held = 0
    #: number of free slots that take no trial, because GPU memory is short
    closed = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._outage = Outage("the broker", over_seconds=0.0)
        logging.getLogger(celery.worker.consumer.consumer.__name__).addFilter(self._is_news)

    def connect(self) -> Any:
        connection = super().connect()
        if (line := self._outage.see(None, time.monotonic())) is not None:
            tell(line)
        return connection

    def _is_news(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record of Celery. Of the records about an outage of the broker, only the first is
        logged.
        """
        text = record.getMessage()
        return not text.startswith(_OUTAGE) or self._outage.see(text, time.monotonic()) is not None

    def create_task_handler(self, *arguments: Any, **options: Any) -> Callable[[Any], object]:
        handle = super().create_task_handler(*arguments, **options)

        def give_back(message: Any) -> None:
            message.reject_log_error(log, self.connection_errors, requeue=True)

        def on_task_received(message: Any) -> None:
            if len(state.reserved_requests) + self.held + self.closed >= self.pool.num_processes:
                # Wait first: otherwise the message would circulate between queue and workers without a pause.
                self.timer.call_after(FULL_SECONDS, self.call_soon, (give_back, message))
                return
            try:
                handle(message)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                log.error("a message was refused: its headers cannot be read (%s)", short(error))
                message.reject_log_error(log, self.connection_errors)

        return on_task_received

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        log.error("a message was refused unread: %s", short(exc))
        message.ack_log_error(log, self.connection_errors)


class Consumer:
    """Pauses, resumes and reconnects a worker's consumption of its two queues: the queue of its class, and the queue of
    its class for this machine.

    Any thread may call the methods. Calls of Celery's consumer run in the consumer's own thread.
    """

    def __init__(self, consumer: Any, queues: Sequence[str], clock: Clock | None = None) -> None:
        """`consumer` is Celery's consumer, as its signal `worker_ready` passes it."""
        self._consumer = consumer
        self._queues = queues
        self._clock = clock or SystemClock()
        #: reasons for the current pause; if empty, messages are taken
        self._paused: set[str] = set()
        self._waited = False
        self._lock = threading.Lock()
        self._message_at = self._clock.now()

    def note_message(self) -> None:
        """Record that a message has arrived."""
        self._message_at = self._clock.now()
        self._waited = False

    @contextmanager
    def holding(self, slots: int) -> Iterator[None]:
        """Take `slots` fewer messages within a `with` block, because one message needs that many additional slots."""
        with self._lock:
            self._consumer.held += slots
        try:
            yield
        finally:
            with self._lock:
                self._consumer.held -= slots

    def close_slots(self, number: int) -> None:
        """Take `number` fewer messages than there are slots from now on; replaces the number of the last call."""
        self._consumer.closed = number

    def pause(self, reason: str = "breaker") -> None:
        """Take no more messages until `resume` is called for each reason."""
        if not self._paused:
            for queue in self._queues:
                self._consumer.call_soon(self._consumer.cancel_task_queue, queue)
        self._paused.add(reason)

    def resume(self, reason: str = "breaker") -> None:
        """Remove a reason for the pause. Take messages again if it was the only reason."""
        if self._paused == {reason}:
            self.note_message()
            for queue in self._queues:
                # This also declares the queue: a machine's queue may have expired during the pause.
                self._consumer.call_soon(self._consumer.add_task_queue, queue)
        self._paused.discard(reason)

    def reconnect_if_stuck(self, is_wanted: Callable[[], bool]) -> None:
        """Reconnect if messages wait in a queue but do not arrive. Call this regularly while a slot is free.

        `is_wanted` returns whether any study may have sent messages. If the connection was cut during an
        acknowledgement, Celery may wait for ever, or count the message against its prefetch limit for ever.
        """
        if self._paused or self._clock.now() - self._message_at < QUIET_SECONDS or not is_wanted():
            return
        # Reconnect only if messages wait at two checks in a row, because another worker may take them after the first.
        waiting = self._are_waiting()
        waits, before = bool(waiting), self._waited
        self.note_message()
        self._waited = waits and not before
        if waits and before:
            log.warning("messages wait in %s but none arrives; reconnecting to the broker", " and ".join(waiting))
            self._consumer.call_soon(_break)
            # The consumer's thread may hang while it reads, so shut the socket down. The socket is not part of
            # py-amqp's public interface; if this fails, the next heartbeat notices that the connection is dead.
            with suppress(Exception):
                self._consumer.connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)

    def _are_waiting(self) -> list[str]:
        """Return the queues in which messages wait. If the broker does not answer, return an empty list."""
        try:
            with opened(connection := self._connection()):
                return [queue for queue, depth in depths_on(connection, self._queues).items() if depth]
        except Exception:
            # If the broker is unavailable or refuses access, a new connection would not help.
            return []

    def _connection(self) -> Any:
        # With heartbeats, RabbitMQ notices if this machine fails during the check, and closes the connection.
        return self._consumer.app.connection_for_read(
            heartbeat=BROKER_HEARTBEAT_SECONDS, connect_timeout=BROKER_CONNECT_SECONDS
        )


def _break() -> None:
    """End the consumer's loop as if the connection were lost, so that Celery opens a new one."""
    raise ConnectionResetError("the worker closed its connection")
