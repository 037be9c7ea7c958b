"""Starts of workers that a scaler has made, as Redis stores them for a scaler that restarts.

Keys: ``shadho:starts:CLASS``, a record as JSON, preceded by a signature if there is a key. It expires.
"""

from __future__ import annotations

from typing import Annotated

import redis
from msgspec import Meta, Struct

from shadho_celery.core.class_spec import MAX_WORKERS
from shadho_celery.core.trial import Moment, Name
from shadho_celery.transport.redis import Redis, is_spoilt
from shadho_celery.transport.signing import Sealed, Signer

#: maximum number of characters of a sealed record, which has the names of up to 10,000 workers
MAX_RECORD = 3_000_000

#: number up to which failed starts are counted
MAX_FAILURES = 20

_Workers = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]


class Start(Struct, frozen=True, kw_only=True):
    """Workers of one class that were started together, some of which have not come yet."""

    count: _Workers
    #: number of them that have not come yet
    missing: _Workers
    #: time of the start in seconds since the epoch, by the server's clock
    at: Moment


class Starts(Struct, frozen=True, kw_only=True):
    """The workers of one class that have not come yet, and the pause after failed starts."""

    #: the earliest first
    starts: Annotated[list[Start], Meta(max_length=MAX_WORKERS)]
    #: workers of the class that have come before; any other one is one of those that were started
    known: Annotated[list[Name], Meta(max_length=2 * MAX_WORKERS)] = []
    #: job of SLURM of the latest start, "" without one
    job: Annotated[str, Meta(pattern=r"^[0-9]{0,20}\Z")] = ""
    #: number of failed starts since the last worker came
    failures: Annotated[int, Meta(ge=0, le=MAX_FAILURES)] = 0
    #: earliest time of the next start, by the server's clock; None without a failed start
    retry_at: Moment | None = None


_SEALED = Sealed[Starts](Starts, MAX_RECORD)


class StartRecords:
    """The records of a fleet. Unsigned and malformed ones are ignored."""

    def __init__(self, client: Redis, signer: Signer) -> None:
        self._client, self._signer = client, signer

    def latest(self, name: str) -> Starts | None:
        """Return the record of a class, or None if there is none."""
        try:
            text: str | None = self._client.get(_key(name))
        except redis.ResponseError as error:
            if not is_spoilt(error):
                raise
            return None
        return None if text is None else _SEALED.read(_key(name), text, self._signer)

    def put(self, name: str, record: Starts, seconds: float) -> None:
        """Record this for so many `seconds`."""
        self._client.set(_key(name), self._signer.seal(_key(name), record), px=int(seconds * 1000))

    def remove(self, name: str) -> None:
        """Remove the record of a class."""
        self._client.delete(_key(name))


def _key(name: str) -> str:
    return f"shadho:starts:{name}"
