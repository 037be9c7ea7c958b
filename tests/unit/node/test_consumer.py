"""The messages of a worker are paused and resumed by the consumer's own thread, and started anew only when it hangs."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import amqp
import pytest
from celery.worker.consumer.consumer import CONNECTION_ERROR, CONNECTION_RETRY, CONNECTION_RETRY_STEP

from shadho_celery.core.system import ManualClock, Outage
from shadho_celery.node.consumer import QUIET_SECONDS, CarefulConsumer, Consumer


class CelerysConsumer:
    """As much of Celery's consumer as ours uses; what it is called for soon is done by `work`."""

    def __init__(self) -> None:
        self.soon: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.done: list[str] = []
        #: messages that wait, by queue
        self.depths: dict[str, int] = {}
        #: queues that there are not
        self.missing: set[str] = set()
        self.reachable = True
        self.app = SimpleNamespace(connection_for_read=self.connect)
        self.connection: Any = None

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        self.soon.append((function, arguments))

    def cancel_task_queue(self, queue: str) -> None:
        self.done.append(f"cancel {queue}")

    def add_task_queue(self, queue: str) -> None:
        self.done.append(f"add {queue}")

    def work(self) -> list[str]:
        for function, arguments in self.soon:
            function(*arguments)
        self.soon.clear()
        return self.done

    def connect(self, heartbeat: float, connect_timeout: float) -> Any:
        def ensure_connection(**_: object) -> None:
            if not self.reachable:
                raise OSError("no broker")

        def declare(queue: str, *, passive: bool) -> Any:
            if queue in self.missing:
                raise amqp.NotFound("no such queue")
            return SimpleNamespace(message_count=self.depths.get(queue, 0))

        return SimpleNamespace(
            ensure_connection=ensure_connection,
            channel=lambda: SimpleNamespace(queue_declare=declare),
            transport=SimpleNamespace(driver_type="amqp"),
            collect=lambda: None,
            release=lambda: None,
        )


@pytest.fixture
def theirs() -> CelerysConsumer:
    return CelerysConsumer()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def consumer(theirs: CelerysConsumer, clock: ManualClock) -> Consumer:
    return Consumer(theirs, ["cpu", "cpu,here"], clock)


def quiet(consumer: Consumer, clock: ManualClock, times: int = 1, *, is_wanted: bool = True) -> None:
    for _ in range(times):
        clock.sleep(QUIET_SECONDS)
        consumer.reconnect_if_stuck(lambda: is_wanted)


def test_it_is_paused_and_resumed_once_each(consumer: Consumer, theirs: CelerysConsumer) -> None:
    consumer.resume()
    for _ in range(2):
        consumer.pause()
    for _ in range(2):
        consumer.resume()
    assert not theirs.done, "not in the caller's thread"
    assert theirs.work() == ["cancel cpu", "cancel cpu,here", "add cpu", "add cpu,here"]


def test_of_two_reasons_to_pause_each_must_end(consumer: Consumer, theirs: CelerysConsumer) -> None:
    consumer.pause("drain")
    consumer.pause()
    consumer.resume("drain")
    consumer.resume("drain")
    assert theirs.work() == ["cancel cpu", "cancel cpu,here"]
    consumer.resume()
    assert theirs.work()[2:] == ["add cpu", "add cpu,here"]


@pytest.mark.parametrize("queue", ["cpu", "cpu,here"])
def test_messages_that_wait_while_none_comes_break_the_connection(
    consumer: Consumer, theirs: CelerysConsumer, clock: ManualClock, queue: str
) -> None:
    theirs.depths[queue] = 1
    theirs.missing = {"cpu", "cpu,here"} - {queue}
    quiet(consumer, clock)
    assert not theirs.soon, "another worker may be taking it"
    quiet(consumer, clock)
    with pytest.raises(ConnectionError):
        theirs.work()


def test_a_consumer_that_hangs_in_a_read_is_woken(
    consumer: Consumer, theirs: CelerysConsumer, clock: ManualClock
) -> None:
    """Its own thread would do nothing that it is called for: the socket under it ends."""
    one, other = socket.socketpair()
    with one, other:
        transport = SimpleNamespace(sock=one)
        theirs.connection = SimpleNamespace(connection=SimpleNamespace(transport=transport))
        theirs.depths["cpu"] = 1
        quiet(consumer, clock, 2)
        assert one.recv(1) == b""


def test_it_is_left_alone_while_messages_come(consumer: Consumer, theirs: CelerysConsumer, clock: ManualClock) -> None:
    theirs.depths["cpu"] = 1
    for _ in range(5):
        quiet(consumer, clock)
        consumer.note_message()
    assert not theirs.soon


@pytest.mark.parametrize("why", ["empty", "unreachable", "unwanted", "paused"])
def test_it_is_left_alone_where_nothing_is_to_come(
    consumer: Consumer, theirs: CelerysConsumer, clock: ManualClock, why: str
) -> None:
    theirs.depths["cpu"] = 0 if why == "empty" else 1
    theirs.reachable = why != "unreachable"
    if why == "paused":
        consumer.pause()
        theirs.soon.clear()
    quiet(consumer, clock, 5, is_wanted=why != "unwanted")
    assert not theirs.soon


def test_after_a_new_start_it_waits_as_long_again(
    consumer: Consumer, theirs: CelerysConsumer, clock: ManualClock
) -> None:
    theirs.depths["cpu"] = 1
    quiet(consumer, clock, 2)
    theirs.soon.clear()
    quiet(consumer, clock)
    assert not theirs.soon
    quiet(consumer, clock)
    assert len(theirs.soon) == 1


def test_of_celerys_lines_about_an_outage_of_the_broker_the_first_one_is_logged() -> None:
    """Celery's own templates: a new version with other words must not go unnoticed."""
    made = CarefulConsumer.__new__(CarefulConsumer)
    made._outage = Outage("the broker", over_seconds=0.0)

    def is_logged(text: str, *arguments: object) -> bool:
        return made._is_news(logging.LogRecord("celery", logging.ERROR, "", 0, text, arguments, None))

    lost = "%s (%r)", CONNECTION_RETRY, OSError("gone")
    tries = (CONNECTION_ERROR, "amqp://", OSError(111), CONNECTION_RETRY_STEP)
    assert [is_logged(*lost), is_logged(*tries), is_logged(*tries), is_logged("%s tasks", 3)] == [1, 0, 0, 1]
    assert str(made._outage.see(None, time.monotonic())).startswith("the broker answers again, after ")
    assert is_logged(*tries), "another outage"
