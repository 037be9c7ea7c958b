"""Who may do what on a fleet: by TLS, by signatures, by RabbitMQ's and Redis' own users, on real servers."""

from __future__ import annotations

import json
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kombu
import msgspec
import pytest
import redis
import services
from acceptance.commands import Command, Desk, desk, until

from shadho_celery.core.hardware import Machine
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Outcome, Result, TrialState
from shadho_celery.fleet.broker import PROTOCOL, message, queue
from shadho_celery.fleet.redis import connect
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
def guarded() -> Iterator[services.RabbitServer]:
    """A RabbitMQ with the users of deploy/, each of which has been given PASSWORD."""
    node = services.start_any("a private RabbitMQ is needed", services.RabbitServer)
    assert isinstance(node, services.RabbitServer)
    try:
        node.ctl("import_definitions", str(DEPLOY / "rabbitmq" / "definitions.json"))
        yield node
    finally:
        node.stop()


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


def test_a_worker_of_a_class_runs_what_the_scheduler_has_sent(
    table: Desk, with_passwords: services.RabbitServer, redis_url: str
) -> None:
    table.environment["SHADHO_REDIS_URL"] = redis_url
    words = ("-c", "1", "-l", "INFO")
    worker = table.worker("cpu", *words, CELERY_BROKER_URL=broker(with_passwords, "worker-cpu"))
    serves(worker)
    launched = table.launch(
        "my_study", "--trials", "3", "--json", CELERY_BROKER_URL=broker(with_passwords, "scheduler")
    )
    assert launched.wait(60).code == 0, table.said()
    assert launched.json()["trials"]["complete"] == 3
    assert {name for _, _, name, _ in table.runs()} == {"cpu"}
    assert "ACCESS_REFUSED" not in worker.err


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
    server = services.start_any("a private Redis with TLS is needed", services.TlsRedisServer)
    assert isinstance(server, services.TlsRedisServer)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def tls_rabbitmq() -> Iterator[services.TlsRabbitServer]:
    """It wants a certificate of its clients, too."""
    server = services.start_any("a private RabbitMQ with TLS is needed", lambda: services.TlsRabbitServer(clients=True))
    assert isinstance(server, services.TlsRabbitServer)
    yield server
    server.stop()


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
    table: Desk, tls_redis: services.TlsRedisServer, tls_rabbitmq: services.TlsRabbitServer
) -> None:
    """Redis' own authority is named in its URL, beside which the environment's files do not count."""
    table.environment["SHADHO_REDIS_URL"] = f"{tls_redis.url}?ssl_ca_certs={tls_redis.files['ca']}"
    table.environment["CELERY_BROKER_URL"] = tls_rabbitmq.tls_url
    files = {"SHADHO_TLS_CA": "ca", "SHADHO_TLS_CERT": "cert", "SHADHO_TLS_KEY": "key"}
    table.environment |= {variable: tls_rabbitmq.files[name] for variable, name in files.items()}
    runs_a_study(table)


def test_a_certificate_that_is_not_trusted_is_refused_in_one_line_by_worker_and_scheduler(
    table: Desk, tls_redis: services.TlsRedisServer, tls_rabbitmq: services.TlsRabbitServer, redis_url: str
) -> None:
    words = ("CERTIFICATE_VERIFY_FAILED", "SHADHO_TLS_CA")
    for urls in (
        {"SHADHO_REDIS_URL": tls_redis.url, "CELERY_BROKER_URL": tls_redis.url},
        {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": tls_redis.url},
        {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": tls_rabbitmq.tls_url},
    ):
        commands = [table.worker("cpu", "-c", "1", **urls), table.launch("my_study", **urls)]
        for command in commands:
            refused_in_one_line(command, *words)
    assert not table.trials() if (table.folder / "shadho.db").exists() else True


@pytest.mark.parametrize("variable", ["SHADHO_TLS_CA", "SHADHO_TLS_CERT"])
def test_a_tls_file_that_is_not_there_is_named_in_one_line(table: Desk, variable: str) -> None:
    table.environment |= {"CELERY_BROKER_URL": "amqps://127.0.0.1", "SHADHO_REDIS_URL": "rediss://127.0.0.1"}
    table.environment[variable] = "/nowhere/file.pem"
    for command in (table.worker("cpu"), table.launch("my_study")):
        refused_in_one_line(command, variable, "/nowhere/file.pem")


# Signatures


@pytest.fixture
def key(table: Desk) -> Path:
    path = table.write("shadho.key", secrets.token_hex(32))
    path.chmod(0o600)
    return path


@pytest.fixture
def signed(table: Desk, key: Path, redis_url: str) -> Command:
    """A worker of class cpu that has a key, on a Redis that is the broker too."""
    table.environment |= {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": redis_url}
    worker = table.worker("cpu", "-c", "1", "-l", "INFO", SHADHO_SIGNING_KEY_FILE=str(key))
    serves(worker)
    return worker


def put(url: str, payload: Any, signer: Signer | None = None, **headers: Any) -> None:
    """Put a message into the class's queue, as anybody can who reaches the broker."""
    _, own, properties = message(Payload(study="k", module="m", attempts=[]))
    if signer is not None:
        own["shadho_signature"] = message(msgspec.convert(payload, Payload), signer)[1]["shadho_signature"]
    with kombu.Connection(url) as connection:
        kombu.Producer(connection.default_channel).publish(
            ([payload], {}, {}),
            exchange="",
            routing_key="cpu",
            headers={**own, **headers},
            serializer="json",
            **properties,
        )


def order(number: int = 0, **changes: Any) -> dict[str, Any]:
    attempt = Attempt(number=number, attempt=1, subspace="all", params={"side": 0, "x": 0.5}, seed=1)
    payload = Payload(study="0123456789abcdef", module="my_study", attempts=[attempt])
    return {**msgspec.to_builtins(payload), **changes}


def test_a_worker_with_a_key_does_what_is_signed_with_it_and_nothing_else(
    table: Desk, signed: Command, key: Path, redis_url: str
) -> None:
    for refused in (Signer(), Signer(b"another key of sixteen bytes")):
        put(redis_url, order(), refused)
    # A signature holds for its own payload only.
    _, headers, _ = message(msgspec.convert(order(), Payload), Signer(key.read_bytes()))
    put(redis_url, order(1), shadho_signature=headers["shadho_signature"])
    until(lambda: signed.err.count("it is not signed with this worker's key") == 3, 20, lambda: signed.err)
    assert not table.runs()
    launched = table.launch("my_study", "--trials", "3", "--json", "--signing-key-file", key.name)
    assert launched.wait(60).code == 0, table.said()
    assert launched.json()["trials"]["complete"] == len(table.runs()) == 3


def test_results_that_are_not_signed_count_for_nothing(table: Desk, signed: Command, key: Path, redis_url: str) -> None:
    """Any client of Redis can write a low loss into a study's stream."""
    outcome = Outcome(state=TrialState.COMPLETE, loss=-1e9)
    forged = msgspec.to_builtins(Result(number=0, attempt=1, outcome=outcome, at=0.0))
    table.study(seconds=1.0)
    launched = table.launch("my_study", "--trials", "3", "--json", SHADHO_SIGNING_KEY_FILE=str(key))
    table.await_runs(1)
    with connect(redis_url) as client:
        [stream] = list(client.scan_iter("shadho:*:events"))
        client.xadd(stream, {"e": json.dumps(forged)})
        client.xadd(stream, {"e": 64 * "f" + json.dumps(forged)})
    assert launched.wait(60).code == 0, table.said()
    assert launched.json()["best"]["loss"] >= 0


def test_a_scheduler_without_the_workers_key_is_told_so_and_sends_nothing(
    table: Desk, signed: Command, redis_url: str
) -> None:
    launched = table.launch("my_study", "--trials", "3")
    launched.says("--signing-key-file", 40)
    launched.end()
    assert not table.runs()
    assert "it is not signed" not in signed.err


@pytest.mark.parametrize("option", [False, True], ids=["environment", "option"])
def test_a_key_that_others_can_read_is_refused_in_one_line(
    table: Desk, key: Path, redis_url: str, option: bool
) -> None:
    table.environment |= {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": redis_url}
    key.chmod(0o644)
    if option:
        words = ("--signing-key-file", str(key))
        commands = [
            table.launch("my_study", *words),
            table.start("python", "-m", "shadho_celery.worker", "--class", "cpu", *words),
        ]
    else:
        table.environment["SHADHO_SIGNING_KEY_FILE"] = str(key)
        commands = [table.launch("my_study"), table.worker("cpu")]
    for command in commands:
        refused_in_one_line(command, f"chmod 600 {key}")
    assert not (table.folder / "shadho.db").exists() or not table.trials()


def test_a_message_that_points_out_of_the_checkpoint_folder_is_refused_and_the_worker_lives(
    table: Desk, redis_url: str
) -> None:
    table.environment |= {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": redis_url}
    worker = table.worker("cpu", "-c", "1", "-l", "INFO")
    serves(worker)
    before = {path for path in table.folder.parent.rglob("*") if "command-" not in path.name}
    forged: list[Any] = [
        order(study="../../escaped"),
        order(study="/tmp/escaped"),
        order("../escaped"),  # type: ignore[arg-type]
        order(module="os.path:system"),
        order(attempts="all"),
        "no payload at all",
        None,
    ]
    for payload in forged:
        put(redis_url, payload)
    put(redis_url, order(), shadho_protocol=PROTOCOL - 1)
    until(lambda: worker.err.count("a message was refused") == len(forged), 20, lambda: worker.err)
    worker.says(f"a message of protocol {PROTOCOL - 1} was refused: this worker speaks {PROTOCOL}")
    assert {path for path in table.folder.parent.rglob("*") if "command-" not in path.name} == before
    assert "Traceback" not in worker.err
    launched = table.launch("my_study", "--trials", "2", "--json")
    assert launched.wait(60).code == 0, table.said()


def test_a_scheduler_names_both_versions_where_the_workers_speak_another(table: Desk, redis_url: str) -> None:
    old = Worker(protocol=PROTOCOL - 1, compute_class="cpu", slots=1, imports=["my_study"])
    table.environment |= {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": redis_url}
    launched = table.launch("my_study", "--trials", "2")
    with connect(redis_url) as client:

        def told() -> bool:
            Registry(client, Worker).announce("old", old)
            return f"speak protocol {PROTOCOL - 1}, this scheduler {PROTOCOL}" in launched.err + launched.out

        until(told, 40, lambda: launched.err)
    launched.end()


# Redis' users


@pytest.fixture
def redis_with_users(tmp_path: Path) -> Iterator[str]:
    """URL, with ROLE in place of the user, of a Redis with deploy/'s users, each of which has been given PASSWORD."""
    users = tmp_path / "users.acl"
    users.write_text((DEPLOY / "redis" / "users.acl").read_text())
    conf = tmp_path / "redis.conf"
    conf.write_text(f"aclfile {users}\n")
    server = services.start_any("a private Redis is needed", lambda: services.RedisServer(conf))
    try:
        with redis.Redis.from_url(server.url) as client:
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
    finally:
        server.stop()


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
        host.join()
        assert host.neighbours() == {}
        host.leave()
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


def test_the_store_is_for_its_owner_only(table: Desk, redis_url: str) -> None:
    table.environment |= {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": redis_url}
    serves(table.worker("cpu", "-c", "1", "-l", "INFO"))
    assert table.launch("my_study", "--trials", "2").wait(60).code == 0, table.said()
    assert stat.S_IMODE((table.folder / "shadho.db").stat().st_mode) == 0o600
    for name in ("../escape", "a/b", ".hidden"):
        refused_in_one_line(table.launch("my_study", "--study", name), "cannot name a study")
