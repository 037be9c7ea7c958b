"""The seats of gangs, in Redis: which replica of which trial runs where; both ends of it.

A trial that takes several slots *calls* for the replicas of its gang. The scheduler's executor publishes a message for
each of their seats; the worker that gets one *takes* the seat, if the trial's attempt runs and nobody else has it,
*renews* it while the replica runs, and *leaves* it afterwards. A seat that is not renewed is lost, and free again. So
replicas of a trial that has ended need not be looked for: their messages are refused, and their renewals too.

Keys of a study, under ``shadho:{study}:``, beside those of `channel.py`:

======  ====  =================================================================================================
gangs   hash  ``number.attempt`` -> number of the attempt's latest call, a space, and the call as it travelled
seats   hash  ``number.attempt.call.rank`` -> ``held:END:delivery`` (ms, the server's clock), ``left`` or ``done``
yields  set   seats of backup replicas whose slots are wanted
======  ====  =================================================================================================
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from shadho_celery import gate
from shadho_celery.channel import Claim, Keys, configured_lease
from shadho_celery.envelope import seal, unseal
from shadho_celery.registry import Redis
from shadho_celery.signing import UNSIGNED, Signer
from shadho_celery.trial import Assembling, Unseated


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A place in a gang."""

    number: int
    attempt: int
    #: which call for replicas of its attempt it belongs to, from 1
    call: int
    #: from 1; the coordinator's own is 0
    rank: int

    @property
    def key(self) -> str:
        """How Redis knows it."""
        return f"{self.number}.{self.attempt}.{self.call}.{self.rank}"


class WorkerSeats:
    """A worker's end: call for replicas; take, renew and leave seats."""

    def __init__(
        self, client: Redis, worker: str, lease_seconds: float | None = None, signer: Signer = UNSIGNED
    ) -> None:
        """`worker` is who takes seats; the lease is the configured one by default."""
        self._lease_ms = int(1000 * (configured_lease() if lease_seconds is None else lease_seconds))
        self._worker = worker
        self._signer = signer
        self._call = client.register_script(gate.CALL)
        self._take = client.register_script(gate.TAKE)
        self._renew = client.register_script(gate.RENEW_SEATS)
        self._leave = client.register_script(gate.LEAVE)

    def call(self, study: str, call: Assembling) -> bool:
        """Call for replicas; False where the attempt does not run any more."""
        keys = Keys(study)
        return bool(
            self._call(
                keys=[keys.attempts, keys.leases, keys.events, keys.gangs],
                args=[call.number, call.attempt, call.call, seal(study, call, self._signer)],
            )
        )

    def take(self, study: str, seat: Seat, delivery: str) -> Claim:
        """Take a seat: REFUSED where its attempt does not run, or where another worker has it.

        With the same `delivery` it may be said again when the answer got lost.
        """
        keys = Keys(study)
        who = [self._lease_ms, delivery, self._worker, gate.MAX_STRIKES]
        return Claim(
            self._take(
                keys=[keys.attempts, keys.leases, keys.cancel, keys.gangs, keys.seats, keys.strikes, keys.yields],
                args=[*who, seat.number, seat.attempt, seat.call, seat.rank],
            )
        )

    def renew(self, study: str, held: Sequence[tuple[Seat, str]]) -> list[str]:
        """Renew seats, each with the delivery that took it; for each ``ok``, ``gone`` or ``yield`` (leave it)."""
        keys = Keys(study)
        parts = [part for seat, delivery in held for part in (seat.number, seat.attempt, seat.key, delivery)]
        return list(
            self._renew(
                keys=[keys.attempts, keys.leases, keys.cancel, keys.seats, keys.yields], args=[self._lease_ms, *parts]
            )
        )

    def leave(
        self, study: str, seat: Seat, delivery: str, *, done: bool = False, failure: Unseated | None = None
    ) -> bool:
        """Give a seat back: somebody else may have it, unless its work is `done`.

        False where nobody wants to know: its attempt has ended before, or another worker has the seat.
        """
        keys = Keys(study)
        told = "" if failure is None else seal(study, failure, self._signer)
        return bool(
            self._leave(
                keys=[keys.attempts, keys.leases, keys.events, keys.seats, keys.yields],
                args=[seat.number, seat.attempt, seat.key, delivery, "done" if done else "left", told],
            )
        )


class SchedulerSeats:
    """A scheduler's end: who sits where."""

    def __init__(self, client: Redis, study: str, signer: Signer = UNSIGNED) -> None:
        self._client = client
        self._study = study
        self._signer = signer
        self._keys = Keys(study)
        self._seated = client.register_script(gate.SEATED)

    def states(self, seats: Sequence[Seat]) -> list[str]:
        """For each seat ``never`` taken, ``held``, ``lost`` (not renewed), ``left`` or ``done``."""
        return list(self._seated(keys=[self._keys.seats], args=[seat.key for seat in seats])) if seats else []

    def calls(self, attempts: Sequence[tuple[int, int]]) -> list[Assembling]:
        """The latest calls of those (number, attempt) that have called for replicas."""
        if not attempts:
            return []
        told = self._client.hmget(self._keys.gangs, [f"{number}.{attempt}" for number, attempt in attempts])
        events = [unseal(self._study, text.partition(" ")[2], self._signer) for text in told if text]
        return [event for event in events if isinstance(event, Assembling)]

    def ask_back(self, seats: Sequence[Seat]) -> None:
        """Have these backup replicas leave."""
        if seats:
            self._client.sadd(self._keys.yields, *(seat.key for seat in seats))

    def clear(self, seats: Sequence[Seat]) -> None:
        """Forget who sat there."""
        if seats:
            keys = [seat.key for seat in seats]
            self._client.hdel(self._keys.seats, *keys)
            self._client.srem(self._keys.yields, *keys)

    def forget(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Forget that these attempts have called."""
        if attempts:
            self._client.hdel(self._keys.gangs, *(f"{number}.{attempt}" for number, attempt in attempts))


def own_address(client: Redis) -> str:
    """The address by which the fleet's other machines reach this one.

    It is what SHADHO_HOST says, else the address that this machine has on the way to Redis: 127.0.0.1 where Redis is
    on this machine, too.
    """
    told = os.environ.get("SHADHO_HOST")
    if told:
        return told
    place = client.connection_pool.connection_kwargs
    if "path" in place:
        return "127.0.0.1"
    with suppress(OSError):
        server = place.get("host", "localhost"), place.get("port", 6379)
        family, kind, *_, where = socket.getaddrinfo(*server, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as probe:
            # Of a datagram socket this sends nothing; it only finds the way.
            probe.connect(where)
            return str(probe.getsockname()[0])
    return socket.gethostname()
