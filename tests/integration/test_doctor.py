"""`doctor` tells what real servers tell about themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kombu
import psycopg
import pytest
import redis
import services
from click.testing import CliRunner

from shadho_celery.cli.group import commands
from shadho_celery.core.hardware import Machine
from shadho_celery.fleet import limits
from shadho_celery.fleet.broker import PROTOCOL, queue
from shadho_celery.fleet.registry import Registry, Worker
from shadho_celery.fleet.signing import Signer
from shadho_celery.store.engine import commit_seconds

KEY = "0123456789abcdef0123456789abcdef"
#: what a day's trials need
LONG = "consumer_timeout = 1209600000\n"


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[services.RabbitServer]:
    server = services.start_any("a private RabbitMQ is needed", lambda: services.RabbitServer(LONG))
    assert isinstance(server, services.RabbitServer)
    yield server
    server.stop()


@pytest.fixture
def fleet(
    rabbitmq: services.RabbitServer,
    private_redis: services.RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[services.RedisServer]:
    """A fleet with one signed worker and its queue; rabbitmqctl reaches the broker."""
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    monkeypatch.chdir(tmp_path)
    settings = {"CELERY_BROKER_URL": rabbitmq.url, "SHADHO_REDIS_URL": private_redis.url}
    settings |= {"SHADHO_SIGNING_KEY_FILE": str(key), "CUDA_VISIBLE_DEVICES": ""}
    # Debian's own rabbitmqctl changes its user.
    settings |= rabbitmq.environment() | {"PATH": f"{rabbitmq.scripts}{os.pathsep}{os.environ['PATH']}"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    # On a busy machine Erlang takes long to start.
    monkeypatch.setattr(limits, "RABBITMQCTL_SECONDS", limits.RABBITMQCTL_SECONDS * services.PATIENCE)
    signer = Signer(KEY.encode())
    worker = Worker(
        protocol=PROTOCOL,
        key=signer.fingerprint,
        compute_class="cpu",
        slots=1,
        machine=Machine(host="a"),
        clock_offset=0,
    )
    with redis.Redis.from_url(private_redis.url, decode_responses=True) as client:
        Registry(client, Worker, signer).announce("cpu@a.1.x", worker)
    with kombu.Connection(rabbitmq.url) as connection:
        queue("cpu")(connection.default_channel).declare()
        yield private_redis
        queue("cpu")(connection.default_channel).delete()


def examined(*words: str, code: int) -> dict[str, dict[str, str]]:
    """The findings of `doctor` by name, and those that are wrong by themselves."""
    result = CliRunner().invoke(commands, ["doctor", "--json", *words])
    assert result.exit_code == code, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return {each["name"]: each for each in answer["checks"]}


def wrong(findings: dict[str, dict[str, str]]) -> set[str]:
    return {name for name, each in findings.items() if each["state"] == "wrong"}


def test_nothing_is_wrong(fleet: services.RedisServer, rabbitmq: services.RabbitServer) -> None:
    findings = examined(code=0)
    assert [each for each in findings.values() if each["state"] != "ok"] == []
    assert findings["broker"]["text"].startswith("RabbitMQ 3.")
    assert findings["consumer timeout"]["text"] == "14 d"
    assert findings["workers"]["text"] == "1 cpu"
    assert findings["queues"]["text"] == "cpu 0"
    assert findings["clocks"]["text"].startswith("2 machines")
    assert findings["keys"]["text"] == f"key {Signer(KEY.encode()).fingerprint}"
    # It leaves nothing behind.
    assert rabbitmq.ctl("list_queues", "name", "--no-table-headers").split() == ["cpu"]


def test_a_consumer_timeout_of_half_an_hour(fleet: services.RedisServer, rabbitmq: services.RabbitServer) -> None:
    rabbitmq.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1800000).")
    findings = examined(code=1)
    assert wrong(findings) == {"consumer timeout"}
    assert "a trial of more than 30 min" in findings["consumer timeout"]["text"]
    assert "deploy/rabbitmq/rabbitmq.conf" in findings["consumer timeout"]["remedy"]
    examined("--longest-trial", "20m", code=0)
    rabbitmq.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1209600000).")


def test_a_timeout_that_nobody_tells_is_unknown(fleet: services.RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rabbitmqctl, and with the node of another broker."""
    for name, value in {"PATH": "/nowhere", "RABBITMQ_NODENAME": "other@localhost"}.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            findings = examined(code=0)
            assert findings["consumer timeout"]["state"] == "unknown"


def test_a_broker_with_an_alarm_takes_no_messages(fleet: services.RedisServer, rabbitmq: services.RabbitServer) -> None:
    rabbitmq.ctl("set_vm_memory_high_watermark", "0.0000001")
    try:
        findings = examined(code=1)
    finally:
        rabbitmq.ctl("set_vm_memory_high_watermark", "0.6")
    assert wrong(findings) == {"broker alarms"}
    assert "its memory is nearly full" in findings["broker alarms"]["text"]


def test_another_key(fleet: services.RedisServer, tmp_path: Path) -> None:
    (tmp_path / "other").write_text(KEY[::-1])
    (tmp_path / "other").chmod(0o600)
    findings = examined("--signing-key-file", str(tmp_path / "other"), code=1)
    assert "1 announcement is malformed or not signed with this machine's key" in findings["keys"]["text"]
    assert wrong(findings) == {"keys"}


def test_no_key_where_the_workers_have_one(fleet: services.RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHADHO_SIGNING_KEY_FILE")
    findings = examined(code=1)
    assert wrong(findings) == {"keys"}
    assert "have a key, this machine none: cpu@a.1.x" in findings["keys"]["text"]


def test_a_redis_that_loses_what_it_has(fleet: services.RedisServer) -> None:
    with redis.Redis.from_url(fleet.url) as client:
        client.config_set("appendonly", "no")
        client.config_set("maxmemory-policy", "allkeys-lru")
    assert wrong(examined(code=1)) == {"redis memory", "redis persistence"}


def test_redis_as_the_broker_has_a_visibility_timeout(
    fleet: services.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", fleet.url)
    findings = examined(code=0)
    assert findings["visibility timeout"]["text"] == "1 d"
    assert not {"consumer timeout", "broker alarms"} & {*findings}
    # A user with fewer rights.
    with redis.Redis.from_url(fleet.url) as client:
        client.execute_command("ACL", "SETUSER", "few", "on", ">few", "~*", "&*", "+@all", "-info")
    monkeypatch.setenv("SHADHO_REDIS_URL", fleet.url.replace("//", "//few:few@"))
    assert examined(code=0)["redis persistence"]["state"] == "unknown"


def test_servers_that_are_down(fleet: services.RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """RabbitMQ, and then Redis too: each is one wrong line, and what depends on it is unknown."""
    monkeypatch.setenv("CELERY_BROKER_URL", f"amqp://me:secret@127.0.0.1:{services.free_port()}")
    findings = examined(code=1)
    assert wrong(findings) == {"broker"}
    assert findings["broker"]["remedy"] == "start it, or check CELERY_BROKER_URL"
    assert findings["consumer timeout"]["state"] == findings["queues"]["state"] == "unknown"
    # What workers announce is in Redis.
    assert findings["keys"]["state"] == findings["workers"]["state"] == "ok"
    monkeypatch.setenv("SHADHO_REDIS_URL", f"redis://:secret@127.0.0.1:{services.free_port()}/0")
    findings = examined(code=1)
    assert wrong(findings) == {"broker", "redis"}
    assert "secret" not in str(findings)


def test_the_commits_of_postgresql_are_measured_without_a_trace(postgres_url: str) -> None:
    assert 0 < commit_seconds(postgres_url) < 30
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        left = connection.execute("select count(*) from pg_class where relname = 'shadho_doctor'").fetchone()
    assert left == (0,)
