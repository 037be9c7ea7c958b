"""Measure what the two servers of a fleet need: ``python tests/benchmarks/sizing.py [--workers 100 --workers 1000]``.

Private servers with the settings of deploy/ are started for it. A real worker and a real study say how many connections
each of them opens. The workers of the table are played: each has as many connections as the real one, a consumer at
RabbitMQ for the queue of its class and for that of its machine, and four slots, whose trials it claims, renews and
reports with the package's own code, as often as a worker does. Messages that wait in the queues are real ones, too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import resource
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kombu
from figures import ROOT, finish, make_parser, show
from workers import await_workers, python

from shadho_celery.core.hardware import Machine
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Report, Started
from shadho_celery.fleet.broker import PROTOCOL, Publisher, machine_queue, queue
from shadho_celery.fleet.channel import WorkerChannel
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, StudyWants, Worker
from shadho_celery.fleet.signing import Signer
from shadho_celery.node.heartbeat import ANNOUNCE_EVERY, BEAT_SECONDS

CLASS = "cpu"
STUDY = "5" * 16
SLOTS = 4
#: messages that wait for each slot: a scheduler keeps queues shallow
WAITING = 2
#: reports of each trial in Redis that no scheduler has read yet
REPORTS = 3

#: what RabbitMQ is asked, in Erlang
BROKER = """
Q = [M || [{messages, M}] <- rabbit_amqqueue:info_all(<<"/">>, [messages])],
{length(rabbit_networking:connections()), length(Q), lists:sum(Q), list_to_integer(os:getpid())}.
"""

#: a study whose trials only take time
OBJECTIVE = """
import time
from hyperopt import hp

SPACE = hp.uniform("x", 0, 1)
STUDY = {"sampler": "random", "classes": ["cpu"]}

def objective(x):
    time.sleep(1.0)
    return x
"""


class Servers:
    """A private Redis and a private RabbitMQ, and what they use."""

    def __init__(self, redis: Any, rabbit: Any) -> None:
        self._redis, self._rabbit = redis, rabbit
        self.urls = {"CELERY_BROKER_URL": rabbit.url, "SHADHO_REDIS_URL": redis.url}
        self.client = connect(redis.url)

    def redis_connections(self) -> int:
        """Return the number of connections to Redis, except those that ask."""
        return int(self.client.info("clients")["connected_clients"]) - 1

    def broker_connections(self) -> int:
        """Return the number of connections to RabbitMQ."""
        return self._broker()[0]

    def figures(self) -> dict[str, float]:
        """Return what both use now."""
        before = self.client.info("stats")["total_commands_processed"]
        time.sleep(BEAT_SECONDS)
        commands = self.client.info("stats")["total_commands_processed"] - before
        connections, queues, messages, broker = self._broker()
        return {
            "Redis connections": self.redis_connections(),
            "Redis descriptors": descriptors(self._redis.process.pid),
            "Redis MB": self.client.info("memory")["used_memory"] / 1e6,
            "Redis commands/s": commands / BEAT_SECONDS,
            "RabbitMQ connections": connections,
            "RabbitMQ descriptors": descriptors(broker),
            "RabbitMQ MB": resident(broker) / 1e6,
            "queues": queues,
            "waiting messages": messages,
        }

    def _broker(self) -> list[int]:
        """Return RabbitMQ's connections, queues, messages in them, and its process; rabbitmqctl takes a second."""
        return [int(number) for number in re.findall(r"\d+", self._rabbit.ctl("eval", BROKER))]


def descriptors(pid: int) -> int:
    """Return the number of open files of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def resident(pid: int) -> int:
    """Return the bytes of a process in memory."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


def real(servers: Servers, place: Path, seconds: float) -> dict[str, int]:
    """Return the connections of one real worker, and those of one real study."""
    (place / "sized.py").write_text(OBJECTIVE)
    before = servers.redis_connections(), servers.broker_connections()
    worker = ["-m", "shadho_celery", "worker", "--class", CLASS, "--slots", str(SLOTS), "--import", "sized"]
    with python(place, {**servers.urls, "CUDA_VISIBLE_DEVICES": ""}, *worker):
        await_workers(servers.urls["SHADHO_REDIS_URL"], [CLASS])
        study = ["-m", "shadho_celery", "run", "sized", "--trials", "1000", "--quiet"]
        with python(place, servers.urls, *study):
            deadline, registry = time.monotonic() + 60, Registry(servers.client, StudyWants)
            while not registry.living() and time.monotonic() < deadline:
                time.sleep(0.2)
            time.sleep(seconds)
            both = servers.redis_connections(), servers.broker_connections()
        time.sleep(2)
        alone = servers.redis_connections(), servers.broker_connections()
    return {
        "worker, Redis": alone[0] - before[0],
        "worker, RabbitMQ": alone[1] - before[1],
        "study, Redis": both[0] - alone[0],
        "study, RabbitMQ": both[1] - alone[1],
    }


class Played:
    """A worker of a machine of its own: its connections, its announcement, its trials."""

    def __init__(self, servers: Servers, number: int, connections: Mapping[str, int], signer: Signer) -> None:
        host = f"node-{number}.example"
        self.name = f"{CLASS}@{host}.1.0000"
        self._client = connect(servers.urls["SHADHO_REDIS_URL"])
        pool = self._client.connection_pool
        for connection in [pool.get_connection() for _ in range(connections["worker, Redis"])]:
            pool.release(connection)
        self._registry = Registry(self._client, Worker, signer)
        self._channel = WorkerChannel(self._client, worker=self.name, signer=signer)
        machine = Machine(host=host, cores=SLOTS, memory=2**34)
        self._announcement = Worker(
            protocol=PROTOCOL, compute_class=CLASS, slots=SLOTS, imports=["sized"], machine=machine
        )
        self.attempts = [(SLOTS * number + slot, 1) for slot in range(SLOTS)]
        opened = range(connections["worker, RabbitMQ"])
        self._connections = [kombu.Connection(servers.urls["CELERY_BROKER_URL"], heartbeat=0) for _ in opened]
        channel, *_ = [connection.default_channel for connection in self._connections]
        # As a worker with this number of slots, it has taken as many messages.
        channel.basic_qos(0, SLOTS, False)
        queues = [queue(name)(channel) for name in (CLASS, machine_queue(CLASS, host))]
        self._consumer = kombu.Consumer(channel, queues, accept=["json"], on_message=lambda _: None)
        self._consumer.consume()

    def begin(self) -> None:
        """Claim a trial for each slot and report from it."""
        self.announce()
        now = time.time()
        claims = [
            Started(number=number, attempt=attempt, host=self.name, at=now, worker=self.name)
            for number, attempt in self.attempts
        ]
        self._channel.exchange(STUDY, [], claims, self.name)
        for number, attempt in self.attempts:
            for step in range(REPORTS):
                self._channel.report(STUDY, Report(number=number, attempt=attempt, step=step, loss=1.0, at=now))

    def announce(self) -> None:
        """Send a heartbeat."""
        self._registry.announce(self.name, self._announcement)

    def renew(self) -> None:
        """Renew the leases."""
        self._channel.renew(STUDY, self.attempts)

    def close(self) -> None:
        """End its connections."""
        for connection in self._connections:
            # Without a word: its messages would be read first.
            connection.collect(socket_timeout=0.1)
        self._client.connection_pool.disconnect()


class Fleet:
    """Played workers that run and renew, and messages that wait for them."""

    def __init__(self, servers: Servers, connections: Mapping[str, int]) -> None:
        self._servers, self._connections = servers, connections
        self._signer = Signer(b"a key of more than sixteen bytes")
        self._publisher = Publisher(servers.urls["CELERY_BROKER_URL"], signer=self._signer)
        self._workers: list[Played] = []

    def grow(self, number: int, seconds: float) -> dict[str, float]:
        """Let so many workers run; return what the servers use after some seconds."""
        before = len(self._workers)
        for place in range(before, number):
            self._workers.append(Played(self._servers, place, self._connections, self._signer))
        trials = range(before * SLOTS * (1 + WAITING), number * SLOTS * (1 + WAITING))
        for some in (trials[first : first + 500] for first in range(0, len(trials), 500)):
            self._publisher.publish([(CLASS, payload(trial)) for trial in some])
        for worker in self._workers[before:]:
            worker.begin()
        is_over = threading.Event()
        beating = threading.Thread(target=beat, args=(self._workers, is_over))
        beating.start()
        time.sleep(seconds)
        found = self._servers.figures()
        is_over.set()
        beating.join()
        return found

    def close(self) -> None:
        """End all connections."""
        self._publisher.close()
        for worker in self._workers:
            worker.close()


def beat(workers: list[Played], is_over: threading.Event) -> None:
    """Renew all leases every second, and announce all workers every five, until the end."""
    every = round(ANNOUNCE_EVERY / BEAT_SECONDS)
    for turn in itertools.count():
        began = time.monotonic()
        for place, worker in enumerate(workers):
            worker.renew()
            if place % every == turn % every:
                worker.announce()
        if is_over.wait(max(0.0, BEAT_SECONDS - (time.monotonic() - began))):
            return


def payload(trial: int) -> Payload:
    """Return the message of a trial with twenty params."""
    attempt = Attempt(
        number=trial, attempt=1, subspace="all", params={f"param_{place}": 0.123456789 for place in range(20)}
    )
    return Payload(study=STUDY, module="sized", attempts=[attempt])


@contextlib.contextmanager
def private() -> Iterator[Servers]:
    """Start both servers with the settings of deploy/."""
    import services

    redis_conf, rabbit_conf = ROOT / "deploy/redis/redis.conf", ROOT / "deploy/rabbitmq/rabbitmq.conf"
    with (
        services.private(lambda: services.RedisServer(redis_conf)) as redis,
        services.private(lambda: services.RabbitServer(rabbit_conf.read_text())) as rabbit,
    ):
        yield Servers(redis, rabbit)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, action="append", help="played workers; may be repeated [100, 1000]")
    parser.add_argument("--seconds", type=float, default=6.0, help="in which they renew before the measurement [6]")
    given: argparse.Namespace = parser.parse_args()
    # The settings of a fleet on this machine are not those of the private servers.
    for name in [name for name in os.environ if name.startswith(("SHADHO_", "CELERY_"))]:
        del os.environ[name]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with private() as servers, TemporaryDirectory() as folder:
        connections = real(servers, Path(folder), given.seconds)
        print(connections, flush=True)
        rows = {"0": servers.figures()}
        fleet = Fleet(servers, connections)
        for number in sorted(given.workers or [100, 1000]):
            rows[str(number)] = fleet.grow(number, given.seconds)
        fleet.close()
    show({what: {f"{name} workers": f"{row[what]:,.0f}" for name, row in rows.items()} for what in rows["0"]})
    finish({"connections": connections, **rows}, {}, {"slots": SLOTS, "waiting": WAITING, "reports": REPORTS})


if __name__ == "__main__":
    main()
