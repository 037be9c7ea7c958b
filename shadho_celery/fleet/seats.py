"""Seats of gangs in Redis, which decide which worker runs which replica of a trial.

A trial that takes several slots *calls* for the replicas of its gang, and reports when they have arrived. The
scheduler's executor publishes a message for each seat. The worker that gets the message *takes* the seat, if the
trial's attempt runs and no other worker has the seat. It *renews* the seat while the replica runs, and *leaves* it
afterwards. A seat that is not renewed is lost, and another worker may take it. When a trial has ended, seats can no
longer be taken or renewed, so its replicas end without a message to each.

Keys of a study for gangs, under ``shadho:{study}:``; the module `channel` describes the other keys:

======  ====  =================================================================================================
gangs   hash  ``number.attempt`` -> number of the attempt's latest call, a space, and the sealed call
seats   hash  ``number.attempt.call.rank`` -> ``taken:END:delivery`` (ms, the server's clock), ``left`` or ``done``
yields  set   seats of backup replicas whose slots trials want
======  ====  =================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from shadho_celery.core.trial import Called, ReplicaFailed
from shadho_celery.fleet.channel import MAX_STRIKES, ChannelEnd, Claim, WorkerEnd, unseal
from shadho_celery.fleet.redis import Redis, keys, run
from shadho_celery.fleet.signing import UNSIGNED, Signer


class Seat(Struct, frozen=True, kw_only=True):
    """The right to run one replica of an attempt's gang. One worker at a time may hold it."""

    number: int
    attempt: int
    #: number of the call for replicas to which the seat belongs; the first call of an attempt has 1
    call: int
    #: the replica's rank, from 1; the coordinator has rank 0
    rank: int

    @property
    def key(self) -> str:
        """Name of the seat in Redis."""
        return f"{self.number}.{self.attempt}.{self.call}.{self.rank}"


class WorkerSeats(WorkerEnd):
    """A worker's end: it calls for replicas, and takes, renews and leaves seats."""

    def call(self, study: str, call: Called) -> bool:
        """Call for replicas, or report that they have arrived. Return False if the attempt does not run any more.

        The gang's token is encrypted with the fleet's key, so other clients of Redis and of the broker cannot read it.
        """
        token = self._signer.encrypt(call.gang.token, _purpose(study, call))
        sealed = self._signer.seal(study, replace(call, gang=replace(call.gang, token=token)))
        return bool(run(self._client, "call_replicas", study, call.number, call.attempt, call.call, sealed))

    def token(self, study: str, seat: Seat, token: str) -> str:
        """Return the decrypted token of the seat's gang. Raises UsageError if it cannot be decrypted."""
        return self._signer.decrypt(token, _purpose(study, seat))

    def take(self, study: str, seat: Seat, delivery: str) -> Claim:
        """Take a seat. It is refused, for example, if its attempt does not run or if another worker has the seat.

        If no answer arrived, repeat the call with the same `delivery`.
        """
        who = (self._lease_ms, delivery, self.worker, MAX_STRIKES)
        return Claim(run(self._client, "take_seat", study, *who, seat.number, seat.attempt, seat.call, seat.rank))

    def renew(self, study: str, taken: Sequence[tuple[Seat, str]]) -> list[str]:
        """Renew seats, each given with the delivery that took it. Return an answer for each seat.

        The answer is ``ok``, ``gone`` (the replica has lost its seat) or ``yield`` (it should leave the seat).
        """
        parts = [part for seat, delivery in taken for part in (seat.number, seat.attempt, seat.key, delivery)]
        return list(run(self._client, "renew_seats", study, self._lease_ms, *parts))

    def leave(
        self, study: str, seat: Seat, delivery: str, *, done: bool = False, failure: ReplicaFailed | None = None
    ) -> bool:
        """Give a seat back. Another worker may then take it, unless the replica's work is `done`.

        A `failure` is sent to the scheduler. Returns False if nothing changes, because the attempt has ended or another
        worker has the seat.
        """
        sealed = "" if failure is None else self._signer.seal(study, failure)
        state = "done" if done else "left"
        return bool(
            run(self._client, "leave_seat", study, seat.number, seat.attempt, seat.key, delivery, state, sealed)
        )


def _purpose(study: str, call: Seat | Called) -> str:
    """Return the purpose with which a gang's token is encrypted. It prevents the token's use for another call."""
    return f"token {study} {call.number}.{call.attempt}.{call.call}"


class SchedulerSeats(ChannelEnd):
    """A scheduler's end: it reads the states of seats and the calls for replicas, and reclaims seats."""

    def __init__(self, client: Redis, study: str, signer: Signer = UNSIGNED) -> None:
        super().__init__(client, signer)
        self._study = study
        self._gangs, self._seats, self._yields = keys(study, "gangs", "seats", "yields")

    def states(self, seats: Sequence[Seat]) -> list[str]:
        """Return the state of each seat: ``never`` (not taken yet), ``taken``, ``lost`` (not renewed), ``left`` or
        ``done``.
        """
        return list(run(self._client, "seat_states", self._study, *(seat.key for seat in seats))) if seats else []

    def calls(self, attempts: Sequence[tuple[int, int]]) -> list[Called]:
        """Return the latest call for replicas of each of these (number, attempt) pairs that has one."""
        if not attempts:
            return []
        sealed = self._client.hmget(self._gangs, [f"{number}.{attempt}" for number, attempt in attempts])
        events = [unseal(self._study, text.partition(" ")[2], self._signer) for text in sealed if text]
        return [event for event in events if isinstance(event, Called)]

    def ask_back(self, seats: Sequence[Seat]) -> None:
        """Reclaim the slots of backup replicas: ask the replicas in these seats to leave."""
        if seats:
            self._client.sadd(self._yields, *(seat.key for seat in seats))

    def clear(self, seats: Sequence[Seat]) -> None:
        """Remove the states of these seats."""
        if seats:
            names = [seat.key for seat in seats]
            self._client.hdel(self._seats, *names)
            self._client.srem(self._yields, *names)

    def forget(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Remove the calls of these attempts."""
        if attempts:
            self._client.hdel(self._gangs, *(f"{number}.{attempt}" for number, attempt in attempts))
