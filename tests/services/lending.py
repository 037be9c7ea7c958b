"""Which server a test session uses, and how each test gets a part of it for itself."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import quote, urlsplit

import amqp
import pytest
import redis
import sqlalchemy

from services.processes import MARK, PATIENCE, Server, Unavailable
from services.servers import (
    PostgresServer,
    RabbitServer,
    RedisServer,
    amqp_answers,
    postgres_answers,
    redis_answers,
)

S = TypeVar("S", bound=Server)

#: The databases of a shared Redis that tests may fill and flush; the others belong to its owner.
TEST_DBS = range(9, 16)

#: names the Redis of the tests
REDIS_VARIABLE = "SHADHO_TEST_REDIS_URL"

#: seconds to wait for a database of a named server while the tests of other processes have them all
LENT_SECONDS = 30.0 * PATIENCE


@contextlib.contextmanager
def service(
    variable: str,
    standard: tuple[str, ...],
    answers: Callable[[str], object],
    make: Callable[[], Server],
) -> Iterator[tuple[str, Server | None]]:
    """Yield (URL, the server where it is ours) by the order above; `make` makes the one that may be started."""
    if url := os.environ.get(variable):
        answers(url)  # who names one means it: no silent other
        yield url, None
        return
    for url in standard:
        with contextlib.suppress(Exception):
            answers(url)
            break
    else:
        url = None
    if url:
        yield url, None
        return
    with private(make, f"nothing answers on {standard[0]}, {variable} is not set") as server:
        yield server.url, server


@contextlib.contextmanager
def private(make: Callable[[], S], why: str = "a private server is needed") -> Iterator[S]:
    """Start a server, and end it with the block."""
    try:
        server = make()
        server.start()
    except Unavailable as error:
        _without(f"{why}; {error}")
    try:
        yield server
    finally:
        server.stop()


def _without(why: str) -> NoReturn:
    """Skip the test that lacks a service; fail it where CI=true."""
    message = f"no service: {why}"
    if os.environ.get("CI") == "true":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def redis_service() -> contextlib.AbstractContextManager[tuple[str, Server | None]]:
    return service(REDIS_VARIABLE, ("redis://127.0.0.1:6379/0",), redis_answers, RedisServer)


def amqp_service() -> contextlib.AbstractContextManager[tuple[str, Server | None]]:
    standard = ("amqp://guest:guest@127.0.0.1:5672//",)
    return service("SHADHO_TEST_AMQP_URL", standard, amqp_answers, RabbitServer)


def postgres_service() -> contextlib.AbstractContextManager[tuple[str, Server | None]]:
    address = "127.0.0.1:5432/postgres"
    standard = (f"postgresql+psycopg://postgres@{address}", f"postgresql+psycopg://postgres:postgres@{address}")
    return service("SHADHO_TEST_POSTGRES_URL", standard, postgres_answers, PostgresServer)


@contextlib.contextmanager
def redis_db(server_url: str) -> Iterator[str]:
    """Lend one empty database of that server, and flush it afterwards; where all are in use, lend a private server.

    A server that somebody named has no other beside it: its databases are waited for. The mark stays: a worker of the
    test that ends late may announce itself once more, and what it wrote is nobody's data.
    """
    named = REDIS_VARIABLE in os.environ
    base = urlsplit(server_url)
    deadline = time.monotonic() + (LENT_SECONDS if named else 0)
    while True:
        for number in TEST_DBS:
            url = base._replace(path=f"/{number}").geturl()
            with _lock(number) as is_ours, redis.Redis.from_url(url) as client:
                # Data without the mark is somebody's; what a killed session left carries it.
                if not is_ours or (client.dbsize() and not client.exists(MARK)) or _is_used(client, number):
                    continue
                client.flushdb()
                client.set(MARK, os.getpid())
                try:
                    yield url
                finally:
                    client.pipeline().flushdb().set(MARK, os.getpid()).execute()
                return
        if time.monotonic() >= deadline:
            break
        time.sleep(0.5)
    used = f"databases {TEST_DBS[0]} to {TEST_DBS[-1]} of {base.hostname}:{base.port} are all in use: flush one"
    if named:
        _without(used)
    with private(RedisServer, used) as server:
        yield server.url


def _is_used(client: redis.Redis, number: int) -> bool:
    """Return whether another client is connected to this database, such as a worker that a killed session has left."""
    own = client.client_id()
    return any(each["db"] == str(number) and each["id"] != str(own) for each in client.client_list())


@contextlib.contextmanager
def _lock(number: int) -> Iterator[bool]:
    """Keep this machine's other test sessions from the database of this number; yield False if one of them has it.

    The lock ends with its process. It is one per number, whatever the server: a name per private server would leave a
    file behind for each.
    """
    path = Path(tempfile.gettempdir()) / f"shadho-test-redis-{os.getuid()}-{number}.lock"
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def amqp_vhost(url: str, ctl: Callable[..., str]) -> Iterator[str]:
    """Lend a virtual host of that broker; where `ctl` may not make one, the URL as it is."""
    name = f"shadho-test-{uuid.uuid4().hex[:12]}"
    parts = urlsplit(url)
    lent = parts._replace(path=f"/{name}").geturl()
    made = False
    try:
        try:
            ctl("add_vhost", name)
            made = True
            ctl("set_permissions", "-p", name, parts.username or "guest", ".*", ".*", ".*")
            amqp_answers(lent)
        except (Unavailable, OSError, amqp.AMQPError):
            lent = url  # its rabbitmqctl is not ours to call, or is another broker's
        yield lent
    finally:
        if made:
            ctl("delete_vhost", name)


@contextlib.contextmanager
def postgres_database(server_url: str) -> Iterator[str]:
    """Lend a fresh database of that server, and drop it afterwards with its open connections."""
    name = f"shadho_test_{uuid.uuid4().hex[:12]}"
    engine = sqlalchemy.create_engine(server_url, poolclass=sqlalchemy.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(f'create database "{name}"'))
    try:
        yield urlsplit(server_url)._replace(path=f"/{quote(name)}").geturl()
    finally:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text(f'drop database "{name}" with (force)'))
