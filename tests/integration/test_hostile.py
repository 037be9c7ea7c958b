"""Whoever can write to Redis, or to the broker, ends neither a scheduler nor a worker, and forges no result."""

from __future__ import annotations

import bz2
import contextlib
import pickle
import secrets
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kombu
import msgspec
import pytest
import redis
from acceptance.commands import Command, Desk, desk, until
from celery import Celery
from services import RedisServer

from shadho_celery.core.trial import Outcome, Result, TrialState
from shadho_celery.fleet.broker import MAX_BODY, TASK, Connection, depths_on, machine_queue
from shadho_celery.fleet.channel import _OF_FLEET, _keys
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker
from shadho_celery.fleet.signing import UNSIGNED, Signer

pytestmark = pytest.mark.timeout(180)

TRIALS = 20
NOTICE = "records in Redis are refused"


@pytest.fixture
def table(tmp_path: Path, private_redis: RedisServer) -> Iterator[Desk]:
    """A desk with a study of short trials, on a Redis that is the broker, too, and that no other test waits for."""
    redis_url = private_redis.url
    folder = tmp_path / "desk"
    folder.mkdir()
    with desk(folder) as made:
        made.study(seconds=0.2, body="while os.path.exists('hold'): time.sleep(0.05)")
        made.environment |= {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": redis_url}
        made.environment |= {"SHADHO_IMPORTS": "my_study", "SHADHO_LEASE_SECONDS": "5"}
        yield made


@pytest.fixture
def key(table: Desk) -> Path:
    path = table.write("shadho.key", secrets.token_hex(32))
    path.chmod(0o600)
    return path


class Fleet:
    """A worker, and a study that runs on it, with a key or without one."""

    def __init__(self, table: Desk, key: Path | None) -> None:
        self.table = table
        if key is not None:
            table.environment["SHADHO_SIGNING_KEY_FILE"] = str(key)
        self.signer = UNSIGNED if key is None else Signer(key.read_bytes())
        self.worker = table.worker("cpu", "-c", "1", "-l", "INFO")
        until(lambda: " ready." in self.worker.err or self.worker.code is not None, 60, table.said)
        self.launched = table.launch("my_study", "--trials", str(TRIALS), "--seed", "0")
        table.await_runs(1)
        # A busy machine takes long for the largest of the records.
        self.client = redis.Redis.from_url(table.environment["SHADHO_REDIS_URL"], socket_timeout=120)
        [events] = self.client.scan_iter("shadho:*:events")
        self.study = events.decode().split(":")[1]

    def key(self, name: str) -> str:
        return f"shadho:{self.study}:{name}"

    def await_more_runs(self) -> None:
        """Wait until a trial has begun that had not yet."""
        self.table.await_runs(len(self.table.runs()) + 1, seconds=60)

    def ended_well(self) -> Command:
        """All trials are counted once, and the worker still announces itself."""
        assert self.launched.wait(120).code == 0, self.table.said()
        assert self.table.states() == {"COMPLETE": TRIALS}, self.table.said()
        assert all(0 <= trial["loss"] <= 1 for trial in self.table.trials())
        with connect(self.table.environment["SHADHO_REDIS_URL"]) as client:
            # Each announcement lasts for 20 s.
            registry = Registry(client, Worker, self.signer)
            registry.clear()
            until(lambda: len(registry.living()) == 1, 30, self.table.said)
        assert self.worker.code is None, self.table.said()
        assert "this is a bug" not in self.worker.err
        assert "Traceback" not in self.launched.err
        return self.launched


@pytest.fixture(params=[False])
def fleet(table: Desk, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A fleet without a key; the parameter asks for one with a key."""
    made = Fleet(table, request.getfixturevalue("key") if request.param else None)
    yield made
    made.client.close()


@pytest.mark.parametrize("fleet", [True, False], ids=["signed", "unsigned"], indirect=True)
def test_bytes_that_are_no_text_and_records_that_are_none_end_neither_scheduler_nor_worker(fleet: Fleet) -> None:
    client, hold = fleet.client, fleet.table.write("hold", "")
    client.xadd(fleet.key("events"), {"e": b'\xff{"kind": "started"}'})
    client.xadd(fleet.key("events"), {b"\xfe": b"\xff"})
    client.xadd(fleet.key("events"), {"e": "[" * 100_000})
    client.xadd(fleet.key("events"), {"e": b"x" * 60_000_000})
    # With a key nobody else's low loss counts.
    outcome = Outcome(state=TrialState.COMPLETE, loss=-1e9)
    forged = msgspec.json.encode(Result(number=TRIALS - 1, attempt=1, outcome=outcome, at=0.0))
    if fleet.signer is not UNSIGNED:
        client.xadd(fleet.key("events"), {"e": forged})
        client.xadd(fleet.key("events"), {"e": b"f" * 64 + forged})
    for index, record in (("workers", "worker"), ("studies", "study")):
        for name, text in {b"\xff": b"{}", b"x": b"notjson", b"y": b"{}", b"z": b'{"slots": -1}'}.items():
            client.sadd(f"shadho:{index}", name)
            client.set(b"shadho:" + record.encode() + b":" + name, text, px=600_000)
        client.sadd(f"shadho:{index}", b"gone")
    client.zadd(fleet.key("leases"), {b"\xff": 1, b"x": 1, b"1": 1, b"1.2.3": 1, b"9" * 30: 1, b"-1.-1": 1})
    client.hset(fleet.key("attempts"), mapping={"refused": "many", str(TRIALS - 1): "x", "x": b"\xff"})
    [worker] = [name for name in client.smembers("shadho:workers") if name.startswith(b"cpu@")]
    client.hset(fleet.key("breakers"), mapping={worker: "x", b"\xff": b"\xff"})
    # No trial ends before the scheduler has looked at the leases.
    until(lambda: client.zscore(fleet.key("leases"), "x") is None, 30, fleet.table.said)
    hold.unlink()
    launched = fleet.ended_well()
    assert launched.err.count(NOTICE) == 1, "it is said once"
    counted = f"records in Redis refused, unsigned or malformed: {9 if fleet.signer is UNSIGNED else 11}"
    assert counted in launched.err, "the events, and the leases whose names are text: others cannot be removed"


def test_keys_of_a_wrong_type_are_removed_and_a_stream_to_which_nothing_can_be_added_is_begun_anew(
    fleet: Fleet,
) -> None:
    for key in (*_OF_FLEET, *_keys(fleet.study)):
        # At once, or the study may write the key between the two.
        with fleet.client.pipeline(transaction=True) as pipeline:
            pipeline.delete(key).rpush(key, "x")
            pipeline.execute()
        fleet.await_more_runs()
    fleet.client.xadd(fleet.key("events"), {"e": "last"}, id=f"{2**64 - 1}-{2**64 - 1}")
    fleet.await_more_runs()
    assert fleet.ended_well().err.count(NOTICE) == 1


def test_what_was_written_while_no_scheduler_ran_does_not_end_the_next_one(fleet: Fleet) -> None:
    fleet.launched.end()
    fleet.client.xadd(fleet.key("events"), {"e": b"\xff"})
    for name in ("breakers", "known", "cancel", "yields"):
        fleet.client.delete(fleet.key(name))
        fleet.client.set(fleet.key(name), b"\xff")
    fleet.client.zadd(fleet.key("leases"), {"x": 1})
    fleet.launched = fleet.table.launch("my_study", "--resume", "--trials", str(TRIALS))
    assert "records in Redis refused, unsigned or malformed: 6" in fleet.ended_well().err


# Messages


def peak_mb(worker: Command) -> float:
    """Return the peak resident memory of a worker's process, in MB."""
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1000


@pytest.mark.parametrize("broker", ["redis_url", "amqp_url"])
def test_messages_that_are_compressed_or_long_or_late_or_no_json_are_refused_unread_and_trials_go_on(
    table: Desk, request: pytest.FixtureRequest, unique: Callable[[str], str], broker: str
) -> None:
    """So are Celery's control requests, where those are obeyed. None of their 400 MB is unpacked."""
    url, name = request.getfixturevalue(broker), unique("cpu")
    environment = {"CELERY_BROKER_URL": url, "SHADHO_REMOTE_CONTROL": "1"}
    worker = table.worker(name, "-c", "1", "-l", "INFO", **environment)
    until(lambda: " ready." in worker.err or worker.code is not None, 60, table.said)
    zeros = bytes(1_000_000)
    packers = {"application/x-bz2": bz2.BZ2Compressor(), "application/x-gzip": zlib.compressobj(9)}
    sent = 0
    with Connection(url) as connection:
        producer = connection.Producer()
        mailbox = kombu.Exchange("celery.pidbox", type="fanout", durable=False)

        def send(body: bytes, kind: str = "application/json", encoding: str = "utf-8", **headers: str) -> None:
            nonlocal sent
            sent += 2
            said = {"content_type": kind, "content_encoding": encoding, "headers": {"task": TASK, "id": "1", **headers}}
            producer.publish(body, exchange="", routing_key=name, **said)
            producer.publish(body, exchange=mailbox, declare=[mailbox], **said)

        for compression, packer in packers.items():
            send(b"".join(packer.compress(zeros) for _ in range(400)) + packer.flush(), compression=compression)
        send(zlib.compress(zeros), compression="zlib")
        send(zlib.compress(zeros), compression="none of all")
        send(pickle.dumps([1]), "application/x-python-serialize", "binary")
        send(b"- 1", "application/x-yaml")
        send(bz2.compress(zeros), "text/plain", "bz2")
        send(b"[]", encoding="utf-16")
        send(b"[[], {}, {}]", eta="2100-01-01T00:00:00")
        send(b"[[], {}, {}]", timelimit="x")
        send(b"[" + b"[]," * (MAX_BODY // 3) + b"[]]")
    before = peak_mb(worker)
    launched = table.launch("my_study", "--trials", "3", **environment)
    assert launched.wait(90).code == 0, table.said()
    until(lambda: worker.err.count("refused unread") == sent, 30, table.said)
    assert peak_mb(worker) < before + 150
    assert "Traceback" not in worker.err
    assert depths_of(url, name) == 0, "they are acknowledged"
    # Celery's own control requests are read, too, after these.
    control = Celery("operator", broker=url, set_as_current=False).control
    assert [each for answer in control.ping(timeout=20, limit=1) for each in answer.values()] == [{"ok": "pong"}]
    control.shutdown()
    until(lambda: worker.code is not None, 30, table.said)


def depths_of(url: str, name: str) -> int | None:
    with Connection(url) as connection:
        return depths_on(connection, [name])[name]


# Celery's remote control


@pytest.mark.parametrize("broker", ["redis_url", "amqp_url"])
def test_a_worker_does_not_obey_celerys_remote_control_unless_that_is_asked_for_and_is_seen_by_its_monitors(
    table: Desk, request: pytest.FixtureRequest, unique: Callable[[str], str], broker: str
) -> None:
    url, name = request.getfixturevalue(broker), unique("cpu")
    environment = {"CELERY_BROKER_URL": url}
    worker = table.worker(name, "-c", "1", "-l", "INFO", **environment)
    until(lambda: " ready." in worker.err or worker.code is not None, 60, table.said)
    app = Celery("stranger", broker=url, set_as_current=False)
    heard: list[dict[str, Any]] = []

    def hear(event: dict[str, Any]) -> None:
        # A worker of an earlier test may say a last word on the same broker.
        if event["hostname"].startswith(name):
            heard.append(event)
            receiver.should_stop = True

    with app.connection_for_read() as connection:
        # Flower shows workers by these.
        receiver = app.events.Receiver(connection, handlers={"worker-heartbeat": hear})
        with contextlib.suppress(TimeoutError):
            receiver.capture(timeout=20, wakeup=False)
    assert heard
    assert app.control.ping(timeout=1.0) == []
    app.control.shutdown()
    launched = table.launch("my_study", "--trials", "2", **environment)
    assert launched.wait(60).code == 0, table.said()
    assert worker.code is None
    if broker == "amqp_url":
        _, ctl = request.getfixturevalue("amqp_server")
        queues = ctl("list_queues", "-q", "-p", urlsplit(url).path[1:] or "/", "name").split()
        own = {name, machine_queue(name, socket.gethostname())}
        assert {queue for queue in queues if queue.startswith(name)} == own, "and it has no control queue"
