"""Channel: the way back from workers to schedulers, in Redis; both ends of it.

The broker only delivers; the scripts in `lua/` decide who runs an attempt. An attempt is *claimed* by the worker that
will run it, its *lease* is renewed while it runs, and its result is taken only while that lease lasts.

Keys of a study, under ``shadho:{study}:``; `quarantine` and `seats` describe the others:

========  ======  ===================================================================================
events    stream  events that the scheduler has not confirmed yet, an entry has one JSON record a line
attempts  hash    trial number -> ``N`` all up to N are void, ``N:delivery`` N is claimed, or
                  ``done:N:delivery``; and ``refused`` -> late results that were refused
leases    zset    ``number.attempt`` -> moment the lease ends (ms, the server's clock); 0 once it has
cancel    set     numbers of running trials that should stop
========  ======  ===================================================================================
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain

import msgspec

from shadho_celery.core.failures import kind_of
from shadho_celery.core.trial import WELL, Event, GangEvent, Lost, Report, Result, Started, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.transport.redis import Redis, keys, run
from shadho_celery.transport.signing import UNSIGNED, Signer

#: seconds for which messages of a study that has ended are refused
ERASED_SECONDS = 7 * 86400

#: events read at once
READ = 1000

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
        """Finish one attempt and claim the next, as `exchange`; either may be None."""
        results, claims = [result] if result else [], [started] if started else []
        finished, claimed = self.exchange(study, results, claims, delivery or new_delivery(), watched=watched)
        return any(finished), claimed[0] if claimed else Claim.REFUSED

    def exchange(
        self, study: str, results: Sequence[Result], claims: Sequence[Started], delivery: str, *, watched: bool = False
    ) -> tuple[list[bool], list[Claim]]:
        """Finish attempts and claim others in one round trip.

        Returns for each result whether it was taken, and for each claim its answer. The call may be repeated with the
        same `delivery` if the answer was lost. Results that are `watched` count for or against the worker.
        """
        parts: list[int | str] = [self._lease_ms, delivery, self._worker, MAX_STRIKES, len(results)]
        for result in results:
            parts += (*self._sealed(study, result), _failure(result, watched))
        for started in claims:
            parts += self._sealed(study, started)
        finished, claimed = run(self._client, "finish_and_claim", study, *parts)
        return [bool(each) for each in finished], [Claim(each) for each in claimed]

    def give_back(self, study: str, attempts: Sequence[tuple[int, int]], reason: str) -> None:
        """Give back attempts that are claimed and were not begun: they are lost, at no cost for their trials."""
        lost = [Lost(number=number, attempt=attempt, reason=reason, claimed=False) for number, attempt in attempts]
        parts = [part for each in lost for part in (each.number, each.attempt, seal(study, each, self._signer))]
        run(self._client, "cancel", study, "revoke", *parts)

    def renew(self, study: str, attempts: Sequence[tuple[int, int]]) -> list[str]:
        """Renew the leases of (number, attempt) pairs; return for each ``ok``, ``cancel`` or ``gone`` (not ours)."""
        return list(run(self._client, "renew", study, self._lease_ms, *map(_member, attempts)))

    def count_refused(self, study: str) -> None:
        """Count a late result that was refused before it was sent."""
        self._client.hincrby(*keys(study, "attempts"), "refused", 1)

    def report(self, study: str, report: Report) -> None:
        """Send a report."""
        self._client.xadd(*keys(study, "events"), {"e": seal(study, report, self._signer)})

    def _sealed(self, study: str, event: Result | Started) -> tuple[int, int, str]:
        return event.number, event.attempt, seal(study, event, self._signer)


class SchedulerChannel:
    """A scheduler's end: drain events, find ended leases, take attempts back."""

    def __init__(self, client: Redis, study: str, signer: Signer = UNSIGNED) -> None:
        self._client = client
        self._study = study
        self._signer = signer
        self._attempts, self._leases, self._events = keys(study, "attempts", "leases", "events")
        #: entries that are not signed with our key, or are not events
        self.forged = 0
        #: id of the last event read; the stream starts with events that an earlier scheduler did not confirm
        self._last = "0"

    def drain(self, wait_ms: int) -> list[Event | GangEvent]:
        """Return the events since the last call, waiting up to `wait_ms` (0: not at all) for the first one."""
        answer = self._client.xread({self._events: self._last}, count=READ, block=wait_ms or None)
        if not answer:
            return []
        entries = next(iter(answer.values()))[0] if isinstance(answer, dict) else answer[0][1]
        self._last = entries[-1][0]
        texts = chain.from_iterable(fields.get("e", "").split("\n") for _, fields in entries)
        events = [unseal(self._study, text, self._signer) for text in texts]
        self.forged += events.count(None)
        return [event for event in events if event is not None]

    def confirm(self) -> None:
        """Remove the events drained so far: they are recorded."""
        if self._last != "0":
            moment, place = self._last.split("-")
            self._client.xtrim(self._events, minid=f"{moment}-{int(place) + 1}", approximate=False)

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

    def leased(self, attempts: Sequence[tuple[int, int]]) -> list[bool]:
        """Return for each (number, attempt) whether Redis knows a lease of it, ended or not."""
        scores = self._client.zmscore(self._leases, [*map(_member, attempts)]) if attempts else []
        return [score is not None for score in scores]

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
        self._client.delete(*keys(self._study, "events", "leases", "cancel", "known", "gangs", "seats", "yields"))
        for kept in keys(self._study, "attempts", "breakers"):
            self._client.expire(kept, ERASED_SECONDS)


def new_delivery() -> str:
    """Return a name for one delivery of a message."""
    return uuid.uuid4().hex[:8]


def _member(attempt: tuple[int, int]) -> str:
    return f"{attempt[0]}.{attempt[1]}"


def _failure(result: Result, watched: bool) -> str:
    """Return the kind of a result's failure as the scripts count it: '' for a success, or 'unwatched'."""
    if result.outcome.state in WELL:
        return ""
    failed = result.outcome.state is TrialState.FAILED and not result.outcome.out_of_memory
    return kind_of(result.outcome.error) if watched and failed else "unwatched"
