"""A server that stands still, or denies a command: no call waits for it without a limit (`core.system`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import services
from celery import Celery
from services.proxy import Proxy
from services.told import ToldExecutor

from shadho_celery.core.hardware import Machine
from shadho_celery.core.payload import Payload
from shadho_celery.errors import ServiceError
from shadho_celery.fleet import broker
from shadho_celery.fleet import redis as our_redis
from shadho_celery.node.consumer import AMQP
from shadho_celery.node.slots import Slots

pytestmark = pytest.mark.timeout(60)

MESSAGE = Payload(study="s", name="s", module="m", attempts=[], timeout=None)


def through(proxy: Proxy, url: str) -> str:
    """The URL of a server by way of the proxy."""
    parts = urlsplit(url)
    return url.replace(f"{parts.hostname}:{parts.port}", f"127.0.0.1:{proxy.port}")


@pytest.fixture(params=["amqp_url", "redis_url"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Proxy, str]]:
    """A proxy before a broker, and the broker's URL through it; all bounds are short."""
    for name in ("BROKER_SECONDS", "BROKER_CONNECT_SECONDS"):
        monkeypatch.setattr(broker, name, 0.5)
    for name in ("REDIS_SECONDS", "REDIS_CONNECT_SECONDS"):
        monkeypatch.setattr(our_redis, name, 0.5)
    url = request.getfixturevalue(request.param)
    with Proxy(urlsplit(url).port or 0) as proxy:
        yield proxy, through(proxy, url)


def test_a_publisher_whose_broker_stands_still_fails_and_later_goes_on(
    way: tuple[Proxy, str], unique: Callable[[str], str]
) -> None:
    """Its request, a new connection, and the end of one: RabbitMQ answers to that, too."""
    proxy, url = way
    name = unique("cpu")
    publisher = broker.Publisher(url)
    publisher.publish([(name, MESSAGE)])
    proxy.blackhole()
    for _ in range(2):
        with pytest.raises(ServiceError, match="cannot be used"):
            publisher.publish([(name, MESSAGE)])
    with pytest.raises(ServiceError, match="cannot be used"):
        broker.Publisher(url)
    proxy.heal(half_open=True)
    publisher.publish([(name, MESSAGE)])
    connection = broker.Connection(url)
    with broker.opened(connection):
        assert (broker.depths_on(connection, [name])[name] or 0) >= 2
    proxy.blackhole()
    publisher.close()


def test_a_connection_of_a_worker_whose_broker_stands_still_can_be_closed(way: tuple[Proxy, str]) -> None:
    """Celery's own connections: at the end of a worker it waits for several answers, one after the other."""
    proxy, url = way
    app = Celery("app", broker=url, amqp=AMQP)
    app.conf.broker_transport_options = {"socket_timeout": 0.5} if url.startswith("redis") else {}
    connection = app.connection_for_read(heartbeat=0)
    channel = connection.default_channel
    proxy.blackhole()
    with pytest.raises((*connection.connection_errors, TimeoutError)):
        channel.queue_declare("cpu", passive=True)
    connection.release()


def test_a_look_into_queues_whose_broker_stands_still_ends(way: tuple[Proxy, str]) -> None:
    proxy, url = way
    connection = broker.Connection(url, transport_options={"socket_timeout": 0.5} if url.startswith("redis") else {})
    with pytest.raises((*connection.connection_errors, OSError)), broker.opened(connection):  # noqa: PT012
        proxy.blackhole()
        broker.depths_on(connection, ["cpu"])


def test_a_redis_that_stands_still_is_an_outage_and_refused_at_the_start(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REDIS_SECONDS", "REDIS_CONNECT_SECONDS"):
        monkeypatch.setattr(our_redis, name, 0.5)
    with Proxy(urlsplit(redis_url).port or 0) as proxy:
        client = our_redis.connect(through(proxy, redis_url))
        proxy.blackhole()
        with pytest.raises(redis.RedisError) as silent:
            client.get("a")
        assert our_redis.is_outage(silent.value)
        with pytest.raises(ServiceError, match="cannot be used"):
            our_redis.connect(through(proxy, redis_url))


# At the start


@pytest.fixture
def denied(private_redis: services.RedisServer) -> Iterator[Any]:
    """A client whose user may connect, and nothing else."""
    with redis.Redis.from_url(private_redis.url) as owner:
        owner.execute_command("ACL", "SETUSER", "new", "on", ">p", "~*", "&*", "-@all", "+@connection")
    with our_redis.connect(private_redis.url.replace("//", "//new:p@")) as client:
        yield client


def test_a_scheduler_or_worker_whose_redis_user_may_not_do_its_work_is_refused_at_its_start(
    denied: Any, redis_url: str, tmp_path: Any
) -> None:
    with pytest.raises(ServiceError, match="permission"):
        ToldExecutor(denied, broker.Publisher(redis_url), "0123456789abcdef", "m")
    slots = Slots(
        denied,
        machine=Machine(),
        compute_class="cpu",
        count=1,
        imports=[],
        checkpoints=tmp_path,
        address="127.0.0.1",
    )
    with pytest.raises(ServiceError, match="permission"):
        slots.check()
