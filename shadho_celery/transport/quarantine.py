"""Quarantine in Redis: workers that get no trials of a study, and the strikes that open their circuit breakers.

A failure of a kind that no other worker has had is a *strike* against its worker. It is counted when the result is
accepted (`lua/finish_and_claim.lua`). After `MAX_STRIKES` in a row, the worker's circuit breaker opens: the worker
cannot claim trials until the study's scheduler has examined its failures (`fleet.circuit_breaker`). A quarantined
worker gets no further trials of the study.

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

    #: the worker may claim trials
    CLOSED = "closed"
    #: the worker may not claim trials until the scheduler has examined its failures
    OPEN = "open"
    #: the worker may not claim trials any more
    QUARANTINED = "quarantined"


class Quarantine:
    """Strikes against the workers of one study."""

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
        """Close a circuit breaker. From now on, failures of `kind` count as caused by the trials.

        A quarantined worker stays quarantined.
        """
        if kind is not None:
            self._client.sadd(self._known, kind)
        if self.state(worker) is not Breaker.QUARANTINED:
            self._client.hdel(self._breakers, worker)

    def half_open(self, worker: str) -> None:
        """Half-open a circuit breaker: allow one trial; another strike opens it again."""
        if self.state(worker) is not Breaker.QUARANTINED:
            self._client.hset(self._breakers, worker, MAX_STRIKES - 1)

    def quarantine(self, worker: str) -> None:
        """Send no more trials of this study to a worker."""
        self._client.hset(self._breakers, worker, Breaker.QUARANTINED.value)

    def reset(self) -> None:
        """Close all breakers."""
        for worker in self._client.hkeys(self._breakers):
            self.close(worker)
