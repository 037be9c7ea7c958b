"""Broker and Redis fail in the middle of a study: it goes on, and its count stays exact.

Two fleets at once, so that each fault meets both: one on Redis alone, one on RabbitMQ with the same Redis. All of their
connections go through proxies.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import services
from acceptance.commands import until
from integration import fleets
from integration.fleets import Fleet, on_each
from services.proxy import Proxy

from shadho_celery.core.payload import Payload
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.broker import Publisher

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

TRIALS = 16


@dataclass(frozen=True)
class Ground:
    """The servers, the ways to them, and the fleets with two workers each."""

    redis: services.RedisServer
    rabbitmq: services.RabbitServer
    to_redis: Proxy
    #: of the fleet on RabbitMQ
    to_its_redis: Proxy
    to_rabbitmq: Proxy
    on_redis: Fleet
    on_rabbitmq: Fleet

    @property
    def fleets(self) -> list[Fleet]:
        return [self.on_redis, self.on_rabbitmq]

    def redis_does(self, *words: str) -> Any:
        with redis.Redis.from_url(self.redis.url, decode_responses=True) as client:
            return client.execute_command(*words)

    def await_more_runs(self, count: int) -> None:
        """Wait until so many more runs have begun on each fleet."""
        enough = [len(fleet.desk.runs()) + count for fleet in self.fleets]
        for fleet, runs in zip(self.fleets, enough, strict=True):
            fleet.desk.await_runs(runs, seconds=60)

    @contextmanager
    def study(self, name: str) -> Iterator[None]:
        """Run a study on each fleet; the block is what happens in its middle. All trials must end well, none blamed."""
        before = {fleet: len(fleet.desk.runs()) for fleet in self.fleets}
        # Little patience with messages that nobody claims: some faults lose them.
        commands = [fleet.launch("my_study", TRIALS, name=name, unclaimed_seconds=5.0) for fleet in self.fleets]
        self.await_more_runs(4)
        yield
        healed = time.monotonic()
        for fleet, command in zip(self.fleets, commands, strict=True):
            found = fleet.ended_well(command, name, TRIALS, 90)
            assert {trial["lost"] for trial in found} == {0}, "no trial is to blame"
            again = len(fleet.desk.runs()) - before[fleet] - TRIALS
            print(f"{fleet.compute_class}: {time.monotonic() - healed:.0f} s after the fault, {again} runs again")
        self.await_both_workers(name)

    def await_both_workers(self, name: str) -> None:
        """Both workers of each fleet take trials again; the study may have ended before the second one came back."""
        deadline = time.monotonic() + 60 * services.PATIENCE
        for fleet in self.fleets:
            while len({pid for *_, pid in fleet.desk.runs()[-(TRIALS // 2) :]}) < 2:
                assert time.monotonic() < deadline, f"one worker takes no trials: {fleet.desk.said()}"
                name += "-again"
                fleet.ended_well(fleet.launch("my_study", TRIALS // 2, name=name), name, TRIALS // 2, 90)


def start_workers(fleet: Fleet) -> None:
    fleet.desk.study(seconds=0.7)
    fleet.desk.study("held", body="while not os.path.exists('go'): time.sleep(0.05)")
    fleet.workers(2)


@pytest.fixture(scope="module")
def ground(rabbitmq_node: services.RabbitServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ExitStack() as stack:
        redis_server = stack.enter_context(services.private(services.RedisServer))
        ports = (redis_server.port, redis_server.port, rabbitmq_node.port)
        to_redis, to_its_redis, to_rabbitmq = (stack.enter_context(Proxy(port)) for port in ports)
        folder = tmp_path_factory.mktemp("fleets")
        near, far = f"redis://127.0.0.1:{to_redis.port}/0", f"redis://127.0.0.1:{to_its_redis.port}/1"
        amqp = f"amqp://guest:guest@127.0.0.1:{to_rabbitmq.port}//"
        imports = {"SHADHO_IMPORTS": "my_study,held"}
        on_redis = stack.enter_context(fleets.fleet(folder / "redis", near, near, "on-redis", **imports))
        on_rabbitmq = stack.enter_context(fleets.fleet(folder / "rabbitmq", amqp, far, "on-rabbitmq", **imports))
        on_each(start_workers, on_redis, on_rabbitmq)
        yield Ground(redis_server, rabbitmq_node, to_redis, to_its_redis, to_rabbitmq, on_redis, on_rabbitmq)


def test_redis_is_killed_and_comes_back(ground: Ground) -> None:
    with ground.study("killed"):
        ground.redis.restart()


def test_redis_is_flushed_and_then_comes_back_empty_from_a_restart(ground: Ground) -> None:
    with ground.study("emptied"):
        ground.redis_does("FLUSHALL")
        ground.await_more_runs(4)
        ground.redis.restart_empty()


@contextmanager
def alarm(rabbitmq: services.RabbitServer) -> Iterator[None]:
    """RabbitMQ takes no messages."""
    rabbitmq.ctl("set_vm_memory_high_watermark", "0.0000001")
    try:
        yield
    finally:
        rabbitmq.ctl("set_vm_memory_high_watermark", "0.6")


def test_redis_has_no_memory_left_for_a_while_and_rabbitmq_has_an_alarm(ground: Ground) -> None:
    with ground.study("full"), alarm(ground.rabbitmq):
        ground.redis_does("CONFIG", "SET", "maxmemory", "1")
        time.sleep(6)
        ground.redis_does("CONFIG", "SET", "maxmemory", "0")


def test_a_run_warns_of_an_alarm_until_it_is_over(ground: Ground) -> None:
    fleet = ground.on_rabbitmq
    with alarm(ground.rabbitmq):
        command = fleet.launch("held", 1)
        command.says("trials cannot be sent: the broker at amqp://", 20)
    command.says("the broker answers again")
    fleet.desk.write("go", "")
    fleet.ended_well(command, "held", 1, 60)


def test_a_publisher_knows_of_an_alarm_and_of_its_end_whenever_it_looks(
    ground: Ground, unique: Callable[[str], str]
) -> None:
    """Also while it sends nothing, and of one that was there before it."""
    rabbitmq, message = ground.rabbitmq, (unique("cpu"), Payload(study="k", module="m", attempts=[]))
    with alarm(rabbitmq):
        publisher = Publisher(rabbitmq.url)
        until(lambda: publisher.look() or publisher.refusal, 10)
        for _ in range(2):
            with pytest.raises(ServiceError, match=r"trials cannot be sent: the broker at \S+ takes no messages"):
                publisher.publish([message])
    until(lambda: publisher.look() or not publisher.refusal, 10)
    publisher.publish([message])
    with alarm(rabbitmq):
        until(lambda: publisher.look() or publisher.refusal, 10)
        rabbitmq.ctl("close_all_connections", "a test")
        until(lambda: publisher.look() or not publisher.refusal, 10)
    publisher.publish([message])
    # The next looks find the lost connection, and the alarm on a new one, even while nothing is sent.
    rabbitmq.ctl("close_all_connections", "a test")
    with alarm(rabbitmq):
        until(lambda: publisher.look() or publisher.refusal, 20)
    until(lambda: publisher.look() or not publisher.refusal, 10)
    publisher.close()


def test_redis_denies_its_user_all_commands_for_a_while(ground: Ground) -> None:
    """Trials end meanwhile: their results are kept, and sent once it takes them again."""
    ground.redis_does("ACL", "SETUSER", "owner", "on", "nopass", "~*", "&*", "+@all")
    owner = ground.redis.url.replace("//", "//owner:any@")
    with ground.study("denied"), redis.Redis.from_url(owner) as client:
        client.execute_command("ACL", "SETUSER", "default", "-@all", "+@connection")
        time.sleep(6)
        client.execute_command("ACL", "SETUSER", "default", "+@all")


def test_all_connections_are_cut_three_times(ground: Ground) -> None:
    """By the servers, and by the network in the middle of what is said."""
    with ground.study("cut"):
        ground.redis_does("CLIENT", "KILL", "TYPE", "normal")
        ground.redis_does("CLIENT", "KILL", "TYPE", "pubsub")
        ground.rabbitmq.ctl("close_all_connections", "a test")
        for _ in range(2):
            time.sleep(1.3)
            for proxy in (ground.to_redis, ground.to_its_redis, ground.to_rabbitmq):
                proxy.reset()


def test_rabbitmq_is_killed_and_comes_back_and_a_firewall_forgets_the_connections_to_redis(ground: Ground) -> None:
    """On the fleet on Redis alone, trials end meanwhile: what is half open may be an acknowledgement."""
    with ground.study("broker"):
        ground.to_redis.blackhole()
        ground.rabbitmq.restart()
        ground.to_redis.heal(half_open=True)


@pytest.mark.timeout(240)
def test_nothing_answers_for_a_minute(ground: Ground) -> None:
    """Redis stands still, the way to RabbitMQ swallows everything; then both go on as if nothing had been.

    The fleet on RabbitMQ has lost its way to Redis, too, with all that was said on it, so that its leases ran out.
    """
    with ground.study("frozen"), stopped(ground.redis):
        ground.to_rabbitmq.blackhole()
        ground.to_its_redis.blackhole()
        time.sleep(60)
        ground.to_rabbitmq.heal()
        ground.to_its_redis.heal(half_open=True)


@contextmanager
def stopped(server: services.Server) -> Iterator[None]:
    """The server's processes get no time."""
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
