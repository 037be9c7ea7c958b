"""Which workers a study keeps off, in Redis; both ends of it.

A worker that fails a trial in a way that nobody else has had gets a *strike*, where its result is taken (`gate.py`);
after a few in a row it may claim nothing until the study's scheduler has judged it, as `standing.py` tells it to.

Keys of a study, under ``shadho:{study}:``, beside those of `channel.py`:

=======  ====  =====================================================================================
strikes  hash  worker -> failures in a row that nobody else has had, or ``fenced``
known    set   failures that are the trials' own: more than one worker has had them
=======  ====  =====================================================================================
"""

from __future__ import annotations

from shadho_celery import gate
from shadho_celery.channel import Keys
from shadho_celery.registry import Redis

#: what stands in the strikes of a worker that gets no more trials
FENCED = "fenced"


class Strikes:
    """What one study holds against its workers."""

    def __init__(self, client: Redis, study: str) -> None:
        self._client = client
        self._keys = Keys(study)

    def standing(self, worker: str) -> str:
        """``free`` where the worker may claim trials of the study, else ``held`` or ``fenced``."""
        strikes = self._client.hget(self._keys.strikes, worker)
        if strikes == FENCED:
            return FENCED
        return "held" if strikes and int(strikes) >= gate.MAX_STRIKES else "free"

    def absolve(self, worker: str, failure: str | None = None) -> None:
        """Forget a worker's strikes; `failure` is known from now on: it is the trials' own, whoever runs them.

        A fenced worker stays fenced.
        """
        if failure is not None:
            self._client.sadd(self._keys.known, failure)
        if self._client.hget(self._keys.strikes, worker) != FENCED:
            self._client.hdel(self._keys.strikes, worker)

    def try_again(self, worker: str) -> None:
        """Let a worker that was kept off claim one trial more, and be kept off again where it fails that."""
        if self._client.hget(self._keys.strikes, worker) != FENCED:
            self._client.hset(self._keys.strikes, worker, gate.MAX_STRIKES - 1)

    def fence(self, worker: str) -> None:
        """Let a worker have no more trials of this study."""
        self._client.hset(self._keys.strikes, worker, FENCED)

    def open(self) -> None:
        """Take them up again, where an earlier scheduler has erased the study's keys."""
        self._client.persist(self._keys.strikes)
        # Of what there was against them nobody knows any more.
        for worker in self._client.hkeys(self._keys.strikes):
            self.absolve(worker)
