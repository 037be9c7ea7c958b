"""Channel: the way back from workers to schedulers, in Redis; both ends of it.

The broker only delivers; the scripts in `lua/` decide who runs an attempt. An attempt is *claimed* by the worker that
will run it, its *lease* is renewed while it runs, and its result is taken only while that lease lasts.

Keys of a study, under ``shadho:{study}:``; `quarantine` and `seats` describe the others:

========  ======  ===================================================================================
events    stream  events that the scheduler has not confirmed yet, one JSON record an entry
attempts  hash    trial number -> ``N`` all up to N are void, ``N:delivery`` N is claimed, either followed
                  by ``+A`` for each earlier attempt A that still runs, or ``done:N:delivery``; and
                  ``refused`` -> late results that were refused
leases    zset    ``number.attempt`` -> moment the lease ends (ms, the server's clock); 0 once it has
cancel    set     numbers of running trials that should stop
holder    string  ``host process start:fence`` of the study's scheduler; it expires after HOLD_SECONDS
========  ======  ===================================================================================
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain

import msgspec

from shadho_celery.core.failures import kind_of
from shadho_celery.core.trial import WELL, Event, GangEvent, Lost, Report, Result, Started, TrialState
from shadho_celery.errors import LockLost, StudyLocked, UsageError
from shadho_celery.store.lock import holder_name, is_held
from shadho_celery.transport.redis import Redis, keys, run
from shadho_celery.transport.signing import UNSIGNED, Signer

#: seconds for which messages of a study that has ended are refused
ERASED_SECONDS = 7 * 86400

#: events read at once
READ = 1000

#: seconds without a sign of life after which another machine may take over a scheduler's lock: at most as long as its
#: lock in the store lasts, which is renewed less often
HOLD_SECONDS = 20.0

#: strikes in a row that open a worker's circuit breaker, see `quarantine`
MAX_STRIKES = 2


def configured_lease() -> float:
    """Return the seconds that a lease lasts without renewal: 30, or the number in SHADHO_LEASE_SECONDS."""
    told = os.environ.get("SHADHO_LEASE_SECONDS") or "30"
    try:
        seconds = float(told)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 86400.0:
        raise UsageError(f"SHADHO_LEASE_SECONDS is {told!r}; give a number of seconds from 1 to 86400")
    return seconds


def seal(study: str, event: Event | GangEvent, signer: Signer) -> str:
    """Encode an event for the stream: its JSON, after its signature if messages are signed.

    `seal` and `unseal` are the event codec. The signature covers the study's key: no event passes for another study's.
    """
    text = json.dumps(msgspec.to_builtins(event))
    return signer.sign(study + text) + text if signer.fingerprint else text


def unseal(study: str, text: str, signer: Signer) -> Event | GangEvent | None:
    """Decode an event; return None for text that lacks a required signature or is not an event."""
    signature, brace, rest = text.partition("{")
    if signer.fingerprint and not signer.is_signed(study + brace + rest, signature):
        return None
    try:
        event: Event | GangEvent = msgspec.convert(json.loads(brace + rest), Event | GangEvent)
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None
    # Only the study's scheduler decides on retries.
    if isinstance(event, Result) and (event.retry is not None or not event.outcome.is_an_end):
        return None
    return event


class Claim(Enum):
    """Answer to a claim."""

    TAKEN = 1
    #: another worker runs the attempt, or its trial has ended or was taken back
    REFUSED = 0
    #: this worker's circuit breaker is open
    BREAKER_OPEN = -1


class WorkerChannel:
    """A worker's end: claim or decline, renew, report, finish."""

    def __init__(
        self, client: Redis, lease_seconds: float | None = None, worker: str = "", signer: Signer = UNSIGNED
    ) -> None:
        """`worker` is the name to claim by; the lease is the configured one by default."""
        self._client = client
        self._lease_ms = int(1000 * (configured_lease() if lease_seconds is None else lease_seconds))
        self._worker = worker
        self._signer = signer

    def decline(self, study: str, number: int, attempt: int, reason: str) -> None:
        """Give back an attempt that is not claimed: it is lost, which does not count against its trial."""
        lost = Lost(number=number, attempt=attempt, reason=reason, claimed=False)
        run(self._client, "cancel", study, "keep", number, attempt, seal(study, lost, self._signer))

    def finish_and_claim(
        self,
        study: str,
        result: Result | None,
        started: Started | None,
        *,
        delivery: str | None = None,
        watched: bool = False,
    ) -> tuple[bool, Claim]:
        """Finish one attempt and claim the next in one round trip; either may be None.

        Returns whether the result was taken, and the answer to the claim. The call may be repeated with the same
        `delivery` if the answer was lost. A result that is `watched` counts for or against the worker.
        """
        who = (self._lease_ms, delivery or new_delivery(), self._worker, MAX_STRIKES)
        events = (*self._sealed(study, result), *self._sealed(study, started))
        finished, claimed = run(self._client, "finish_and_claim", study, *who, *events, _failure(result, watched))
        return bool(finished), Claim(claimed)

    def renew(self, study: str, attempts: Sequence[tuple[int, int]]) -> list[str]:
        """Renew the leases of (number, attempt) pairs; return for each ``ok``, ``cancel`` or ``gone`` (not ours)."""
        return list(run(self._client, "renew", study, self._lease_ms, *map(_member, attempts)))

    def count_refused(self, study: str) -> None:
        """Count a late result that was refused before it was sent."""
        self._client.hincrby(*keys(study, "attempts"), "refused", 1)

    def report(self, study: str, report: Report) -> None:
        """Send a report."""
        self._client.xadd(*keys(study, "events"), {"e": seal(study, report, self._signer)})

    def _sealed(self, study: str, event: Result | Started | None) -> tuple[int | str, int | str, str]:
        return ("", "", "") if event is None else (event.number, event.attempt, seal(study, event, self._signer))


class SchedulerChannel:
    """A scheduler's end: drain events, find ended leases, take attempts back.

    Redis has a lock as the store has: schedulers with copies of one store would take each other's events.
    """

    def __init__(self, client: Redis, study: str, signer: Signer = UNSIGNED, fence: int = 0) -> None:
        """`fence` is the fencing number of the scheduler's lock in its store."""
        self._client = client
        self._study = study
        self._signer = signer
        self._holder = f"{holder_name()}:{fence}"
        self._attempts, self._leases, self._events = keys(study, "attempts", "leases", "events")
        #: entries that are not signed with our key, or are not events
        self.forged = 0
        #: id of the last event that was read and is not confirmed; without one the stream is read from its start, for
        #: after a failover to a server whose clock is behind, new events have lower ids
        self._last = ""
        #: True if the last `drain` has read the stream to its end
        self.is_drained = False

    def drain(self, wait_ms: int) -> list[Event | GangEvent]:
        """Return the events since the last call, waiting up to `wait_ms` (0: not at all) for the first one."""
        answer = self._client.xread({self._events: self._last or "0"}, count=READ, block=wait_ms or None)
        self.is_drained = not answer
        if not answer:
            return []
        entries = next(iter(answer.values()))[0] if isinstance(answer, dict) else answer[0][1]
        self.is_drained = len(entries) < READ
        self._last = entries[-1][0]
        events = [unseal(self._study, fields.get("e", ""), self._signer) for _, fields in entries]
        self.forged += events.count(None)
        return [event for event in events if event is not None]

    def lock(self) -> None:
        """Lock the study on this Redis. Raises StudyLocked if another scheduler runs it, from another store."""
        held = self._hold()
        if held != self._holder and not is_held(held.rpartition(":")[0], math.inf, 0.0):
            held = self._hold(dead=held)
        if held != self._holder:
            host, pid, *_ = held.split(" ")
            raise StudyLocked(
                f"this study is run on the same Redis by the scheduler on {host} (process {pid}), from another copy of "
                "the store; stop it first, or begin another with --study NAME (the lock of one that died ends after "
                f"{HOLD_SECONDS:.0f} s)"
            )

    def confirm(self) -> None:
        """Remove the events drained so far, which are recorded, and renew the lock.

        Raises LockLost, and removes nothing, if another scheduler has the lock.
        """
        if self._hold(recorded=self._last) != self._holder:
            raise LockLost("another scheduler has taken this study's lock on Redis; this one stops")
        self._last = ""

    def unlock(self) -> None:
        """Unlock the study, unless another scheduler has taken it over."""
        self._hold(seconds=0.0)

    def _hold(self, *, seconds: float = HOLD_SECONDS, dead: str = "", recorded: str = "") -> str:
        """Return the lock's holder after an attempt to renew it, or to take it."""
        return str(run(self._client, "confirm", self._study, self._holder, int(1000 * seconds), dead, recorded))

    def ended_leases(self) -> list[tuple[int, int]]:
        """Return (number, attempt) of the claimed attempts whose lease has ended, again until `forget` removes them."""
        pairs = (member.split(".") for member in run(self._client, "expire", self._study))
        return [(int(number), int(attempt)) for number, attempt in pairs]

    def extend_leases(self) -> None:
        """Renew all leases that have not ended: for a while workers could not reach Redis to do so."""
        run(self._client, "extend", self._study, int(1000 * configured_lease()))

    def forget(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Remove ended leases: their loss is recorded."""
        if members := [*map(_member, attempts)]:
            self._client.zrem(self._leases, *members)

    def states(self, attempts: Sequence[tuple[int, int]]) -> list[str]:
        """Return for each (number, attempt): ``leased`` (until it is forgotten), ``free`` to be claimed, or ``void``.

        The events of one that is void are in the stream by then.
        """
        return list(run(self._client, "attempt_states", self._study, *map(_member, attempts))) if attempts else []

    def cancel(self, attempts: Sequence[tuple[int, int]], *, running: bool) -> None:
        """Take back the attempts that are not claimed (each gives a Lost event); with `running` stop the others."""
        self._take_back(attempts, "stop" if running else "keep", "taken back")

    def give_up(self, attempts: Sequence[tuple[int, int]], reason: str, *, claimed: bool = False) -> None:
        """Take back attempts, claimed or not: their worker is gone, or is to stop. A finished trial does not change.

        Those that are `claimed` count against their trial.
        """
        self._take_back(attempts, "revoke", reason, claimed)

    def _take_back(self, attempts: Sequence[tuple[int, int]], mode: str, reason: str, claimed: bool = False) -> None:
        arguments: list[int | str] = [mode]
        for number, attempt in attempts:
            lost = Lost(number=number, attempt=attempt, reason=reason, claimed=claimed)
            arguments += [number, attempt, seal(self._study, lost, self._signer)]
        run(self._client, "cancel", self._study, *arguments)

    def take_back_missing(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Take back ``void`` attempts, also those that Redis has as ended: their results never came.

        Attempts after them may be claimed, even if earlier schedulers sent some. Nothing changes while one of those
        runs.
        """
        self._take_back(attempts, "void", "Redis has no record that it runs, and no result of it came")

    def reopen(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Let another attempt follow if one of these has ended its trial."""
        run(self._client, "reopen", self._study, *chain.from_iterable(attempts))

    def refused(self) -> int:
        """Return the number of late results that were refused so far."""
        return int(self._client.hget(self._attempts, "refused") or 0)

    def reopen_study(self) -> None:
        """Remove the expiry that `erase` of an earlier scheduler put on the attempts."""
        self._client.persist(self._attempts)

    def erase(self) -> None:
        """Remove the study's keys: it has ended and all is recorded.

        The attempts are kept for ERASED_SECONDS: messages that were taken back may still lie in a queue, and their
        claims must be refused.
        """
        gone = ("events", "leases", "cancel", "holder", "known", "gangs", "seats", "yields")
        self._client.delete(*keys(self._study, *gone))
        for kept in keys(self._study, "attempts", "breakers"):
            self._client.expire(kept, ERASED_SECONDS)


def new_delivery() -> str:
    """Return a name for one delivery of a message."""
    return uuid.uuid4().hex[:8]


def _member(attempt: tuple[int, int]) -> str:
    return f"{attempt[0]}.{attempt[1]}"


def _failure(result: Result | None, watched: bool) -> str:
    """Return the kind of a result's failure as the scripts count it: '' for a success, or 'unwatched'."""
    if result is None or result.outcome.state in WELL:
        return ""
    failed = result.outcome.state is TrialState.FAILED and not result.outcome.out_of_memory
    return kind_of(result.outcome.error) if watched and failed else "unwatched"
