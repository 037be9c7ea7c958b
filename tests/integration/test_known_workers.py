"""After an outage or a loss of data the executor knows that it does not know the workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import MagicMock

import pytest
import redis
import services
from redis.backoff import NoBackoff
from redis.retry import Retry
from services.told import ToldExecutor

from shadho_celery.core.system import ManualClock
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.fleet.registry import Registry, Worker
from shadho_celery.session.session import MISSING_SECONDS


@dataclass
class Rig:
    """An executor with a clock of its own, and the announcement of one worker, on a Redis of this test's own."""

    server: services.RedisServer
    client: redis.Redis
    executor: QueueExecutor
    clock: ManualClock
    #: reasons for which Redis could not be used
    troubles: set[str]

    def turn(self, seconds: int, *, is_announced: bool = True) -> None:
        """Poll once a second; the worker announces itself, unless it cannot."""
        for _ in range(seconds):
            if is_announced:
                worker = Worker(protocol=PROTOCOL, compute_class="cpu", slots=1, imports=["m"])
                Registry(self.client, Worker).announce("w", worker)
            self.clock.sleep(1.0)
            self.executor.poll(0.0)
            if self.executor.trouble is not None:
                self.troubles.add(str(self.executor.trouble))

    def is_warned(self) -> bool:
        """Return whether missing workers are warned of."""
        return not self.executor.workers.announced and self.executor.known_for >= MISSING_SECONDS


@pytest.fixture
def rig(private_redis: services.RedisServer) -> Iterator[Rig]:
    client = redis.Redis.from_url(
        private_redis.url, decode_responses=True, socket_timeout=0.2, retry=Retry(NoBackoff(), 0)
    )
    clock = ManualClock()
    executor = ToldExecutor(client, MagicMock(refusal=None), "s", "m", clock=clock)
    rig = Rig(private_redis, client, executor, clock, set())
    rig.turn(15)
    assert rig.executor.workers.announced
    assert rig.executor.known_for > MISSING_SECONDS
    yield rig
    client.close()


def test_workers_that_do_not_come_again_after_flushall_are_missed_after_a_while_and_others_are_not(rig: Rig) -> None:
    for comes_again in (True, False):
        rig.client.flushall()
        rig.turn(5, is_announced=False)
        assert not rig.executor.workers.announced
        assert not rig.is_warned()
        rig.turn(10, is_announced=comes_again)
        assert bool(rig.executor.workers.announced) == comes_again
        assert rig.is_warned() != comes_again


def test_while_redis_is_full_that_is_said_and_no_worker_is_missed(rig: Rig) -> None:
    rig.client.config_set("maxmemory", "1mb")
    # Their announcements cannot be renewed, and run out.
    rig.turn(15, is_announced=False)
    rig.client.delete("shadho:worker:w")
    for _ in range(30):
        rig.turn(1, is_announced=False)
        assert not rig.is_warned()
    [trouble] = rig.troubles
    assert "maxmemory" in trouble
    assert "check its server, its memory" in trouble
    rig.client.config_set("maxmemory", "0")
    rig.turn(5, is_announced=False)
    assert not rig.executor.workers.announced
    assert not rig.is_warned()
    rig.turn(15)
    assert rig.executor.workers.announced
    assert rig.executor.known_for > MISSING_SECONDS


def test_while_redis_is_frozen_that_is_said_and_no_worker_is_missed(rig: Rig) -> None:
    assert rig.server.process is not None
    os.killpg(rig.server.process.pid, signal.SIGSTOP)
    try:
        rig.turn(15, is_announced=False)
        assert rig.executor.known_for == 0
    finally:
        os.killpg(rig.server.process.pid, signal.SIGCONT)
    assert any("Redis cannot be used at the moment" in trouble for trouble in rig.troubles)
    # As if it had stood still for longer than announcements last.
    rig.client.delete("shadho:worker:w")
    rig.turn(5, is_announced=False)
    assert not rig.executor.workers.announced
    assert not rig.is_warned()
