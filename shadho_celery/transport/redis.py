"""Redis: a client of the fleet's server, its scripts, and how its errors are to be taken."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError
from redis.retry import Retry

from shadho_celery.core import hardware
from shadho_celery.core.bounds import REDIS_CONNECT_SECONDS, REDIS_SECONDS
from shadho_celery.core.checks import mask, mask_in, one_line
from shadho_celery.errors import ServiceError
from shadho_celery.transport.tls import remedy, tls
from shadho_celery.transport.urls import REDIS

#: With `decode_responses` every answer is text; redis-py's hints do not know which client they describe.
Redis = Any

#: version of the oldest Redis that has all commands that are used here
OLDEST = (6, 2)

_SCRIPTS = Path(__file__).parent / "lua"
_INCLUDE = re.compile(r"^-- include (\w+)\n", re.MULTILINE)
_KEYS = re.compile(r"^-- KEYS .*$", re.MULTILINE)

#: errors that redis-py has an exception for; their text lacks the code
_PASSING = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.ClusterError,
    redis.exceptions.TryAgainError,
)

#: codes of errors that pass: memory or disk are full, the server starts or is busy, another one takes its place, or its
#: users are loaded anew. They are no other words: a script's error has its code in the middle. The last two: Redis 7
#: has no code for a script that a user may not run.
_PASSING_CODES = re.compile(
    r"\b(OOM|MISCONF|LOADING|READONLY|MASTERDOWN|NOREPLICAS|NOMASTERLINK|BUSY|TRYAGAIN|CLUSTERDOWN|INPROG|UNBLOCKED"
    r"|NOPERM|NOAUTH|WRONGPASS)\b|user executing the script|ACL failure in script"
)


def connect(url: str) -> Redis:
    """Return a client of the Redis at `url`, tested. Raises ServiceError if the server does not answer."""
    try:
        _check_database(url)
        options = {"socket_connect_timeout": REDIS_CONNECT_SECONDS, "decode_responses": True, **tls(url)}
        # Less patient than later: a person waits for the answer.
        impatient = {"socket_timeout": REDIS_CONNECT_SECONDS, "retry": Retry(NoBackoff(), 1)}
        with redis.Redis.from_url(url, **impatient, **options) as first:
            _check_server(first)
        # No command takes long; a connection that died in silence should not be waited for.
        # Anybody may have written bytes that are no text: they are read with escapes, and refused where they are used.
        options |= {"encoding_errors": "backslashreplace"}
        return redis.Redis.from_url(url, socket_timeout=REDIS_SECONDS, health_check_interval=15, **options)
    # The last two: redis-py cannot read the URL, or does not know an option in it.
    except (redis.RedisError, OSError, ValueError, TypeError) as error:
        cause = one_line(mask_in(str(error), url))
        raise ServiceError(f"Redis at {mask(url)} cannot be used ({cause}); {remedy(cause, REDIS)}") from error


def _check_database(url: str) -> None:
    """Raise ValueError for a path that is no number: redis-py would take database 0."""
    parts = urlsplit(url)
    if parts.scheme in {"redis", "rediss"} and not re.fullmatch(r"/?|/\d+", parts.path):
        raise ValueError(f"{parts.path[1:]!r} is no number of a database")


def _check_server(client: Redis) -> None:
    """Raise RedisError unless we can use the server: by HELLO, a command that no ACL forbids."""
    try:
        answer = client.execute_command("HELLO")
    except redis.ResponseError as error:
        if "unknown command" not in str(error):
            raise
        answer = {"version": "before 6.0"}
    facts = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
    version = str(facts["version"])
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise redis.RedisError(f"its version is {version}; Redis {oldest} or Valkey is needed")
    if facts.get("mode") == "cluster":
        raise redis.RedisError("it is a Redis Cluster, which is not supported; use one of a single node")


def keys(study: str, *names: str) -> list[str]:
    """Return the study's keys of these names."""
    return [f"shadho:{study}:{name}" for name in names]


def run(client: Redis, name: str, study: str, *args: int | str) -> Any:
    """Run the script ``lua/NAME.lua`` on the keys of `study` that its header names; return its answer."""
    return run_on(client, name, keys(study, *_script(name)[2]), *args)


def run_on(client: Redis, name: str, on: Sequence[str], *args: int | str | bytes) -> Any:
    """Run the script ``lua/NAME.lua`` on the keys `on`; return its answer."""
    source, digest, _ = _script(name)
    try:
        return client.evalsha(digest, len(on), *on, *args)
    except NoScriptError:
        # The server has forgotten its scripts, as after a restart or on another replica; `eval` stores them again.
        return client.eval(source, len(on), *on, *args)


@cache
def _script(name: str) -> tuple[str, str, list[str]]:
    """Return a script's source, its SHA-1 by which Redis knows it, and the names of its keys."""
    source = _source(name)
    names = re.findall(r"\d+ (\w+)", _KEYS.findall(source)[0])
    return source, hashlib.sha1(source.encode()).hexdigest(), names


def _source(name: str) -> str:
    text = (_SCRIPTS / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: _source(found[1]), text)


def is_outage(error: Exception) -> bool:
    """Return whether Redis will do as asked once its operator has repaired it: the command is late, and not lost.

    For calls after the start: an error at the start is told to the user.
    """
    # The error of a pipeline begins with the command that caused it, which may have any words.
    said = str(error).partition("caused error: ")[2] or str(error)
    return isinstance(error, _PASSING) or _PASSING_CODES.search(said) is not None or is_spoilt(error)


def is_spoilt(error: Exception) -> bool:
    """Return whether a key cannot be used as it is: the scheduler removes it (`SchedulerChannel.repair`)."""
    # Somewhere in the text: before it, scripts and pipelines say where it happened.
    return any(words in str(error) for words in ("WRONGTYPE", "exhausted the last possible ID"))


def count(text: str | None) -> int:
    """Return the number of a counter in Redis, 0 for what is none."""
    return int(text) if text and text.isdecimal() and len(text) < 16 else 0


def own_address(client: Redis) -> str:
    """Return the address by which the fleet's other machines reach this one.

    It is the one in SHADHO_HOST, else the address that this machine has on the way to Redis: 127.0.0.1 if Redis is on
    this machine, too.
    """
    place = client.connection_pool.connection_kwargs
    if told := os.environ.get("SHADHO_HOST"):
        return told
    if "path" in place:
        return "127.0.0.1"
    return hardware.own_address(place.get("host", "localhost"), place.get("port", 6379))


def flush(calls: list[Callable[[], object]]) -> None:
    """Make the pending `calls` in their order; remove each one that succeeds. Raises redis-py's errors."""
    while calls:
        calls[0]()
        del calls[0]


@contextmanager
def outages_pass() -> Iterator[None]:
    """Pass over an outage: the caller tries again later. Raises ServiceError for any other error of Redis."""
    try:
        yield
    except redis.RedisError as error:
        if not is_outage(error):
            raise unusable(error) from error


@contextmanager
def refusals() -> Iterator[None]:
    """Raise ServiceError for every error of Redis."""
    try:
        yield
    except redis.RedisError as error:
        raise unusable(error) from error


def unusable(error: redis.RedisError) -> ServiceError:
    """Return the error of Redis with its remedy."""
    return ServiceError(
        f"Redis cannot be used at the moment ({one_line(error)}); check its server, its memory, its disk, and what its "
        "user may do"
    )
