"""The way between workers and schedulers, in Redis: both ends of it.

The broker only delivers; here is decided who runs what, by the scripts in `gate.py`. An attempt is *claimed* by the
worker that will run it, its *lease* is renewed while it runs, and its result is taken only from a worker that still
holds the lease. Redis is the gate; the store stays the authority, so that losing Redis costs a re-run and never a
double count.

Keys of a study, under ``shadho:{study}:``; `strikes.py` and `seats.py` tell of the others:

========  ======  ===================================================================================
events    stream  what the scheduler has not confirmed yet, one JSON record an entry
attempts  hash    trial number -> ``N`` all up to N are fenced, ``N:delivery`` N is claimed, or
                  ``done:N:delivery``; and ``refused`` -> late results that were refused
leases    zset    ``number.attempt`` -> moment the lease ends (ms, the server's clock); 0 once it has
cancel    set     numbers of running trials that should stop
========  ======  ===================================================================================
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shadho_celery import gate
from shadho_celery.envelope import seal, unseal
from shadho_celery.errors import UsageError
from shadho_celery.registry import Redis
from shadho_celery.signing import UNSIGNED, Signer
from shadho_celery.standing import signature
from shadho_celery.trial import Event, GangEvent, Lost, Report, Result, Started, TrialState

#: seconds for which messages of a study that has ended are refused
ERASED_SECONDS = 7 * 86400

#: events read at once
READ = 1000


@dataclass(frozen=True)
class Keys:
    """The names of a study's keys."""

    study: str

    def __getattr__(self, name: str) -> str:
        return f"shadho:{self.study}:{name}"


def configured_lease() -> float:
    """Seconds for which the silence of a running trial is believed: 30, or what SHADHO_LEASE_SECONDS says."""
    told = os.environ.get("SHADHO_LEASE_SECONDS") or "30"
    try:
        seconds = float(told)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 86400.0:
        raise UsageError(f"SHADHO_LEASE_SECONDS is {told!r}; give a number of seconds from 1 to 86400")
    return seconds


class Claim(Enum):
    """What became of a claim."""

    TAKEN = 1
    #: the attempt is somebody else's, or not to be run any more
    REFUSED = 0
    #: this worker gets nothing for the time being: it fails trials that others have not failed
    HELD = -1


class WorkerChannel:
    """A worker's end: claim, renew, report, finish."""

    def __init__(
        self, client: Redis, lease_seconds: float | None = None, worker: str = "", signer: Signer = UNSIGNED
    ) -> None:
        """`worker` is who claims; the lease is the configured one by default."""
        self._client = client
        self._lease_ms = int(1000 * (configured_lease() if lease_seconds is None else lease_seconds))
        self._worker = worker
        self._signer = signer
        self._step = client.register_script(gate.STEP)
        self._renew = client.register_script(gate.RENEW)

    def claim(self, study: str, started: Started) -> bool:
        """Take the attempt for this worker; False where it is not to be run (any more)."""
        return self.step(study, None, started)[1] is Claim.TAKEN

    def finish(self, study: str, result: Result) -> bool:
        """Send a result and end the trial's leases; False where this attempt has lost its lease: nothing was sent."""
        return self.step(study, result, None)[0]

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

        With the same `delivery` it may be said again when the answer got lost. A result that is `watched` counts for or
        against the worker.
        """
        keys = Keys(study)
        parts = [part for event in (result, started) for part in self._numbered(study, event)]
        finished, claimed = self._step(
            keys=[keys.attempts, keys.leases, keys.events, keys.cancel, keys.strikes, keys.known],
            args=[
                self._lease_ms,
                delivery or new_delivery(),
                self._worker,
                gate.MAX_STRIKES,
                *parts,
                _failure(result, watched),
            ],
        )
        return bool(finished), Claim(claimed)

    def renew(self, study: str, attempts: Sequence[tuple[int, int]]) -> list[str]:
        """Renew the leases of (number, attempt) pairs; for each ``ok``, ``cancel`` or ``gone`` (not ours)."""
        keys = Keys(study)
        members = [f"{number}.{attempt}" for number, attempt in attempts]
        return list(self._renew(keys=[keys.attempts, keys.leases, keys.cancel], args=[self._lease_ms, *members]))

    def count_refused(self, study: str) -> None:
        """One late result more was refused, before it was sent."""
        self._client.hincrby(Keys(study).attempts, "refused", 1)

    def report(self, study: str, report: Report) -> None:
        """Send a report."""
        self._client.xadd(Keys(study).events, {"e": seal(study, report, self._signer)})

    def _numbered(self, study: str, event: Result | Started | None) -> list[Any]:
        return ["", "", ""] if event is None else [event.number, event.attempt, seal(study, event, self._signer)]


class SchedulerChannel:
    """A scheduler's end: drain events, see leases end, take attempts back."""

    def __init__(self, client: Redis, study: str, signer: Signer = UNSIGNED) -> None:
        self._client = client
        self._study = study
        self._signer = signer
        self._keys = Keys(study)
        self._expire = client.register_script(gate.EXPIRE)
        self._extend = client.register_script(gate.EXTEND)
        self._cancel = client.register_script(gate.CANCEL)
        self._reopen = client.register_script(gate.REOPEN)
        #: events that nobody with our key has signed
        self.forged = 0
        #: id of the last event read; the stream holds what an earlier life did not confirm
        self._last = "0"

    def drain(self, wait_ms: int) -> list[Event | GangEvent]:
        """Events since the last call, waiting up to `wait_ms` (0: not at all) for the first one."""
        answer: Any = self._client.xread({self._keys.events: self._last}, count=READ, block=wait_ms or None)
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
            self._client.xtrim(self._keys.events, minid=f"{moment}-{int(place) + 1}", approximate=False)

    def ended_leases(self) -> list[tuple[int, int]]:
        """(number, attempt) of the claimed attempts that fell silent, again and again until they are forgotten."""
        members: list[str] = self._expire(keys=[self._keys.leases])
        return [_pair(member) for member in members]

    def extend_leases(self) -> None:
        """Renew all leases that have not ended: for a while nobody could reach Redis to do so."""
        self._extend(keys=[self._keys.leases], args=[int(1000 * configured_lease())])

    def forget(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Forget ended leases: their loss is recorded."""
        members = [f"{number}.{attempt}" for number, attempt in attempts]
        if members:
            self._client.zrem(self._keys.leases, *members)

    def leased(self, attempts: Sequence[tuple[int, int]]) -> list[bool]:
        """For each (number, attempt) whether Redis knows a lease of it, ended or not."""
        if not attempts:
            return []
        scores = self._client.zmscore(self._keys.leases, [f"{number}.{attempt}" for number, attempt in attempts])
        return [score is not None for score in scores]

    def cancel(self, attempts: Sequence[tuple[int, int]], *, running: bool) -> None:
        """Take back the attempts that are not claimed (each gives a Lost event); with `running` stop the others."""
        self._take_back(attempts, "stop" if running else "leave", "taken back")

    def give_up(self, attempts: Sequence[tuple[int, int]], reason: str, *, claimed: bool = False) -> None:
        """Take back attempts: whoever held them is gone, or is to stop. A trial that has ended stays so.

        Those that are `claimed` count against their trial.
        """
        self._take_back(attempts, "gone", reason, claimed)

    def _take_back(self, attempts: Sequence[tuple[int, int]], mode: str, reason: str, claimed: bool = False) -> None:
        arguments: list[Any] = [mode]
        for number, attempt in attempts:
            lost = Lost(number=number, attempt=attempt, reason=reason, claimed=claimed)
            arguments += [number, attempt, seal(self._study, lost, self._signer)]
        keys = self._keys
        self._cancel(keys=[keys.attempts, keys.cancel, keys.events, keys.leases], args=arguments)

    def reopen(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Where one of these attempts has ended its trial, let another one follow."""
        self._reopen(keys=[self._keys.attempts], args=[part for pair in attempts for part in pair])

    def refused(self) -> int:
        """Late results that were refused so far."""
        return int(self._client.hget(self._keys.attempts, "refused") or 0)

    def open(self) -> None:
        """Take up the memory of the study's attempts, where an earlier scheduler has erased its keys."""
        self._client.persist(self._keys.attempts)

    def erase(self) -> None:
        """Remove the study's keys: it has ended and all is recorded.

        The attempts are kept for ERASED_SECONDS: messages that were taken back may still lie in a queue, and whoever
        gets one must be told that it is not to be run.
        """
        keys = self._keys
        self._client.delete(keys.events, keys.leases, keys.cancel, keys.known, keys.gangs, keys.seats, keys.yields)
        self._client.expire(keys.attempts, ERASED_SECONDS)
        self._client.expire(keys.strikes, ERASED_SECONDS)


def new_delivery() -> str:
    """A name for one delivery of a message."""
    return uuid.uuid4().hex[:8]


def _failure(result: Result | None, watched: bool) -> str:
    """How a result counts in the scripts: by what failed, '' for a success, and 'unwatched'."""
    if result is None or result.state in (TrialState.COMPLETE, TrialState.PRUNED):
        return ""
    failed = result.state is TrialState.FAILED and not result.out_of_memory
    return signature(result.error) if watched and failed else "unwatched"


def _pair(member: str) -> tuple[int, int]:
    number, attempt = member.split(".")
    return int(number), int(attempt)
