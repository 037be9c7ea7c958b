"""Consumer: pause and resume a worker's messages, and reconnect when Celery's consumer hangs."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import celery.worker.consumer
from celery.worker import state

from shadho_celery.core.checks import short
from shadho_celery.core.system import BROKER_CONNECT_SECONDS, BROKER_HEARTBEAT_SECONDS, Clock, Outage, SystemClock
from shadho_celery.fleet.broker import depths_on, opened
from shadho_celery.node.logs import tell

log = logging.getLogger(__name__)

#: seconds without a message after which a worker with a free slot checks its queues for messages
QUIET_SECONDS = 10.0

#: beginnings of the lines that Celery logs at each try to reach the broker
_OUTAGE = ("consumer: Cannot connect", "consumer: Connection to broker lost")

#: seconds before a message returns to its queue because all slots of the worker are taken
FULL_SECONDS = 1.0


class CarefulConsumer(celery.worker.consumer.Consumer):  # type: ignore[misc]
    """Celery's consumer that skips messages with unreadable headers, and takes no more messages than it has slots.

    A message with unreadable headers would end the worker, return to its queue, and end the next worker. From RabbitMQ
    4 on, each queue has its own prefetch limit. A worker could then get as many messages from each of its two queues as
    it has slots, and the last messages would wait although other workers are free.
    """

    #: number of slots that trials of several slots take, in addition to one for each message
    held = 0
    #: number of slots that are closed, because their trials would not fit beside the running ones
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
        """Return whether a record of Celery is to be logged: of those about an outage of the broker, the first one."""
        text = record.getMessage()
        return not text.startswith(_OUTAGE) or self._outage.see(text, time.monotonic()) is not None

    def create_task_handler(self, *arguments: Any, **options: Any) -> Callable[[Any], object]:
        handle = super().create_task_handler(*arguments, **options)

        def give_back(message: Any) -> None:
            message.reject_log_error(log, self.connection_errors, requeue=True)

        def on_task_received(message: Any) -> None:
            if len(state.reserved_requests) + self.held + self.closed >= self.pool.num_processes:
                # Without the pause, the message would circulate fast.
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
    """The queues that a worker consumes: that of its class, and that of its class on its machine.

    Its methods may be called from any thread. They hand the work to the thread of Celery's consumer.
    """

    def __init__(self, consumer: Any, queues: Sequence[str], clock: Clock | None = None) -> None:
        """`consumer` is Celery's, from its `worker_ready` signal."""
        self._consumer = consumer
        self._queues = queues
        self._clock = clock or SystemClock()
        #: reasons for which messages are paused; they are taken while there are none
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
        """Take fewer messages by this number within a `with` block, because a message needs so many further slots."""
        with self._lock:
            self._consumer.held += slots
        try:
            yield
        finally:
            with self._lock:
                self._consumer.held -= slots

    def close_slots(self, number: int) -> None:
        """Take fewer messages by this number from now on."""
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
        """Reconnect if messages wait in a queue but do not arrive. Call this now and then while a slot is free.

        `is_wanted` returns whether any study may have sent messages. If the connection was cut during an
        acknowledgement, Celery may wait for ever, or count the message against its prefetch limit for ever.
        """
        if self._paused or self._clock.now() - self._message_at < QUIET_SECONDS or not is_wanted():
            return
        # Reconnect only if messages wait at two checks in a row: after the first, another worker may still take them.
        waiting = self._are_waiting()
        waits, before = bool(waiting), self._waited
        self.note_message()
        self._waited = waits and not before
        if waits and before:
            log.warning("messages wait in %s but none arrives; reconnecting to the broker", " and ".join(waiting))
            self._consumer.call_soon(_break)
            # Its thread may hang in a read. The socket is not part of py-amqp's public interface. If this fails, the
            # next heartbeat finds the connection dead.
            with suppress(Exception):
                self._consumer.connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)

    def _are_waiting(self) -> list[str]:
        """Return the queues in which messages wait. If the broker does not answer, return an empty list."""
        try:
            with opened(connection := self._connection()):
                return [queue for queue, depth in depths_on(connection, self._queues).items() if depth]
        except Exception:
            # Without a broker or a permission, a new connection would not help.
            return []

    def _connection(self) -> Any:
        # By the missing heartbeat, RabbitMQ notices that this machine has failed, and puts back the messages that were
        # only examined.
        return self._consumer.app.connection_for_read(
            heartbeat=BROKER_HEARTBEAT_SECONDS, connect_timeout=BROKER_CONNECT_SECONDS
        )


def _break() -> None:
    """End the consumer's loop as if the connection was lost: Celery then starts a new one."""
    raise ConnectionResetError("the worker closed its connection")
