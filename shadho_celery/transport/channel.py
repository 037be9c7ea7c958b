"""Channel: the way back from workers to schedulers, in Redis; both ends of it.

The broker only delivers; the scripts in `lua/` decide who runs what. An attempt is *claimed* by the worker that will run
it, its *lease* is renewed while it runs, and its result is taken only from a worker that still holds the lease.

Keys of a study, under ``shadho:{study}:``; `quarantine` and `seats` tell of the others:

========  ======  ===================================================================================
events    stream  what the scheduler has not confirmed yet, one JSON record an entry
attempts  hash    trial number -> ``N`` all up to N are void, ``N:delivery`` N is claimed, or
                  ``done:N:delivery``; and ``refused`` -> late results that were refused
leases    zset    ``number.attempt`` -> moment the lease ends (ms, the server's clock); 0 once it has
cancel    set     numbers of running trials that should stop
========  ======  ===================================================================================
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from shadho_celery.core.failures import kind_of
from shadho_celery.core.trial import WELL, Event, GangEvent, Lost, Report, Result, Started, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.transport.event_codec import seal, unseal
from shadho_celery.transport.redis import Redis, script
from shadho_celery.transport.signing import UNSIGNED, Signer

#: seconds for which messages of a study that has ended are refused
ERASED_SECONDS = 7 * 86400

#: events read at once
READ = 1000


#: strikes in a row that open a worker's circuit breaker, see `quarantine`
MAX_STRIKES = 2


def keys(study: str, *names: str) -> list[str]:
    """Return the study's keys of these names."""
    return [f"shadho:{study}:{name}" for name in names]


def configured_lease() -> float:
    """Return the seconds that a lease lasts without renewal: 30, or what SHADHO_LEASE_SECONDS says."""
    told = os.environ.get("SHADHO_LEASE_SECONDS") or "30"
    try:
        seconds = float(told)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 86400.0:
        raise UsageError(f"SHADHO_LEASE_SECONDS is {told!r}; give a number of seconds from 1 to 86400")
    return seconds


class Claim(Enum):
    """Answer to a claim."""

    TAKEN = 1
    #: another worker runs the attempt, or it is not to be run any more
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
        self._step = script(client, "step")
        self._renew = script(client, "renew")
        self._cancel = script(client, "cancel")

    def decline(self, study: str, number: int, attempt: int, reason: str) -> None:
        """Give an attempt back that is not claimed: it is lost, and no fault of its trial's."""
        lost = Lost(number=number, attempt=attempt, reason=reason, claimed=False)
        self._cancel(
            keys=keys(study, "attempts", "cancel", "events", "leases"),
            args=["leave", number, attempt, seal(study, lost, self._signer)],
        )

    def step(
        self,
        study: str,
        result: Result | None,
        started: Started | None,
        *,
        delivery: str | None = None,
        watched: bool = False,
    ) -> tuple[bool, Claim]:
        """Finish one attempt and claim the next in one round trip; either may be None.

        Returns whether the result was taken, and the answer to the claim. With the same `delivery` it may be said again
        when the answer got lost. A result that is `watched` counts for or against the worker.
        """
        finished, claimed = self._step(
            keys=keys(study, "attempts", "leases", "events", "cancel", "strikes", "known"),
            args=[
                self._lease_ms,
                delivery or new_delivery(),
                self._worker,
                MAX_STRIKES,
                *self._sealed(study, result),
                *self._sealed(study, started),
                _failure(result, watched),
            ],
        )
        return bool(finished), Claim(claimed)

    def renew(self, study: str, attempts: Sequence[tuple[int, int]]) -> list[str]:
        """Renew the leases of (number, attempt) pairs; return for each ``ok``, ``cancel`` or ``gone`` (not ours)."""
        members = [f"{number}.{attempt}" for number, attempt in attempts]
        return list(self._renew(keys=keys(study, "attempts", "leases", "cancel"), args=[self._lease_ms, *members]))

    def count_refused(self, study: str) -> None:
        """Count a late result that was refused before it was sent."""
        self._client.hincrby(*keys(study, "attempts"), "refused", 1)

    def report(self, study: str, report: Report) -> None:
        """Send a report."""
        self._client.xadd(*keys(study, "events"), {"e": seal(study, report, self._signer)})

    def _sealed(self, study: str, event: Result | Started | None) -> list[int | str]:
        return ["", "", ""] if event is None else [event.number, event.attempt, seal(study, event, self._signer)]


class SchedulerChannel:
    """A scheduler's end: drain events, see leases end, take attempts back."""

    def __init__(self, client: Redis, study: str, signer: Signer = UNSIGNED) -> None:
        self._client = client
        self._study = study
        self._signer = signer
        self._attempts, self._leases, self._events, self._cancelled = keys(
            study, "attempts", "leases", "events", "cancel"
        )
        self._expire = script(client, "expire")
        self._extend = script(client, "extend")
        self._cancel = script(client, "cancel")
        self._reopen = script(client, "reopen")
        #: events that are not signed with our key, or are none
        self.forged = 0
        #: id of the last event read; the stream holds what an earlier life did not confirm
        self._last = "0"

    def drain(self, wait_ms: int) -> list[Event | GangEvent]:
        """Return the events since the last call, waiting up to `wait_ms` (0: not at all) for the first one."""
        answer: Any = self._client.xread({self._events: self._last}, count=READ, block=wait_ms or None)
        if not answer:
            return []
        entries = next(iter(answer.values()))[0] if isinstance(answer, dict) else answer[0][1]
        self._last = entries[-1][0]
        events = [unseal(self._study, fields.get("e", ""), self._signer) for _, fields in entries]
        self.forged += events.count(None)
        return [event for event in events if event is not None]

    def confirm(self) -> None:
        """Forget the events drained so far: they are recorded."""
        if self._last != "0":
            moment, place = self._last.split("-")
            self._client.xtrim(self._events, minid=f"{moment}-{int(place) + 1}", approximate=False)

    def ended_leases(self) -> list[tuple[int, int]]:
        """Return (number, attempt) of the claimed attempts that fell silent, again until they are forgotten."""
        members: list[str] = self._expire(keys=[self._leases])
        return [_pair(member) for member in members]

    def extend_leases(self) -> None:
        """Renew all leases that have not ended: for a while workers could not reach Redis to do so."""
        self._extend(keys=[self._leases], args=[int(1000 * configured_lease())])

    def forget(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Forget ended leases: their loss is recorded."""
        members = [f"{number}.{attempt}" for number, attempt in attempts]
        if members:
            self._client.zrem(self._leases, *members)

    def leased(self, attempts: Sequence[tuple[int, int]]) -> list[bool]:
        """Return for each (number, attempt) whether Redis knows a lease of it, ended or not."""
        if not attempts:
            return []
        scores = self._client.zmscore(self._leases, [f"{number}.{attempt}" for number, attempt in attempts])
        return [score is not None for score in scores]

    def cancel(self, attempts: Sequence[tuple[int, int]], *, running: bool) -> None:
        """Take back the attempts that are not claimed (each gives a Lost event); with `running` stop the others."""
        self._take_back(attempts, "stop" if running else "leave", "taken back")

    def give_up(self, attempts: Sequence[tuple[int, int]], reason: str, *, claimed: bool = False) -> None:
        """Take back attempts, claimed or not: their worker is gone, or is to stop. A trial that has ended stays so.

        Those that are `claimed` count against their trial.
        """
        self._take_back(attempts, "gone", reason, claimed)

    def _take_back(self, attempts: Sequence[tuple[int, int]], mode: str, reason: str, claimed: bool = False) -> None:
        arguments: list[Any] = [mode]
        for number, attempt in attempts:
            lost = Lost(number=number, attempt=attempt, reason=reason, claimed=claimed)
            arguments += [number, attempt, seal(self._study, lost, self._signer)]
        self._cancel(keys=[self._attempts, self._cancelled, self._events, self._leases], args=arguments)

    def reopen(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Let another attempt follow where one of these has ended its trial."""
        self._reopen(keys=[self._attempts], args=[part for pair in attempts for part in pair])

    def refused(self) -> int:
        """Return the late results that were refused so far."""
        return int(self._client.hget(self._attempts, "refused") or 0)

    def reopen_study(self) -> None:
        """Remove the expiry that `erase` of an earlier scheduler put on the attempts."""
        self._client.persist(self._attempts)

    def erase(self) -> None:
        """Remove the study's keys: it has ended and all is recorded.

        The attempts are kept for ERASED_SECONDS: messages that were taken back may still lie in a queue, and a worker
        that gets one must be told that it is not to be run.
        """
        gone = keys(self._study, "events", "leases", "cancel", "known", "gangs", "seats", "yields")
        self._client.delete(*gone)
        for kept in keys(self._study, "attempts", "strikes"):
            self._client.expire(kept, ERASED_SECONDS)


def new_delivery() -> str:
    """Return a name for one delivery of a message."""
    return uuid.uuid4().hex[:8]


def _failure(result: Result | None, watched: bool) -> str:
    """Return how a result counts in the scripts: the kind of its failure, '' for a success, or 'unwatched'."""
    if result is None or result.outcome.state in WELL:
        return ""
    failed = result.outcome.state is TrialState.FAILED and not result.outcome.out_of_memory
    return kind_of(result.outcome.error) if watched and failed else "unwatched"


def _pair(member: str) -> tuple[int, int]:
    number, attempt = member.split(".")
    return int(number), int(attempt)
