"""Limits and state of the broker and of Redis, which the command `doctor` shows.

The broker's version, and whether its memory or disk is nearly full, are read over AMQP. RabbitMQ's consumer timeout can
be read only with `rabbitmqctl` on the broker's machine. A field is None if its value is unknown.
"""

from __future__ import annotations

import math
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import amqp
import kombu
import redis
from kombu.exceptions import KombuError

from shadho_celery.core.checks import one_line
from shadho_celery.core.system import BROKER_SECONDS, RABBITMQCTL_SECONDS
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.broker import MISUNDERSTOOD, NOWHERE, configured, opened, unusable
from shadho_celery.fleet.celery_settings import configuration
from shadho_celery.fleet.redis import Redis

#: host names in a broker's URL that mean this machine
_HERE = frozenset({"localhost", "127.0.0.1", "::1", socket.gethostname()})

#: Erlang expression that returns the consumer timeout in milliseconds, and the ports that the node listens on
_ASKED = (
    "{application:get_env(rabbit, consumer_timeout, 1800000), "
    "[element(6, L) || L <- rabbit_networking:active_listeners()]}."
)
_ANSWER = re.compile(r"\{(\w+),\s*\[([\d,\s]*)\]\}")


@dataclass(frozen=True, kw_only=True)
class BrokerFacts:
    """Facts about a broker."""

    #: product and version, such as ``RabbitMQ 3.10.8``; ``Redis`` for a Redis server
    product: str
    #: seconds that the opening of a connection took
    seconds: float
    #: False if RabbitMQ accepts no messages, because its memory or disk is nearly full; None if unknown
    accepts: bool | None = None
    #: seconds after which RabbitMQ takes back an unacknowledged message; infinite if it never does; None if unknown
    consumer_timeout: float | None = None
    #: seconds after which an unacknowledged message in Redis is delivered again, by our settings; None for RabbitMQ
    visibility: float | None = None

    @property
    def is_rabbitmq(self) -> bool:
        """True for a broker that speaks AMQP."""
        return self.visibility is None


@dataclass(frozen=True, kw_only=True)
class RedisFacts:
    """Facts about a Redis server from its INFO."""

    #: the server's policy when its memory is full, such as ``noeviction``
    policy: str
    #: bytes of memory in use, and below it the maximum; 0 for no maximum
    used: int
    most: int
    #: True if the server keeps an append-only file
    appends: bool
    #: False if the server's last write to disk has failed
    is_saved: bool


def broker_facts() -> BrokerFacts:
    """Return facts about the configured broker. Raises ServiceError if it cannot be used."""
    settings, connection = configuration(), configured()
    began = time.monotonic()
    try:
        with opened(connection):
            seconds = time.monotonic() - began
            if connection.transport.driver_type != "amqp":
                visibility = (settings.get("broker_transport_options") or {}).get("visibility_timeout", 3600)
                return BrokerFacts(product="Redis", seconds=seconds, visibility=float(visibility))
            told = connection.connection.server_properties
            product = one_line(f"{told.get('product', 'AMQP')} {told.get('version', '')}")
            parts = urlsplit(connection.as_uri())
            timeout = _consumer_timeout(parts.hostname or "localhost", parts.port or 5672)
            accepts = _accepts(connection)
            return BrokerFacts(product=product, seconds=seconds, accepts=accepts, consumer_timeout=timeout)
    except (*connection.connection_errors, *connection.channel_errors, KombuError, OSError, *MISUNDERSTOOD) as error:
        raise unusable(settings["broker_url"], error) from error


def _accepts(connection: kombu.Connection) -> bool | None:
    """Return whether RabbitMQ accepts messages: send two to a queue that does not exist. RabbitMQ confirms and drops
    them.

    One message is not enough, because RabbitMQ blocks a connection only after the first message on it. Returns None if
    the user may not publish.
    """
    channel = connection.channel()
    try:
        for _ in range(2):
            channel.basic_publish_confirm(amqp.Message(""), routing_key=NOWHERE, confirm_timeout=BROKER_SECONDS)
    except TimeoutError:
        return False
    except connection.channel_errors:
        return None
    return True


def redis_facts(client: Redis) -> RedisFacts:
    """Return facts about a Redis server. Raises ServiceError if INFO fails or is not permitted."""
    try:
        info = client.info()
        return RedisFacts(
            policy=str(info["maxmemory_policy"]),
            used=int(info["used_memory"]),
            most=int(info["maxmemory"]),
            appends=bool(info["aof_enabled"]),
            is_saved="err" not in {info.get("aof_last_write_status"), info.get("rdb_last_bgsave_status")},
        )
    except (redis.RedisError, KeyError, ValueError) as error:
        raise ServiceError(f"its INFO cannot be read: {one_line(error)}") from error


def _consumer_timeout(host: str, port: int) -> float | None:
    """Run rabbitmqctl if the broker is on this machine, and return the consumer timeout in seconds. Return None if that
    fails, or if the node of rabbitmqctl does not listen on the broker's port.
    """
    command = shutil.which("rabbitmqctl") if host in _HERE else None
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, "-q", "eval", _ASKED],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=RABBITMQCTL_SECONDS,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    found = _ANSWER.search(done.stdout)
    if found is None or str(port) not in re.findall(r"\d+", found[2]):
        return None
    return float(found[1]) / 1000 if found[1].isdecimal() else math.inf
