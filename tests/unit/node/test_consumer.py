"""A worker's intake is paused and resumed by the consumer's own thread, and started anew only when it hangs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from shadho_celery.core.clock import ManualClock
from shadho_celery.node.consumer import QUIET_SECONDS, Intake


class Consumer:
    """As much of Celery's consumer as an intake uses; what it is called for soon is done by `work`."""

    def __init__(self) -> None:
        self.soon: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.done: list[str] = []
        self.depth = 0
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

    @contextmanager
    def connect(self, heartbeat: float) -> Iterator[Any]:
        if not self.reachable:
            raise OSError("no broker")
        channel = SimpleNamespace(queue_declare=lambda name, passive: SimpleNamespace(message_count=self.depth))
        yield SimpleNamespace(ensure_connection=lambda **_: None, default_channel=channel)


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def intake(consumer: Consumer, clock: ManualClock) -> Intake:
    return Intake(consumer, "cpu", clock)


def quiet(intake: Intake, clock: ManualClock, times: int = 1, *, is_wanted: bool = True) -> None:
    for _ in range(times):
        clock.sleep(QUIET_SECONDS)
        intake.check(lambda: is_wanted)


def test_it_is_paused_and_resumed_once_each(intake: Intake, consumer: Consumer) -> None:
    intake.resume()
    for _ in range(2):
        intake.pause()
    for _ in range(2):
        intake.resume()
    assert not consumer.done, "not in the caller's thread"
    assert consumer.work() == ["cancel cpu", "add cpu"]


def test_messages_that_wait_while_none_comes_break_the_connection(
    intake: Intake, consumer: Consumer, clock: ManualClock
) -> None:
    consumer.depth = 1
    quiet(intake, clock)
    assert not consumer.soon, "another worker may be taking it"
    quiet(intake, clock)
    with pytest.raises(ConnectionError):
        consumer.work()


def test_a_consumer_that_hangs_in_a_read_is_woken(intake: Intake, consumer: Consumer, clock: ManualClock) -> None:
    """Its own thread would do nothing that it is called for: the socket under it ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = SimpleNamespace(sock=ours)
        consumer.connection = SimpleNamespace(connection=SimpleNamespace(transport=transport))
        consumer.depth = 1
        quiet(intake, clock, 2)
        assert ours.recv(1) == b""


def test_it_is_left_alone_while_messages_come(intake: Intake, consumer: Consumer, clock: ManualClock) -> None:
    consumer.depth = 1
    for _ in range(5):
        quiet(intake, clock)
        intake.heard()
    assert not consumer.soon


@pytest.mark.parametrize("why", ["empty", "unreachable", "unwanted", "paused"])
def test_it_is_left_alone_where_nothing_is_to_come(
    intake: Intake, consumer: Consumer, clock: ManualClock, why: str
) -> None:
    consumer.depth = 0 if why == "empty" else 1
    consumer.reachable = why != "unreachable"
    if why == "paused":
        intake.pause()
        consumer.soon.clear()
    quiet(intake, clock, 5, is_wanted=why != "unwanted")
    assert not consumer.soon


def test_after_a_new_start_it_waits_as_long_again(intake: Intake, consumer: Consumer, clock: ManualClock) -> None:
    consumer.depth = 1
    quiet(intake, clock, 2)
    consumer.soon.clear()
    quiet(intake, clock)
    assert not consumer.soon
    quiet(intake, clock)
    assert len(consumer.soon) == 1
