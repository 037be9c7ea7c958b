"""Who lives on the fleet: workers and studies announce themselves in Redis, and are forgotten when they fall silent.

Keys: ``shadho:workers`` and ``shadho:studies`` (sets of names), ``shadho:worker:NAME`` and ``shadho:study:NAME`` (JSON
that expires unless it is renewed).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shadho_celery.errors import ServiceError
from shadho_celery.routing import PROTOCOL, mask
from shadho_celery.tls import remedy, tls

#: With `decode_responses` every answer is text; redis-py's hints do not know which client they describe.
Redis = Any

#: seconds after which a worker or a study that has not announced itself again is gone
ANNOUNCE_SECONDS = 20.0

#: seconds to wait for a connection to Redis
CONNECT_SECONDS = 3.0


def connect(url: str) -> Redis:
    """A client of the Redis at `url`, tested. Raises ServiceError where it does not answer."""
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
        cause = " ".join(str(error).split())[:200]
        raise ServiceError(
            f"Redis at {mask(url)} cannot be used ({cause}); {remedy(cause, 'SHADHO_REDIS_URL')}"
        ) from error


#: how Redis begins an error that will pass: memory or disk are full, it starts, it is being replaced
_PASSING = ("OOM", "MISCONF", "LOADING", "READONLY", "MASTERDOWN", "NOREPLICAS", "BUSY", "TRYAGAIN", "CLUSTERDOWN")


def is_outage(error: Exception) -> bool:
    """True where Redis will do what it was asked once somebody has put it right: nothing is lost, only later."""
    # redis-py makes an exception of its own of some of these, and then leaves the word out.
    passing = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.OutOfMemoryError, redis.ReadOnlyError)
    # Of a pipeline it tells first which command it was.
    said = str(error).partition("caused error: ")[2] or str(error)
    return isinstance(error, passing) or said.startswith(_PASSING)


class Registry:
    """Who lives on the fleet: workers and studies announce themselves, and are forgotten when they fall silent."""

    def __init__(self, client: Redis, kind: str) -> None:
        """`kind` is ``worker`` or ``study``."""
        self._client = client
        self._kind = kind
        self._index = f"shadho:{kind}s" if kind != "study" else "shadho:studies"

    def announce(self, name: str, facts: Mapping[str, Any]) -> None:
        """Be known as `name` with `facts` for the next ANNOUNCE_SECONDS."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.sadd(self._index, name)
            pipe.set(f"shadho:{self._kind}:{name}", json.dumps(facts), px=int(ANNOUNCE_SECONDS * 1000))
            pipe.execute()

    def withdraw(self, name: str) -> None:
        """Be forgotten at once."""
        self._client.delete(f"shadho:{self._kind}:{name}")
        self._client.srem(self._index, name)

    def clear(self) -> None:
        """Forget all: whoever lives announces itself again."""
        self._client.delete(self._index)

    def living(self) -> dict[str, dict[str, Any]]:
        """Facts by name."""
        names = sorted(self._client.smembers(self._index))
        if not names:
            return {}
        found = dict(zip(names, self._client.mget([f"shadho:{self._kind}:{name}" for name in names]), strict=True))
        silent = [name for name, text in found.items() if text is None]
        if silent:
            self._client.srem(self._index, *silent)
        return {name: json.loads(text) for name, text in found.items() if text is not None}


def able(workers: Mapping[str, Mapping[str, Any]], module: str, fingerprint: str = "") -> dict[str, Mapping[str, Any]]:
    """Those of the live `workers` that run `module` and understand us; `fingerprint` is that of our signing key."""
    return {
        name: worker
        for name, worker in workers.items()
        if module in worker["imports"] and _same_protocol(worker) and worker.get("key", "") == fingerprint
    }


def unable(workers: Mapping[str, Mapping[str, Any]], module: str, fingerprint: str = "") -> ServiceError | None:
    """Why none of the live `workers` runs `module`, with the remedy; None where one does."""
    if able(workers, module, fingerprint):
        return None
    if not workers:
        return ServiceError(f"no worker is live; start one on a node: {start_command('gpu_large', module)}")
    having = [worker for worker in workers.values() if module in worker["imports"]]
    if not having:
        name = min(str(worker["compute_class"]) for worker in workers.values())
        return ServiceError(f"no live worker has {module}; start one that has: {start_command(name, module)}")
    if not any(map(_same_protocol, having)):
        theirs = ", ".join(sorted({str(worker.get("protocol")) for worker in having}))
        return ServiceError(
            f"the workers that have {module} speak protocol {theirs}, this scheduler {PROTOCOL}; "
            "install the same version of shadho_celery on both sides"
        )
    return ServiceError(
        f"the workers that have {module} sign with another key than this scheduler, or only one side signs; "
        "give all of them the same --signing-key-file"
    )


def _same_protocol(worker: Mapping[str, Any]) -> bool:
    return bool(worker.get("protocol") == PROTOCOL)


def start_command(compute_class: str, module: str) -> str:
    """What a person types on a node to serve trials of `module` there."""
    return f"SHADHO_IMPORTS={module} celery -A shadho_celery worker -Q {shlex.quote(compute_class)}"
