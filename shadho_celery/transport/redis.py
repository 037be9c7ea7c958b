"""A client of the fleet's Redis, its scripts, and what its errors mean."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shadho_celery.core import hardware
from shadho_celery.core.checks import one_line
from shadho_celery.errors import ServiceError
from shadho_celery.transport.tls import remedy, tls
from shadho_celery.transport.urls import REDIS, mask

#: With `decode_responses` every answer is text; redis-py's hints do not know which client they describe.
Redis = Any

#: seconds to wait for a connection to Redis
CONNECT_SECONDS = 3.0

_SCRIPTS = Path(__file__).parent / "lua"
_INCLUDE = re.compile(r"^-- include (\w+)\n", re.MULTILINE)

#: how Redis begins an error that will pass: memory or disk are full, it starts, it is being replaced
_PASSING = ("OOM", "MISCONF", "LOADING", "READONLY", "MASTERDOWN", "NOREPLICAS", "BUSY", "TRYAGAIN", "CLUSTERDOWN")


def connect(url: str) -> Redis:
    """Return a client of the Redis at `url`, tested. Raises ServiceError where it does not answer."""
    secure = tls(url)
    try:
        # Asked with less patience than later: somebody waits for the answer.
        with redis.Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=CONNECT_SECONDS,
            retry=Retry(NoBackoff(), 1),
            **secure,
        ) as first:
            first.ping()
        return redis.Redis.from_url(
            url,
            decode_responses=True,
            socket_connect_timeout=CONNECT_SECONDS,
            # Nothing asked of Redis takes long; a connection that died in silence should not be waited for.
            socket_timeout=10,
            health_check_interval=15,
            **secure,
        )
    except (redis.RedisError, OSError, ValueError) as error:
        cause = one_line(error)
        raise ServiceError(f"Redis at {mask(url)} cannot be used ({cause}); {remedy(cause, REDIS)}") from error


def script(client: Redis, name: str) -> Callable[..., Any]:
    """Return the script ``lua/NAME.lua`` as a function of `keys` and `args`, to be run by `client`."""
    registered: Callable[..., Any] = client.register_script(_source(name))
    return registered


@cache
def _source(name: str) -> str:
    text = (_SCRIPTS / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: _source(found[1]), text)


def is_outage(error: Exception) -> bool:
    """Return True where Redis will do as asked once it has been put right: nothing is lost, only later."""
    # redis-py makes an exception of its own of some of these, and then leaves the word out.
    passing = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.OutOfMemoryError, redis.ReadOnlyError)
    # Of a pipeline it tells first which command it was.
    said = str(error).partition("caused error: ")[2] or str(error)
    return isinstance(error, passing) or said.startswith(_PASSING)


def own_address(client: Redis) -> str:
    """Return the address by which the fleet's other machines reach this one.

    It is what SHADHO_HOST says, else the address that this machine has on the way to Redis: 127.0.0.1 where Redis is
    on this machine, too.
    """
    place = client.connection_pool.connection_kwargs
    if told := os.environ.get("SHADHO_HOST"):
        return told
    return (
        "127.0.0.1"
        if "path" in place
        else hardware.own_address(place.get("host", "localhost"), place.get("port", 6379))
    )


@contextmanager
def outages_pass() -> Iterator[None]:
    """Pass over an outage: nothing is known to have happened, and nothing is lost. Raises ServiceError otherwise."""
    try:
        yield
    except redis.RedisError as error:
        if not is_outage(error):
            raise unusable(error) from error


def unusable(error: redis.RedisError) -> ServiceError:
    """Return the error of Redis with its remedy."""
    return ServiceError(
        f"Redis cannot be used at the moment ({one_line(error)}); check its server, its memory and its disk"
    )
