"""Who may do what on a fleet: by TLS, by signatures, by RabbitMQ's and Redis' own users, on real servers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis
import services
from acceptance.commands import Command, Desk, desk, until

from shadho_celery.core.hardware import Machine
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt
from shadho_celery.fleet.broker import message, queue
from shadho_celery.fleet.registry import Host, Registry, StudyWants, Worker
from shadho_celery.fleet.signing import Signer

pytestmark = pytest.mark.timeout(180)

DEPLOY = services.COMPOSE.parent
CLASSES = ("gpu_large", "gpu_small", "cpu")
ROLES = ("scheduler", *(f"worker-{name}" for name in CLASSES))
#: with every kind of character that a URL may hold as it is
PASSWORD = "s3cret-" + secrets.token_hex(8)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Desk]:
    """A desk with a study of short trials, whose commands are told of no server yet."""
    folder = tmp_path / "desk"
    folder.mkdir()
    with desk(folder) as made:
        made.study(seconds=0.02)
        made.environment["SHADHO_IMPORTS"] = "my_study"
        yield made


@pytest.fixture(scope="module")
def guarded() -> Iterator[services.TlsRabbitServer]:
    """A RabbitMQ with the users of deploy/, which has a listener for TLS, too, and wants certificates there."""
    with services.private(lambda: services.TlsRabbitServer(clients=True)) as node:
        node.ctl("import_definitions", str(DEPLOY / "rabbitmq" / "definitions.json"))
        yield node


@pytest.fixture(scope="module")
def with_passwords(guarded: services.RabbitServer) -> services.RabbitServer:
    for role in ROLES:
        guarded.ctl("change_password", role, PASSWORD)
    return guarded


def broker(node: services.RabbitServer, role: str, password: str = PASSWORD) -> str:
    return f"amqp://{role}:{password}@127.0.0.1:{node.port}/shadho"


def serves(worker: Command, seconds: float = 60.0) -> None:
    until(lambda: " ready." in worker.err or worker.code is not None, seconds, lambda: worker.err)
    assert " ready." in worker.err, worker.err


def refused_in_one_line(command: Command, *words: str) -> None:
    """It has ended with exit code 2 and one line that has all of `words`."""
    command.wait(60)
    assert command.code == 2, command.err
    assert "Traceback" not in command.err, command.err
    [line] = [line for line in command.messages if line.startswith(("shadho_celery: ", "Error: "))]
    for word in words:
        assert word in line


# RabbitMQ's users


def test_an_imported_user_without_a_password_of_its_own_gets_in_with_none(guarded: services.RabbitServer) -> None:
    for role in ROLES:
        for password in ("", "guest", role):
            with kombu.Connection(broker(guarded, role, password)) as connection, pytest.raises(Exception, match="403"):
                connection.connect()


def test_a_worker_that_asks_for_another_classs_queue_ends_with_one_line(
    table: Desk, with_passwords: services.RabbitServer, redis_url: str
) -> None:
    table.environment |= {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": broker(with_passwords, "worker-cpu")}
    refused_in_one_line(table.worker("gpu_large", "-c", "1"), "ACCESS_REFUSED", "gpu_large", "permissions")
    scheduler = table.worker("cpu", "-c", "1", CELERY_BROKER_URL=broker(with_passwords, "scheduler"))
    refused_in_one_line(scheduler, "ACCESS_REFUSED", "permissions")
    stranger = table.worker("cpu", "-c", "1", CELERY_BROKER_URL=broker(with_passwords, "worker-cpu", "wrong-one"))
    refused_in_one_line(stranger, "CELERY_BROKER_URL", "worker-cpu:***@")
    assert not any(secret in table.said() for secret in (PASSWORD, "wrong-one"))


def to_bind(channel: Any, name: str) -> None:
    channel.queue_bind(name, "celery.pidbox")


def send(channel: Any, name: str) -> None:
    """Publish, and wait until the broker has taken it or has closed the channel."""
    channel.basic_publish_confirm(channel.prepare_message("{}", content_encoding="utf-8"), "", name)


#: what somebody may try with a class's queue
DEEDS: Mapping[str, Callable[[Any, str], Any]] = {
    "declare": lambda channel, name: queue(name)(channel).declare(),
    "consume": lambda channel, name: channel.basic_consume(name),
    "get": lambda channel, name: channel.basic_get(name),
    "purge": lambda channel, name: channel.queue_purge(name),
    "delete": lambda channel, name: channel.queue_delete(name, if_unused=True, if_empty=True),
    "bind": to_bind,
    "publish": send,
}


@pytest.mark.parametrize(
    ("role", "name", "allowed"),
    [
        ("worker-cpu", "gpu_large", set()),
        ("worker-cpu", "gpu_small", set()),
        ("worker-gpu_small", "cpu", set()),
        ("worker-cpu", "cpu", {"declare", "consume", "get", "purge", "delete"}),
        ("scheduler", "cpu", {"declare", "publish", "delete"}),
        ("scheduler", "another_class", set()),
        ("worker-cpu", "gpu_large,node", set()),
        ("worker-cpu", "cpu,node", {"declare", "consume", "get", "purge", "delete"}),
        ("scheduler", "cpu,node", {"declare", "publish", "delete"}),
    ],
)
def test_a_user_can_do_with_a_classs_queue_what_its_role_needs(
    with_passwords: services.RabbitServer, role: str, name: str, allowed: set[str]
) -> None:
    done, refusals = set(), []
    for deed, act in DEEDS.items():
        if name == "another_class" and deed == "publish":
            continue  # the default exchange takes any routing key; a message without a queue is dropped
        with kombu.Connection(broker(with_passwords, role)) as connection:
            try:
                act(connection.default_channel, name)
                done.add(deed)
            except connection.channel_errors as error:
                refusals.append(str(error))
    assert all("ACCESS_REFUSED" in refusal for refusal in refusals), refusals
    assert done == allowed, "and a user who may declare a queue may delete it"


# TLS


@pytest.fixture(scope="module")
def tls_redis() -> Iterator[services.TlsRedisServer]:
    with services.private(services.TlsRedisServer) as server:
        yield server


def runs_a_study(table: Desk) -> None:
    serves(table.worker("cpu", "-c", "1", "-l", "INFO"))
    launched = table.launch("my_study", "--trials", "3", "--json")
    assert launched.wait(60).code == 0, table.said()
    assert launched.json()["trials"]["complete"] == 3


def test_a_study_runs_over_tls_with_redis_alone(table: Desk, tls_redis: services.TlsRedisServer) -> None:
    table.environment |= {"SHADHO_REDIS_URL": tls_redis.url, "CELERY_BROKER_URL": tls_redis.url}
    table.environment["SHADHO_TLS_CA"] = tls_redis.files["ca"]
    runs_a_study(table)


def test_a_study_runs_over_tls_with_rabbitmq_and_a_certificate_of_ones_own(
    table: Desk, tls_redis: services.TlsRedisServer, guarded: services.TlsRabbitServer
) -> None:
    """Redis' own authority is named in its URL, beside which the environment's files do not count."""
    table.environment["SHADHO_REDIS_URL"] = f"{tls_redis.url}?ssl_ca_certs={tls_redis.files['ca']}"
    table.environment["CELERY_BROKER_URL"] = guarded.tls_url
    files = {"SHADHO_TLS_CA": "ca", "SHADHO_TLS_CERT": "cert", "SHADHO_TLS_KEY": "key"}
    table.environment |= {variable: guarded.files[name] for variable, name in files.items()}
    runs_a_study(table)


def test_a_certificate_that_is_not_trusted_is_refused_in_one_line_by_worker_and_scheduler(
    table: Desk, tls_redis: services.TlsRedisServer, guarded: services.TlsRabbitServer, redis_url: str
) -> None:
    words = ("CERTIFICATE_VERIFY_FAILED", "SHADHO_TLS_CA")
    for urls in (
        {"SHADHO_REDIS_URL": tls_redis.url, "CELERY_BROKER_URL": tls_redis.url},
        {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": tls_redis.url},
        {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": guarded.tls_url},
    ):
        commands = [table.worker("cpu", "-c", "1", **urls), table.launch("my_study", **urls)]
        for command in commands:
            refused_in_one_line(command, *words)
    assert not table.trials() if (table.folder / "shadho.db").exists() else True


# Signatures


@pytest.fixture
def key(table: Desk) -> Path:
    path = table.write("shadho.key", secrets.token_hex(32))
    path.chmod(0o600)
    return path


def order(number: int, signer: Signer) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Body, headers and properties of a message for one trial."""
    attempt = Attempt(number=number, attempt=1, subspace="all", params={"side": 0, "x": 0.5}, seed=1)
    return message(Payload(study="0123456789abcdef", module="my_study", attempts=[attempt]), signer)


def test_a_worker_with_a_key_does_what_is_signed_with_it_and_nothing_else(
    table: Desk, key: Path, redis_url: str
) -> None:
    """A scheduler without the key is told so and sends nothing."""
    table.environment |= {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": redis_url}
    worker = table.worker("cpu", "-c", "1", "-l", "INFO", SHADHO_SIGNING_KEY_FILE=str(key))
    serves(worker)
    keyless = table.launch("my_study", "--trials", "3")
    keyless.says("--signing-key-file", 40)
    keyless.end()
    assert "it is not signed" not in worker.err
    # A signature holds for its own payload only.
    body, _, properties = order(1, Signer())
    _, headers, _ = order(0, Signer(key.read_bytes()))
    forged = [order(0, Signer()), order(0, Signer(b"another key of sixteen bytes")), (body, headers, properties)]
    with kombu.Connection(redis_url) as connection:
        producer = kombu.Producer(connection.default_channel)
        for body, headers, properties in forged:
            producer.publish(body, exchange="", routing_key="cpu", headers=headers, serializer="json", **properties)
    until(lambda: worker.err.count("it is not signed with this worker's key") == 3, 20, lambda: worker.err)
    assert not table.runs()
    launched = table.launch("my_study", "--trials", "3", "--study", "keyed", "--json", "--signing-key-file", key.name)
    assert launched.wait(60).code == 0, table.said()
    assert launched.json()["trials"]["complete"] == len(table.runs()) == 3


def test_a_key_that_others_can_read_is_refused_in_one_line(table: Desk, key: Path, redis_url: str) -> None:
    table.environment |= {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": redis_url}
    key.chmod(0o644)
    words = ("--signing-key-file", str(key))
    for command in [
        table.launch("my_study", *words),
        table.start("python", "-m", "shadho_celery.worker", "--class", "cpu", *words),
        table.worker("cpu", SHADHO_SIGNING_KEY_FILE=str(key)),
    ]:
        refused_in_one_line(command, f"chmod 600 {key}")
    assert not (table.folder / "shadho.db").exists() or not table.trials()


# Redis' users


@pytest.fixture
def redis_with_users(tmp_path: Path) -> Iterator[str]:
    """URL, with ROLE in place of the user, of a Redis with deploy/'s users, each of which has been given PASSWORD."""
    users = tmp_path / "users.acl"
    users.write_text((DEPLOY / "redis" / "users.acl").read_text())
    conf = tmp_path / "redis.conf"
    conf.write_text(f"aclfile {users}\n")
    with (
        services.private(lambda: services.RedisServer(conf)) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        for role in ROLES:
            with pytest.raises(redis.AuthenticationError):
                redis.Redis.from_url(server.url.replace("//", f"//{role}:{PASSWORD}@")).ping()
        client.set("somebody:elses", "1")
        client.set("shadho:worker:gpu_large@node.1", "{}")
        # As the head of compose.yml says; the last one would lock this client out.
        said = re.findall(r"^#   (ACL .*)$", services.COMPOSE.read_text(), re.MULTILINE)
        assert [line.split()[2] for line in said if "SETUSER" in line] == [*ROLES, "default"]
        for line in said:
            assert client.execute_command(*line.replace("PASSWORD", PASSWORD).split()) is not None
        yield server.url.replace("//", f"//ROLE:{PASSWORD}@")


@pytest.mark.parametrize("broker_is", ["rabbitmq", "redis"])
def test_a_study_runs_with_redis_users_who_can_touch_nothing_but_its_own_keys(
    table: Desk, redis_with_users: str, broker_is: str, request: pytest.FixtureRequest
) -> None:
    def environment(role: str) -> dict[str, str]:
        redis_url = redis_with_users.replace("ROLE", role)
        if broker_is == "redis":
            return {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
        return {
            "CELERY_BROKER_URL": broker(request.getfixturevalue("with_passwords"), role),
            "SHADHO_REDIS_URL": redis_url,
        }

    worker = table.worker("cpu", "-c", "2", "-l", "INFO", **environment("worker-cpu"))
    serves(worker)
    launched = table.launch("my_study", "--trials", "3", "--json", **environment("scheduler"))
    assert launched.wait(60).code == 0, table.said()
    assert launched.json()["trials"]["complete"] == 3
    assert "NoPermission" not in worker.err
    for role in ROLES:
        checks = table.told("doctor", "--json", **environment(role)).json()["checks"]
        assert {each["name"]: each["text"] for each in checks if "permission" in each["text"].lower()} == {}
        with redis.Redis.from_url(redis_with_users.replace("ROLE", role)) as client:
            for words in (
                ["GET", "somebody:elses"],
                ["SET", "another", "1"],
                ["FLUSHALL"],
                ["KEYS", "*"],
                ["CONFIG", "GET", "requirepass"],
                ["ACL", "LIST"],
                ["SHUTDOWN", "NOW"],
                ["EVAL", "return redis.call('GET', KEYS[1])", "1", "somebody:elses"],
            ):
                with pytest.raises(redis.ResponseError, match=r"(?i)permission|NOPERM"):
                    client.execute_command(*words)


def test_a_redis_user_of_a_class_can_neither_announce_workers_of_another_nor_take_their_messages(
    redis_with_users: str,
) -> None:
    """Nor announce a study; what all classes share, the studies' attempts and results, it can write."""
    with redis.Redis.from_url(redis_with_users.replace("ROLE", "worker-cpu"), decode_responses=True) as client:
        Registry(client, Worker).announce("cpu@node.2", Worker(compute_class="cpu"))
        host = Host(client, "cpu@node.2", Machine(pool="0123456789abcdef"))
        assert host.neighbours(joins=True) == {}
        assert set(Registry(client, Worker).living()) == {"cpu@node.2"}
        assert client.get("shadho:worker:gpu_large@node.1") == "{}"
        Registry(client, StudyWants).living()
        for words in (
            ["SET", "shadho:worker:gpu_large@node.1", "{}"],
            ["DEL", "shadho:worker:gpu_large@node.1"],
            ["SET", "shadho:study:0123456789abcdef", "{}"],
            ["RPOP", "gpu_large"],
            ["LPUSH", "gpu_large", "{}"],
            ["EVAL", "return redis.call('DEL', KEYS[1])", "1", "shadho:worker:gpu_large@node.1"],
        ):
            with pytest.raises(redis.ResponseError, match=r"(?i)permission|NOPERM"):
                client.execute_command(*words)
        assert client.xadd("shadho:0123456789abcdef:events", {"e": "{}"})


# Secrets


def exposed(table: Desk, words: list[str]) -> set[str]:
    """Return the places that show any of `words`: command lines, logs and output, the store, the state folder."""
    places = {f"command line {pid}": line for pid, line in table.processes().items()}
    files = [
        path for path in table.folder.rglob("*") if path.is_file() and path.name not in ("fleet.urls", "shadho.key")
    ]
    places |= {str(path): path.read_bytes().decode("latin-1") for path in files}
    return {place for place, text in places.items() if any(word in text for word in words)}


def test_no_secret_is_on_a_command_line_in_a_log_in_the_store_or_in_the_state_folder(
    table: Desk, with_passwords: services.RabbitServer, key: Path, private_redis: services.RedisServer
) -> None:
    redis_password = "s3cret-" + secrets.token_hex(8)
    with redis.Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", redis_password)
    redis_url = private_redis.url.replace("//", f"//:{redis_password}@")
    hidden = [PASSWORD, redis_password, key.read_text()]
    file = table.write(
        "fleet.urls", f"CELERY_BROKER_URL={broker(with_passwords, 'scheduler')}\nSHADHO_REDIS_URL={redis_url}\n"
    )
    file.chmod(0o600)
    table.environment["SHADHO_SIGNING_KEY_FILE"] = str(key)
    where = {"CELERY_BROKER_URL": broker(with_passwords, "worker-cpu"), "SHADHO_REDIS_URL": redis_url}
    worker = table.worker("cpu", "-c", "1", "-l", "DEBUG", **where)
    serves(worker)
    table.study(seconds=0.5)
    launched = table.launch("my_study", "--trials", "4", "--url-file", "fleet.urls")
    table.await_runs(1)
    assert len(table.processes()) >= 3
    assert not exposed(table, hidden)
    assert launched.wait(60).code == 0, table.said()
    # And where something goes wrong: the servers go, or are not there.
    private_redis.kill()
    until(lambda: "Redis does not answer" in worker.err, 20, lambda: worker.err)
    gone = where | {"SHADHO_REDIS_URL": redis_url.replace(str(private_redis.port), str(services.free_port()))}
    for command in (table.worker("cpu", **gone), table.launch("my_study", **gone)):
        refused_in_one_line(command, "SHADHO_REDIS_URL", ":***@")
    assert not exposed(table, hidden)
