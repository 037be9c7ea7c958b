"""Redis: the client for the fleet's server, the scripts that run there, and the classification of errors."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, NoScriptError
from redis.retry import Retry

from shadho_celery.core import addresses
from shadho_celery.core.checks import mask, mask_in, one_line
from shadho_celery.core.system import REDIS_CONNECT_SECONDS, REDIS_SECONDS
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.urls import REDIS, remedy, tls

#: type of a client with `decode_responses`, whose answers are text; redis-py's type hints cannot express that
Redis = Any

#: oldest version of Redis with all commands used here
OLDEST = (6, 2)

_SCRIPTS = Path(__file__).parent / "lua"
_INCLUDE = re.compile(r"^-- include (\w+)\n", re.MULTILINE)
_KEYS = re.compile(r"^-- KEYS .*$", re.MULTILINE)

#: exceptions of redis-py for temporary errors whose text does not contain the error code
_PASSING = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.ClusterError,
    redis.exceptions.TryAgainError,
    InvalidResponse,
)

#: commands and the types of their answers. A program that is not Redis, or a proxy, may answer with another type
_ANSWERS: Mapping[str, Any] = (
    dict.fromkeys(("GET", "GETRANGE", "HGET"), str | None)
    | dict.fromkeys(("DEL", "EXISTS", "PTTL"), int)
    | dict.fromkeys(("MGET", "HMGET"), list[str | None])
    | {"HGETALL": dict[str, str], "HKEYS": list[str], "SMEMBERS": set[str], "SMISMEMBER": list[int]}
    | {"TYPE": str, "TIME": tuple[int, int], "INFO": dict, "XREAD": Any}
)

#: Codes of temporary errors: memory or disk is full, the server is starting, busy or being replaced, or its users are
#: being reloaded. They can occur in the middle of a text, as in a script's error. The last two entries are texts of
#: Redis 7, which has no code for a script that a user may not run.
_PASSING_CODES = re.compile(
    r"\b(OOM|MISCONF|LOADING|READONLY|MASTERDOWN|NOREPLICAS|NOMASTERLINK|BUSY|TRYAGAIN|CLUSTERDOWN|INPROG|UNBLOCKED"
    r"|NOPERM|NOAUTH|WRONGPASS)\b|user executing the script|ACL failure in script"
)


def connect(url: str, how: str = "") -> Redis:
    """Return a tested client of the Redis server at `url`.

    Raises ServiceError with the remedy `how`, by default that of `urls.remedy`, if the server does not answer.
    """
    try:
        _check_database(url)
        options = {"socket_connect_timeout": REDIS_CONNECT_SECONDS, "decode_responses": True, **tls(url)}
        # This timeout is shorter than that of later commands, because a person waits for the answer.
        impatient = {"socket_timeout": REDIS_CONNECT_SECONDS, "retry": Retry(NoBackoff(), 1)}
        with redis.Redis.from_url(url, **impatient, **options) as first:
            _check_server(first)
        # No command takes long, so a short timeout detects a connection that was lost silently. Any client may have
        # written bytes that are not UTF-8: they are read as escapes, and refused where they are used.
        options |= {"encoding_errors": "backslashreplace"}
        client = redis.Redis.from_url(url, socket_timeout=REDIS_SECONDS, health_check_interval=15, **options)
        reads: Mapping[str, Any] = client.response_callbacks
        for command, kind in _ANSWERS.items():
            client.set_response_callback(command, partial(_answer, kind, reads.get(command)))
        return client
    # ValueError and TypeError: redis-py cannot parse the URL, or does not know an option in it. AttributeError: it does
    # not understand the answers, because another program has the port.
    except (redis.RedisError, OSError, ValueError, TypeError, AttributeError) as error:
        cause = one_line(mask_in(str(error), url))
        raise ServiceError(f"Redis at {mask(url)} cannot be used ({cause}); {how or remedy(cause, REDIS)}") from error


def _answer(kind: Any, read: Callable[..., Any] | None, answer: object, **options: Any) -> Any:
    """Return an answer, as `read` of redis-py makes it. Raises InvalidResponse, an error of Redis, for another type."""
    try:
        return msgspec.convert(answer if read is None else read(answer, **options), kind)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise InvalidResponse(f"this is not an answer of Redis: {one_line(answer, 40)}") from error


def _check_database(url: str) -> None:
    """Raise ValueError for a path that is not a number: redis-py would silently use database 0."""
    parts = urlsplit(url)
    if parts.scheme in {"redis", "rediss"} and not re.fullmatch(r"/?|/\d+", parts.path):
        raise ValueError(f"{parts.path[1:]!r} is not the number of a database")


def _check_server(client: Redis) -> None:
    """Raise RedisError unless the server can be used. This uses HELLO, a command that no ACL forbids."""
    try:
        answer = client.execute_command("HELLO")
    except redis.ResponseError as error:
        if "unknown command" not in str(error):
            raise
        answer = {"version": "before 6.0"}
    facts = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
    version = str(facts.get("version", "not known"))
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise redis.RedisError(f"its version is {version}; Redis {oldest} or Valkey is needed")
    if facts.get("mode") == "cluster":
        raise redis.RedisError("it is a Redis Cluster, which is not supported; use one of a single node")


def keys(study: str, *names: str) -> list[str]:
    """Return the keys in Redis that a study uses for these `names`, such as ``shadho:STUDY:events``."""
    return [f"shadho:{study}:{name}" for name in names]


def run(client: Redis, name: str, study: str, *args: int | str) -> Any:
    """Run the script ``lua/NAME.lua`` on the keys of `study` that the script's header lists. Return its answer."""
    return run_on(client, name, keys(study, *_script(name)[2]), *args)


def run_on(client: Redis, name: str, on: Sequence[str], *args: int | str | bytes) -> Any:
    """Run the script ``lua/NAME.lua`` on the keys `on`. Return its answer."""
    source, digest, _ = _script(name)
    try:
        return client.evalsha(digest, len(on), *on, *args)
    except NoScriptError:
        # The server has lost its scripts, as after a restart or a failover; `eval` stores them again.
        return client.eval(source, len(on), *on, *args)


@cache
def _script(name: str) -> tuple[str, str, list[str]]:
    """Return a script's source, its SHA-1 (its id in Redis), and the names of its keys."""
    source = _source(name)
    names = re.findall(r"\d+ (\w+)", _KEYS.findall(source)[0])
    return source, hashlib.sha1(source.encode()).hexdigest(), names


def _source(name: str) -> str:
    text = (_SCRIPTS / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: _source(found[1]), text)


def is_outage(error: Exception) -> bool:
    """Return whether the error is temporary, so that the command can be repeated until the server is available again.

    Do not use this while a process starts, because then the user must see the error.
    """
    # The error of a pipeline begins with the command that caused it, whose text may contain any words.
    said = str(error).partition("caused error: ")[2] or str(error)
    return isinstance(error, _PASSING) or _PASSING_CODES.search(said) is not None or is_spoilt(error)


def is_spoilt(error: Exception) -> bool:
    """Return whether a command failed because of a spoilt key: its type is wrong, or it is a stream that accepts no
    further entries. The scheduler removes such keys (`SchedulerChannel.repair` and `confirm`).
    """
    # Search the whole text: in errors of scripts and pipelines, it begins with the position of the error.
    return any(words in str(error) for words in ("WRONGTYPE", "exhausted the last possible ID"))


def count(text: str | None) -> int:
    """Return the value of a counter in Redis, or 0 if it is missing or not a number."""
    return int(text) if text and text.isdecimal() and len(text) < 16 else 0


def own_address(client: Redis) -> str:
    """Return the address by which the fleet's other machines reach this one.

    It is SHADHO_HOST if set, else the local address of the route to Redis: 127.0.0.1 if Redis is on this machine.
    """
    place = client.connection_pool.connection_kwargs
    host = addresses.LOOPBACK if "path" in place else place.get("host", "localhost")
    return addresses.own_address(host, place.get("port", 6379))


def server_time(client: Redis) -> float:
    """Return the seconds since the epoch, by the server's clock. Raises redis-py's errors."""
    seconds, micros = client.time()
    return float(seconds + micros / 1e6)


def clock_offset(client: Redis) -> float:
    """Return by how many seconds this machine's clock is ahead of that of the Redis server.

    Request and answer are assumed to take equally long. Raises redis-py's errors.
    """
    before = time.time()
    server = server_time(client)
    return (before + time.time()) / 2 - server


def flush(calls: list[Callable[[], object]]) -> None:
    """Make the pending `calls` in order, and remove each call that succeeds. Raises redis-py's errors."""
    while calls:
        calls[0]()
        del calls[0]


@contextmanager
def refusals(is_ignored: Callable[[Exception], bool] = lambda error: False) -> Iterator[None]:
    """Raise ServiceError for an error of Redis in the `with` block, or drop the error if `is_ignored` returns True."""
    try:
        yield
    except redis.RedisError as error:
        if not is_ignored(error):
            raise unusable(error) from error


#: ignores a temporary error of Redis; the caller tries again later. Raises ServiceError for any other error
outages_pass = partial(refusals, is_outage)


@contextmanager
def spoilt_keys_pass(repair: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Ignore an error about a spoilt key (`is_spoilt`), and call `repair`. Only another client can spoil a key."""
    try:
        yield
    except redis.ResponseError as error:
        if not is_spoilt(error):
            raise
        repair()


def unusable(error: redis.RedisError) -> ServiceError:
    """Return a ServiceError for an error of Redis, with its remedy."""
    if isinstance(error, redis.exceptions.NoPermissionError):
        remedy = "give its user the permissions of deploy/redis/users.acl"
    else:
        remedy = "check its server, its memory and its disk"
    return ServiceError(f"Redis cannot be used at the moment ({one_line(error)}); {remedy}")
