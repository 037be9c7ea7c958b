"""Drained workers: the workers that should take no more trials, as Redis stores them.

Key: ``shadho:drains``, a hash: the place of a worker (`registry.place_of`) -> its `Drain` as JSON, preceded by a
signature if there is a key. A drain has no time to live: it also applies to the workers that start there later, until
somebody undrains the place.
"""

from __future__ import annotations

import redis
from msgspec import Struct

from shadho_celery.core.trial import Moment, Name
from shadho_celery.transport.redis import Redis, is_spoilt
from shadho_celery.transport.signing import Sealed, Signer

KEY = "shadho:drains"

#: maximum number of characters of a sealed drain
MAX_DRAIN = 2000


class Drain(Struct, frozen=True, kw_only=True):
    """Who has drained the workers of a place, and when."""

    #: user and host
    by: Name
    #: seconds since the epoch, by the server's clock
    at: Moment


_DRAINS = Sealed[Drain](Drain, MAX_DRAIN)


class Drains:
    """The drained places of a fleet. Each signature is valid for one place only.

    A key of a wrong type, which another client must have written, counts as empty. Schedulers remove it.
    """

    def __init__(self, client: Redis, signer: Signer) -> None:
        self._client = client
        self._signer = signer

    def find(self, place: str) -> Drain | None:
        """Return the drain of a place, or None if there is none with our signature."""
        try:
            text = self._client.hget(KEY, place)
        except redis.ResponseError as error:
            if not is_spoilt(error):
                raise
            return None
        return self._read(place, text)

    def all(self) -> dict[str, Drain]:
        """Return the drains by place. Those without our signature are left out."""
        try:
            texts = self._client.hgetall(KEY)
        except redis.ResponseError as error:
            if not is_spoilt(error):
                raise
            return {}
        found = {place: self._read(place, text) for place, text in texts.items()}
        return {place: drain for place, drain in sorted(found.items()) if drain is not None}

    def add(self, place: str, by: str) -> None:
        """Drain the workers of a place. `by` says who does."""
        drain = Drain(by=by, at=float(self._client.time()[0]))
        self._client.hset(KEY, place, self._signer.seal(_about(place), drain))

    def remove(self, place: str) -> bool:
        """Undrain the workers of a place. Return whether anything was removed."""
        return bool(self._client.hdel(KEY, place))

    def _read(self, place: str, text: str | None) -> Drain | None:
        return None if text is None else _DRAINS.read(_about(place), text, self._signer)


def _about(place: str) -> str:
    return f"{KEY}:{place}"
