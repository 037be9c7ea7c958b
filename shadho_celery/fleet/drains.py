"""What Redis stores for operators: drained workers, and the workers that a scaler has started.

``shadho:drains`` is a hash: the place of a worker (`registry.place_of`) -> its latest `Drain` as JSON, preceded by a
signature if there is a key. A drain has no time to live: it also applies to the workers that start there later, until
somebody undrains the place, which is recorded in the same way. The record of a worker's full name is for that worker
alone, which may also be told to end; no later worker has its name. Each record of a place has a greater sequence than
the one before, so a worker refuses an old record that somebody has put back.

``shadho:starts:CLASS`` is a record of a scaler's starts as JSON, preceded by a signature if there is a key, for a
scaler that restarts. It expires.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated

import redis
from msgspec import Meta, Struct

from shadho_celery.core.files import MAX_WORKERS
from shadho_celery.core.trial import Moment, Name, Number
from shadho_celery.fleet.redis import Redis, is_spoilt, server_time
from shadho_celery.fleet.signing import Sealed, Signer

KEY = "shadho:drains"

#: maximum number of characters of a sealed drain
MAX_DRAIN = 2000


class Drain(Struct, frozen=True, kw_only=True):
    """Who has drained or undrained the workers of a place, and when."""

    #: user and host
    by: Name
    #: seconds since the epoch, by the server's clock
    at: Moment
    #: greater than in all earlier records of the place: milliseconds since the epoch, unless the clock was set back
    sequence: Number
    #: False if they were undrained
    is_drained: bool = True
    #: True in the record of one worker, by its full name
    alone: bool = False
    #: True if that worker ends once its running trials have ended
    ends: bool = False


_DRAINS = Sealed[Drain](Drain, MAX_DRAIN)


class Drains:
    """The drained places of a fleet. Each signature is valid for one place only.

    A key of a wrong type, which another client must have written, counts as empty. Schedulers remove it.
    """

    def __init__(self, client: Redis, signer: Signer) -> None:
        self._client = client
        self._signer = signer

    def latest(self, place: str) -> Drain | None:
        """Return the record of a place, drained or undrained, or None if there is none with our signature."""
        try:
            return self._read(place, self._client.hget(KEY, place))
        except redis.ResponseError as error:
            if not is_spoilt(error):
                raise
            return None

    def _read(self, place: str, text: str | None) -> Drain | None:
        return None if text is None else _DRAINS.read(_about(place), text, self._signer)

    def all(self, obeyed: Mapping[str, int] = MappingProxyType({})) -> dict[str, Drain]:
        """Return the records of the drained places.

        Those without our signature are left out, and so are older ones than the workers of a place obey. `obeyed` has
        the sequences that these announce, by place.
        """
        try:
            texts = self._client.hgetall(KEY)
        except redis.ResponseError as error:
            if not is_spoilt(error):
                raise
            return {}
        found = {place: self._read(place, text) for place, text in texts.items()}
        return {
            place: drain
            for place, drain in sorted(found.items())
            if drain is not None and drain.is_drained and not drain.ends and drain.sequence >= obeyed.get(place, 0)
        }

    def put(self, place: str, by: str, *, is_drained: bool, after: int = 0, alone: bool = False) -> None:
        """Drain or undrain the workers of a place, or the one with this full name, `alone`. `by` says who does.

        `after` is the greatest sequence that the workers there have obeyed, in case their record is lost.
        """
        now, before = server_time(self._client), self.latest(place)
        known = max(after, 0 if before is None else before.sequence)
        sequence = max(int(1000 * now), known + 1)
        drain = Drain(by=by, at=now, sequence=sequence, is_drained=is_drained, alone=alone)
        self._client.hset(KEY, place, self._signer.seal(_about(place), drain))

    def end(self, worker: str, by: str) -> None:
        """Let the worker with this full name finish its trials, take no more, and end. `by` says who does."""
        now = server_time(self._client)
        drain = Drain(by=by, at=now, sequence=int(1000 * now), alone=True, ends=True)
        self._client.hset(KEY, worker, self._signer.seal(_about(worker), drain))

    def forget(self, workers: Collection[str]) -> None:
        """Remove the records of workers that have ended, by their full names."""
        if workers:
            self._client.hdel(KEY, *workers)


class DrainWatch:
    """Finds the drains and undrains that workers obey, so that a scheduler can record them.

    Redis is asked for them, not a scheduler, so that they work without one. The sequences that workers announce lead a
    scheduler to the latest one of each place.
    """

    def __init__(self, drains: Drains) -> None:
        self._drains = drains
        #: sequence of the latest drain or undrain of each place
        self._known: dict[str, int] = {}

    def news(self, obeyed: Mapping[str, int]) -> dict[str, Drain]:
        """Return the drains and undrains, by place, that workers obey since the last call. `obeyed` is as in `all`.

        Records that Redis has lost are left out. Raises redis-py's errors.
        """
        new = {place: sequence for place, sequence in obeyed.items() if sequence > self._known.get(place, 0)}
        latest = {place: self._drains.latest(place) for place in new}
        self._known |= new
        return {place: drain for place, drain in latest.items() if drain is not None and drain.sequence == new[place]}


def _about(place: str) -> str:
    return f"{KEY}:{place}"


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
