"""`doctor` tells what real servers tell about themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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


@pytest.fixture
def broker(private_rabbitmq: services.RabbitServer) -> Iterator[str]:
    """URL of an empty virtual host of a broker that rabbitmqctl reaches."""
    with services.amqp_vhost(private_rabbitmq.url, private_rabbitmq.ctl) as url:
        yield url


@pytest.fixture
def fleet(
    broker: str,
    private_rabbitmq: services.RabbitServer,
    private_redis: services.RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> services.RedisServer:
    """A fleet with one signed worker and its queue."""
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    monkeypatch.chdir(tmp_path)
    # Debian's own rabbitmqctl changes its user.
    settings = private_rabbitmq.environment()
    settings |= {"PATH": f"{private_rabbitmq.scripts}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"CELERY_BROKER_URL": broker, "SHADHO_REDIS_URL": private_redis.url}
    for name, value in {**settings, "SHADHO_SIGNING_KEY_FILE": str(key)}.items():
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
    with kombu.Connection(broker) as connection:
        queue("cpu")(connection.default_channel).declare()
    return private_redis


def examined(*words: str, code: int) -> dict[str, dict[str, str]]:
    """The findings of `doctor` by name, and those that are wrong by themselves."""
    result = CliRunner().invoke(commands, ["doctor", "--json", *words])
    assert result.exit_code == code, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return {each["name"]: each for each in answer["checks"]}


def wrong(findings: dict[str, dict[str, str]]) -> set[str]:
    return {name for name, each in findings.items() if each["state"] == "wrong"}


def test_nothing_is_wrong(fleet: services.RedisServer, broker: str, private_rabbitmq: services.RabbitServer) -> None:
    findings = examined(code=0)
    assert [each for each in findings.values() if each["state"] != "ok"] == []
    assert findings["broker"]["text"].startswith("RabbitMQ 3.")
    assert findings["consumer timeout"]["text"] == "14 d"
    assert findings["workers"]["text"] == "1 cpu"
    assert findings["queues"]["text"] == "cpu 0"
    assert findings["clocks"]["text"].startswith("2 machines")
    assert findings["keys"]["text"] == f"key {Signer(KEY.encode()).fingerprint}"
    # It leaves nothing behind.
    vhost = urlsplit(broker).path[1:]
    assert private_rabbitmq.ctl("list_queues", "-p", vhost, "name", "--no-table-headers").split() == ["cpu"]


def test_a_timeout_that_nobody_tells_is_unknown(fleet: services.RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rabbitmqctl, and with the node of another broker."""
    for name, value in {"PATH": "/nowhere", "RABBITMQ_NODENAME": "other@localhost"}.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            findings = examined(code=0)
            assert findings["consumer timeout"]["state"] == "unknown"


def test_a_broker_with_an_alarm_takes_no_messages(
    fleet: services.RedisServer, private_rabbitmq: services.RabbitServer
) -> None:
    private_rabbitmq.ctl("set_vm_memory_high_watermark", "0.0000001")
    try:
        findings = examined(code=1)
    finally:
        private_rabbitmq.ctl("set_vm_memory_high_watermark", "0.6")
    assert wrong(findings) == {"broker alarms"}
    assert "its memory or disk is nearly full" in findings["broker alarms"]["text"]


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
