"""Seats of gangs, in Redis: which replica of which trial runs where; both ends of it.

A trial that takes several slots *calls* for the replicas of its gang, and again to tell that they have come. The
scheduler's executor publishes a message for each of their seats. The worker that gets one *takes* the seat, if the
trial's attempt runs and no other worker has it, *renews* it while the replica runs, and *leaves* it afterwards. A seat
that is not renewed is lost, and free again. So replicas of a trial that has ended need not be searched for: their
messages are refused, and their renewals too.

Keys of a study, under ``shadho:{study}:``, beside those of `channel`:

======  ====  =================================================================================================
gangs   hash  ``number.attempt`` -> number of the attempt's latest call, a space, and the call as it travelled
seats   hash  ``number.attempt.call.rank`` -> ``held:END:delivery`` (ms, the server's clock), ``left`` or ``done``
yields  set   seats of backup replicas whose slots are wanted
======  ====  =================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from shadho_celery.core.trial import Called, ReplicaFailed
from shadho_celery.transport.channel import MAX_STRIKES, Claim, configured_lease, keys
from shadho_celery.transport.event_codec import seal, unseal
from shadho_celery.transport.redis import Redis, script
from shadho_celery.transport.signing import UNSIGNED, Signer


class Seat(Struct, frozen=True, kw_only=True):
    """A place in a gang."""

    number: int
    attempt: int
    #: which call for replicas of its attempt it belongs to, from 1
    call: int
    #: from 1; the coordinator's own is 0
    rank: int

    @property
    def key(self) -> str:
        """Its name in Redis."""
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
        self._call = script(client, "call")
        self._take = script(client, "take")
        self._renew = script(client, "renew_seats")
        self._leave = script(client, "leave")

    def call(self, study: str, call: Called) -> bool:
        """Call for replicas, or tell that they have come; return False where the attempt does not run any more."""
        return bool(
            self._call(
                keys=keys(study, "attempts", "leases", "events", "gangs"),
                args=[call.number, call.attempt, call.call, seal(study, call, self._signer)],
            )
        )

    def take(self, study: str, seat: Seat, delivery: str) -> Claim:
        """Take a seat; return REFUSED where its attempt does not run, or where another worker has it.

        With the same `delivery` it may be said again when the answer got lost.
        """
        who = [self._lease_ms, delivery, self._worker, MAX_STRIKES]
        return Claim(
            self._take(
                keys=keys(study, "attempts", "leases", "cancel", "gangs", "seats", "strikes", "yields"),
                args=[*who, seat.number, seat.attempt, seat.call, seat.rank],
            )
        )

    def renew(self, study: str, held: Sequence[tuple[Seat, str]]) -> list[str]:
        """Renew seats, each with the delivery that took it; return for each ``ok``, ``gone`` or ``yield`` (leave it)."""
        parts = [part for seat, delivery in held for part in (seat.number, seat.attempt, seat.key, delivery)]
        return list(
            self._renew(
                keys=keys(study, "attempts", "leases", "cancel", "seats", "yields"), args=[self._lease_ms, *parts]
            )
        )

    def leave(
        self, study: str, seat: Seat, delivery: str, *, done: bool = False, failure: ReplicaFailed | None = None
    ) -> bool:
        """Give a seat back: another worker may have it, unless its work is `done`.

        Returns False where it does not matter: its attempt has ended before, or another worker has the seat.
        """
        told = "" if failure is None else seal(study, failure, self._signer)
        return bool(
            self._leave(
                keys=keys(study, "attempts", "leases", "events", "seats", "yields"),
                args=[seat.number, seat.attempt, seat.key, delivery, "done" if done else "left", told],
            )
        )


class SchedulerSeats:
    """A scheduler's end: which seats are held."""

    def __init__(self, client: Redis, study: str, signer: Signer = UNSIGNED) -> None:
        self._client = client
        self._study = study
        self._signer = signer
        self._gangs, self._seats, self._yields = keys(study, "gangs", "seats", "yields")
        self._seated = script(client, "seated")

    def states(self, seats: Sequence[Seat]) -> list[str]:
        """Return for each seat ``never`` taken, ``held``, ``lost`` (not renewed), ``left`` or ``done``."""
        return list(self._seated(keys=[self._seats], args=[seat.key for seat in seats])) if seats else []

    def calls(self, attempts: Sequence[tuple[int, int]]) -> list[Called]:
        """Return the latest calls of those (number, attempt) that have called for replicas."""
        if not attempts:
            return []
        told = self._client.hmget(self._gangs, [f"{number}.{attempt}" for number, attempt in attempts])
        events = [unseal(self._study, text.partition(" ")[2], self._signer) for text in told if text]
        return [event for event in events if isinstance(event, Called)]

    def ask_back(self, seats: Sequence[Seat]) -> None:
        """Have these backup replicas leave."""
        if seats:
            self._client.sadd(self._yields, *(seat.key for seat in seats))

    def clear(self, seats: Sequence[Seat]) -> None:
        """Forget how these seats stood."""
        if seats:
            names = [seat.key for seat in seats]
            self._client.hdel(self._seats, *names)
            self._client.srem(self._yields, *names)

    def forget(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Forget that these attempts have called."""
        if attempts:
            self._client.hdel(self._gangs, *(f"{number}.{attempt}" for number, attempt in attempts))
