"""Quarantine, in Redis: workers that get no trials of a study, and the strikes that open a circuit breaker.

A failure of a kind that no other worker has had is a *strike* against its worker, counted when the result is taken
(`lua/finish_and_claim.lua`). After `MAX_STRIKES` in a row the worker's circuit breaker is open: it claims nothing
until the study's scheduler has judged it (`fleet.circuit_breaker`). A quarantined worker stays out.

Keys of a study, under ``shadho:{study}:``, beside those of `channel`:

========  ====  ========================================================================================
breakers  hash  worker -> failures in a row that no other worker has had, or ``quarantined``
known     set   kinds of failures that are the trials' own: more than one worker has had them
========  ====  ========================================================================================
"""

from __future__ import annotations

from enum import Enum

from shadho_celery.transport.channel import MAX_STRIKES
from shadho_celery.transport.redis import Redis, count, keys


class Breaker(str, Enum):
    """State of a worker's circuit breaker for one study."""

    #: it may claim trials
    CLOSED = "closed"
    #: it may not until the scheduler has judged its failures
    OPEN = "open"
    #: it may not any more
    QUARANTINED = "quarantined"


class Quarantine:
    """Strikes of one study's workers."""

    def __init__(self, client: Redis, study: str) -> None:
        self._client = client
        self._breakers, self._known = keys(study, "breakers", "known")

    def state(self, worker: str) -> Breaker:
        """Return the state of a worker's circuit breaker."""
        strikes = self._client.hget(self._breakers, worker)
        if strikes == Breaker.QUARANTINED.value:
            return Breaker.QUARANTINED
        return Breaker.OPEN if count(strikes) >= MAX_STRIKES else Breaker.CLOSED

    def close(self, worker: str, kind: str | None = None) -> None:
        """Close a circuit breaker; failures of `kind` are known from now on to be the trials' own.

        A quarantined worker stays so.
        """
        if kind is not None:
            self._client.sadd(self._known, kind)
        if self.state(worker) is not Breaker.QUARANTINED:
            self._client.hdel(self._breakers, worker)

    def half_open(self, worker: str) -> None:
        """Half-open a circuit breaker: allow one trial; another failure opens it again."""
        if self.state(worker) is not Breaker.QUARANTINED:
            self._client.hset(self._breakers, worker, MAX_STRIKES - 1)

    def quarantine(self, worker: str) -> None:
        """Give a worker no more trials of this study."""
        self._client.hset(self._breakers, worker, Breaker.QUARANTINED.value)

    def reset(self) -> None:
        """Close all breakers."""
        for worker in self._client.hkeys(self._breakers):
            self.close(worker)
