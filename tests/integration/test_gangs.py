"""Gangs on real workers: a trial's replicas come from its class's queue, and go when the trial does."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis
import services
from acceptance.commands import Command, until
from integration import fleets
from integration.fleets import Fleet
from services.told import ToldExecutor

from shadho_celery.core.trial import Attempt, Event, Lost, Result, TrialState
from shadho_celery.fleet.broker import Publisher, queue
from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

#: A trial of several slots waits for all of its replicas to say hello, and holds them until its file is gone; what the
#: last trial of a study does with one slot ends at once. A replica writes down how it ended. With x == 9 replicas fail,
#: with 8 they do so after a while, with 7 they take a while to get ready, and with 6 they just return.
STUDY = """
import os, socket, threading, time
from pathlib import Path
from hyperopt import hp
from shadho_celery.context import ReplicaDone

SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"slots": lambda params: 3 if params["x"] < 0.5 else 1}

def note(*words):
    with open("runs.log", "a") as log:
        log.write("\\t".join(map(str, words)) + "\\n")

def objective(params, context):
    seat = context.replica
    name = f"{context.trial}.{context.attempt}"
    note("began", name, 0 if seat is None else seat.rank, context.slots, os.getpid())
    if params["x"] == 6 and seat is not None:
        return 0.0
    if params["x"] > 1 and seat is not None:
        time.sleep({9: 0, 8: 4, 7: 12}[params["x"]])
        if params["x"] != 7:
            raise ArithmeticError("replicas fail here")
    if seat is not None:
        return replica(seat, context, name)
    if context.slots == 1:
        time.sleep(0.1)
        return params["x"]
    met = coordinate(context, name)
    note("ended", name, 0, context.slots, os.getpid())
    return {"loss": params["x"], "met": sorted(met)}

def replica(seat, context, name):
    host, port = seat.address.split(":")
    with socket.create_connection((host, int(port)), 10) as line:
        line.sendall(f"{seat.token} {seat.rank}\\n".encode())
        line.settimeout(0.05)
        while not context.should_stop():
            try:
                if not line.recv(1):
                    break
            except TimeoutError:
                pass
    note("left", name, seat.rank, int(context.should_stop()), os.getpid())
    raise ReplicaDone

def coordinate(context, name):
    met, lines = set(), []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        address = f"{os.environ['SHADHO_HOST']}:{server.getsockname()[1]}"
        context.call_replicas(address, "secret-" + name, backups=1)
        while not context.should_stop():
            try:
                line, _ = server.accept()
                line.settimeout(5)
                token, rank = line.makefile().readline().split()
                assert token == "secret-" + name
                met.add(int(rank))
                lines.append(line)
                note("met", name, rank, context.slots, os.getpid())
                if {1, 2} <= met:
                    context.gang_assembled()
            except TimeoutError:
                pass
            if {1, 2} <= met and not Path(f"hold-{context.trial}").exists():
                break
    for line in lines:
        line.close()
    return met
"""

LEASE_SECONDS = 2


def on(broker: str) -> pytest.MarkDecorator:
    """Have the fleet of a test use this broker."""
    return pytest.mark.parametrize("fleet", [broker], indirect=True)


@pytest.fixture
def fleet(
    request: pytest.FixtureRequest,
    redis_server: str,
    amqp_url: str,
    no_orphans: None,
    tmp_path: Path,
    unique: Callable[[str], str],
) -> Iterator[Fleet]:
    with ExitStack() as stack:
        if request.param == "private_redis":
            redis_url = request.getfixturevalue("private_redis").url
        else:
            redis_url = stack.enter_context(services.redis_db(redis_server))
        url = amqp_url if request.param == "rabbitmq" else redis_url
        environment = {"SHADHO_LEASE_SECONDS": str(LEASE_SECONDS)}
        made = stack.enter_context(fleets.fleet(tmp_path / "fleet", url, redis_url, unique("cpu"), **environment))
        made.desk.write("my_study.py", STUDY)
        yield made


class Play:
    """A study's executor without its scheduler: trials go out as they are given."""

    def __init__(self, fleet: Fleet, executor: QueueExecutor) -> None:
        self.fleet = fleet
        self.executor = executor
        self.events: list[Event] = []

    def submit(
        self,
        number: int,
        slots: int = 3,
        *,
        x: float = 0.1,
        attempt: int = 1,
        state: TrialState = TrialState.QUEUED,
    ) -> None:
        sent = Attempt(
            number=number,
            subspace="all",
            params={"x": x},
            state=state,
            attempt=attempt,
            compute_class=self.fleet.compute_class,
            slots=slots,
        )
        self.executor.submit([sent])

    def until(self, ready: Callable[[], Any], seconds: float = 40.0) -> None:
        """Poll until `ready()` is true."""
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, f"{self.events} {self.log()} {self.fleet.desk.said()}"
            self.events += self.executor.poll(0.1)

    def log(self) -> list[list[str]]:
        path = self.fleet.desk.folder / "runs.log"
        return [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []

    def seen(self, what: str, name: str) -> list[int]:
        """Ranks of the replicas that did this, of one trial and attempt."""
        return [int(line[2]) for line in self.log() if line[:2] == [what, name]]

    def pids(self, name: str) -> dict[int, int]:
        """By rank, the process of the replica that began last."""
        return {int(line[2]): int(line[4]) for line in self.log() if line[:2] == ["began", name]}

    def result(self, number: int, seconds: float = 60.0) -> Result:
        """The result of a trial, once it is there."""
        self.until(lambda: any(isinstance(event, Result) and event.number == number for event in self.events), seconds)
        [result] = [event for event in self.events if isinstance(event, Result) and event.number == number]
        return result

    def lost(self, number: int, attempt: int) -> Lost:
        """Wait until an attempt is lost; return the event."""
        self.until(lambda: any(isinstance(e, Lost) and (e.number, e.attempt) == (number, attempt) for e in self.events))
        return next(e for e in self.events if isinstance(e, Lost) and (e.number, e.attempt) == (number, attempt))

    def hold(self, number: int) -> None:
        """Have a trial go on until it is released."""
        (self.fleet.desk.folder / f"hold-{number}").touch()

    def release(self, number: int) -> None:
        (self.fleet.desk.folder / f"hold-{number}").unlink()

    def waiting(self) -> int:
        """Messages that lie in the class's queue."""
        with kombu.Connection(self.fleet.broker) as connection:
            return int(queue(self.fleet.compute_class)(connection.default_channel).queue_declare().message_count)


@contextmanager
def play(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Play]:
    monkeypatch.setenv("CELERY_BROKER_URL", fleet.broker)
    monkeypatch.setenv("SHADHO_LEASE_SECONDS", str(LEASE_SECONDS))
    with connect(fleet.redis) as client:
        executor = ToldExecutor(client, Publisher.configured(), "gangs", "my_study", **options)
        try:
            yield Play(fleet, executor)
        finally:
            executor.close()


def workers(fleet: Fleet, count: int, slots: int = 1) -> list[Command]:
    """So many workers, announced."""
    started = fleet.workers(count, slots)
    with connect(fleet.redis) as client:
        registry = Registry(client, Worker)
        until(
            lambda: {c.pid for c in started} <= {worker.pid for worker in registry.living().values()},
            30,
            fleet.desk.said,
        )
    return started


def whose(process: int, commands: list[Command]) -> Command:
    """The worker that a slot's process belongs to."""
    pids, place = [command.pid for command in commands], process
    while place not in pids:
        assert place > 1, f"process {process} is of none of {pids}"
        place = int(Path(f"/proc/{place}/stat").read_text().rpartition(")")[2].split()[1])
    return commands[pids.index(place)]


@on("rabbitmq")
def test_a_dead_replica_is_replaced_and_a_backup_has_the_slot_that_idles_until_a_trial_wants_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a scheduler that has been started anew in the meantime; the trial itself hears nothing of all this."""
    four = workers(fleet, 4)
    with play(fleet, monkeypatch) as game:
        game.hold(0)
        game.submit(0)
        game.until(lambda: set(game.seen("met", "0.1")) == {1, 2, 3}, 60)
        assert game.executor.gangs.backups(fleet.compute_class) == 1
        game.submit(1, 1, x=0.7)
        assert game.result(1).outcome.loss == 0.7
        assert game.seen("left", "0.1") == [3], "its slot was wanted"
    with play(fleet, monkeypatch) as game:
        game.submit(0, state=TrialState.RUNNING)
        whose(game.pids("0.1")[2], four).send(signal.SIGKILL)
        game.until(lambda: game.seen("met", "0.1").count(2) == 2, 60)
        game.release(0)
        result = game.result(0)
        assert (result.outcome.state, result.attempt, result.outcome.loss) == (TrialState.COMPLETE, 1, 0.1)
        assert {1, 2} <= set(result.outcome.metrics["met"])
        game.until(lambda: {1, 2} <= set(game.seen("left", "0.1")))
        game.until(lambda: not game.waiting())
        assert not game.executor.notices(), "nobody failed"


@on("redis")
def test_when_the_coordinators_worker_dies_its_replicas_leave_and_the_next_attempt_has_its_own(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = workers(fleet, 2, slots=2)
    with play(fleet, monkeypatch) as game:
        game.hold(0)
        game.submit(0)
        game.until(lambda: {1, 2} <= set(game.seen("met", "0.1")), 60)
        seats = game.pids("0.1")
        dead = whose(seats[0], two)
        left = [rank for rank in (1, 2) if whose(seats[rank], two) is not dead]
        dead.send(signal.SIGKILL)
        assert game.lost(0, 1).claimed
        game.until(lambda: set(left) <= set(game.seen("left", "0.1")))
        workers(fleet, 1, slots=2)
        game.release(0)
        game.submit(0, attempt=2)
        assert game.result(0).attempt == 2
        assert {1, 2} <= set(game.seen("met", "0.2"))


@on("redis")
def test_a_gang_that_is_not_complete_in_time_gives_everything_back_and_the_attempt_does_not_count(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does one whose trial is cancelled. Messages of replicas that no worker has taken by then are not run."""
    workers(fleet, 1, slots=2)
    with play(fleet, monkeypatch, gang_wait_seconds=5.0) as game:
        game.submit(0)
        lost = game.lost(0, 1)
        assert (lost.claimed, lost.reason) == (False, "its gang was not complete within 5 s")
        game.until(lambda: len(game.seen("left", "0.1")) == 1)
    with play(fleet, monkeypatch) as game:
        game.submit(1)
        game.until(lambda: game.seen("met", "1.1"))
        game.executor.cancel([1], running=True)
        assert game.result(1).outcome.state is TrialState.CANCELLED
        game.until(lambda: len(game.seen("left", "1.1")) == 1)
        game.submit(2, 1, x=0.7)
        assert game.result(2).outcome.state is TrialState.COMPLETE
        game.until(lambda: not game.waiting())
        assert len(game.pids("1.1")) == 2, "the coordinator's and one replica's; the other one came too late"


@pytest.mark.parametrize(
    ("fleet", "x"),
    [("redis", 9), ("rabbitmq", 8), ("redis", 6)],
    indirect=["fleet"],
    ids=["at once", "late", "return"],
)
def test_replicas_that_fail_are_told_of_and_cost_the_trial_its_attempt(
    fleet: Fleet, x: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an objective that fails as a replica would be sent for ever; also where all of them had begun by then."""
    workers(fleet, 1, slots=3)
    with play(fleet, monkeypatch, gang_wait_seconds=6.0) as game:
        game.submit(0, x=x)
        lost = game.lost(0, 1)
        assert lost.claimed
        assert lost.reason.startswith("its gang was not complete within 6 s; rank ")
        why = "ArithmeticError: replicas fail here" if x > 6 else "its objective returned without taking part in a gang"
        assert lost.reason.endswith(why)
        assert any(why in notice for notice in game.executor.notices())
        assert 2 <= len(game.seen("began", "0.1")) <= 8, "they were tried again, and not without a pause"
        game.submit(1, 1, x=0.7)
        assert game.result(1).outcome.loss == 0.7


@on("redis")
def test_a_gang_whose_replicas_take_long_to_get_ready_is_not_given_back_while_they_do(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be so in each of its attempts. A scheduler that is started anew knows that it has come together."""
    workers(fleet, 1, slots=3)
    with play(fleet, monkeypatch, gang_wait_seconds=6.0) as game:
        game.hold(0)
        game.submit(0, x=7)
        game.until(lambda: {1, 2} <= set(game.seen("met", "0.1")))
    with play(fleet, monkeypatch, gang_wait_seconds=1.0) as game:
        game.submit(0, x=7, state=TrialState.RUNNING)
        game.until(lambda: [each.busy for each in game.executor.classes()] == [3])
        os.kill(game.pids("0.1")[2], signal.SIGKILL)
        game.until(lambda: game.seen("began", "0.1").count(2) == 2)
        game.release(0)
        result = game.result(0)
        assert (result.outcome.state, result.attempt) == (TrialState.COMPLETE, 1)


@on("redis")
def test_gangs_of_three_and_single_slot_trials_all_finish_on_four_slots(fleet: Fleet) -> None:
    """Two gangs of three do not fit at once: each has all of its slots or none."""
    workers(fleet, 1, slots=4)
    command = fleet.launch("my_study", 8)
    found = fleet.ended_well(command, "my_study", 8, 120)
    wide = [trial["number"] for trial in found if trial["slots"] == 3]
    assert 2 <= len(wide) < 8
    met = {trial["number"]: json.loads(trial["metrics"] or "{}").get("met") for trial in found}
    assert all({1, 2} <= set(met[number]) for number in wide)
    assert all(trial["attempt"] == 1 for trial in found), "no gang had to be given back"


#: A trial of two slots, whose gang trains a model with parameters that a test knows. Its replicas are told the address
#: of what listens in between.
TRAINING = """
from hyperopt import hp
import torch
from torch import nn
from torch.nn.functional import mse_loss
from shadho_celery.training import gang

X = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"slots": 2}

def objective(params, context):
    if context.replica is not None:
        open("token", "w").write(context.replica.token)
    model = nn.Linear(300, 1)
    nn.init.constant_(model.weight, 1.2345678)
    with gang(context, replicas=2, host="127.0.0.1", port=%d) as g:
        report = g.fit(model, torch.optim.SGD(model.parameters(), lr=0.0), (X, X.sum(1, keepdim=True)),
                       lambda model, batch: mse_loss(model(batch[0]), batch[1]), steps=5, batch=20)
    return {"loss": 1.0, "steps": report.steps, "refused": sum(report.log.refused.values())}
"""


def heard_between(server: socket.socket, target: tuple[str, int], heard: list[bytes]) -> None:
    """Pass on what replicas and the coordinator at `target` send, and record it."""

    def pump(source: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                heard.append(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def serve(near: socket.socket) -> None:
        with near, socket.create_connection(target) as far:
            back = threading.Thread(target=pump, args=(far, near), daemon=True)
            back.start()
            pump(near, far)
            back.join()

    with suppress(OSError):
        while True:
            near, _ = server.accept()
            threading.Thread(target=serve, args=(near,), daemon=True).start()


@contextmanager
def monitored(url: str, heard: list[str]) -> Iterator[None]:
    """Record every command that the Redis at `url` gets: there lie the queues of a fleet without RabbitMQ, too."""
    # Redis may get no command for longer than the client waits by default.
    with redis.Redis.from_url(url, decode_responses=True, socket_timeout=None) as client, client.monitor() as monitor:

        def listen() -> None:
            with suppress(redis.RedisError, OSError, ValueError, AttributeError):
                for command in monitor.listen():
                    heard.append(command["command"])

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield
        # A monitor hears commands in their order: once it has heard this one, it has heard all before.
        before = len(heard)
        client.echo(end := f"end of {uuid.uuid4().hex}")
        services.wait_until(lambda: any(end in command for command in heard[before:]), alive=thread.is_alive)
        monitor.connection.disconnect()
        thread.join(10)


@on("private_redis")
@pytest.mark.parametrize("signed", [True, False], ids=["with a key", "without"])
def test_with_a_key_neither_token_nor_parameters_nor_gradients_can_be_read_on_their_way(
    fleet: Fleet, signed: bool
) -> None:
    """On the gang's connections, and in all that broker and Redis get. Without a key both can."""
    if signed:
        key = fleet.desk.write("shadho.key", "0123456789abcdef")
        key.chmod(0o600)
        fleet.desk.environment["SHADHO_SIGNING_KEY_FILE"] = str(key)
    bus: list[bytes] = []
    commands: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server, monitored(fleet.redis, commands):
        port = server.getsockname()[1]
        between = (server, ("127.0.0.2", port), bus)
        threading.Thread(target=heard_between, args=between, daemon=True).start()
        fleet.desk.environment["SHADHO_LISTEN"] = "127.0.0.2"
        fleet.desk.write("my_study.py", TRAINING % port)
        workers(fleet, 2)
        fleet.ended_well(fleet.launch("my_study", 1), "my_study", 1, 120)
        server.shutdown(socket.SHUT_RDWR)
    [metrics] = fleet.metrics("my_study")
    assert metrics == {"steps": 5, "refused": 0}
    token = (fleet.desk.folder / "token").read_text()
    said, asked = b"".join(bus), " ".join(commands)
    weights = struct.pack("<f", 1.2345678) * 300
    assert len(said) > 10 * len(weights), "parameters and gradients of five steps went this way"
    assert "call_replicas" in asked or "gang" in asked
    assert token.encode() not in said
    assert (token in asked) is not signed
    assert (weights in said) is not signed
    gradient = re.search(rb"SHGB.\x04", said, re.DOTALL)
    assert (gradient is None) is signed
