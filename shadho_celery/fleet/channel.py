"""Both ends of the channel in Redis by which workers send events back to schedulers.

The broker only delivers messages. The scripts in `lua/` decide which worker runs an attempt. That worker *claims* the
attempt and renews its *lease* while the attempt runs. A result is accepted only while the lease lasts.

A failure of a kind that no other worker has had is a *strike* against its worker. It is counted when the result is
accepted (`lua/finish_and_claim.lua`). After `MAX_STRIKES` strikes in a row, the worker's circuit breaker opens: the
worker cannot claim trials of the study until the scheduler has examined its failures (`fleet.circuit_breaker`). A
quarantined worker gets no further trials of the study.

Keys of a study, under ``shadho:{study}:``; the module `seats` describes the keys for gangs:

========  ======  ===================================================================================
events    stream  events not confirmed by the scheduler; an entry has one JSON record per line
attempts  hash    trial number -> its record: ``N`` (attempts up to N cannot be claimed) or ``N:delivery``
                  (attempt N is claimed), each followed by ``+A`` for each earlier attempt A that still runs; or
                  ``done:N:delivery`` (attempt N has ended the trial). Also ``refused`` -> number of late
                  results that were refused
done      bitmap  1 at the numbers of ended trials that were removed from `attempts`
leases    zset    ``number.attempt`` -> time at which the lease ends (ms, the server's clock); 0 if it has ended
cancel    set     numbers of running trials that should stop; ``N:pruned`` if trial N was pruned
breakers  hash    worker -> number of strikes in a row; or ``half:`` and the time in ms from which it may
                  claim the next trial; or ``quarantined``
known     set     kinds of failures that are caused by the trials, for example because several workers have had them
sources   string  sealed sources of the study's code, if it ships them
inputs    hash    the files of the study's command, if it ships them, by digest
inbox     stream  requests to the scheduler (`control`)
holder    string  ``host process start:fence:signature`` of the study's scheduler; it expires after HOLD_SECONDS
========  ======  ===================================================================================

All keys have a time to live, which the scheduler and the workers renew. If a study's scheduler does not come back,
Redis deletes the keys a week after the study's last trial.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import chain

import redis

from shadho_celery.core.code import MAX_SOURCES, Digest, FullDigest, Sources
from shadho_celery.core.failures import read_failure
from shadho_celery.core.trial import WELL, Event, GangEvent, Lost, Report, Result, Started, TrialState
from shadho_celery.errors import LockLost, StudyLocked, UsageError
from shadho_celery.fleet.control import Inbox
from shadho_celery.fleet.redis import Redis, count, keys, run
from shadho_celery.fleet.signing import UNSIGNED, Sealed, Signer
from shadho_celery.store.base import described, holder_name, is_held

#: seconds for which messages of an ended study are refused, and for which the keys of an abandoned study are kept
ERASED_SECONDS = 7 * 86400

#: number of waiting events above which reports are refused, about 20 MB; other events are always accepted
MAX_WAITING = 100_000

#: number of ended trials that stay in `attempts` with the delivery that ended each, because a worker may send its
#: result again
KEPT_ENDED = 10_000

#: number of ended trials that are moved to `done` at once
ARCHIVED = 1000

#: maximum number of trials of a removed study that are marked as ended; the marks take a megabyte
MAX_REMOVED = 2**23

#: maximum number of stream entries read at a time
READ = 1000

#: seconds without a renewal after which a scheduler on another machine may take over the lock in Redis; at most as long
#: as the lock in the store, which is renewed less often
HOLD_SECONDS = 20.0

#: maximum number of forged lock values that one call of `_hold` replaces
FORGED_HOLDERS = 5

#: maximum number of characters of an event: three times the maximum bytes of a record in the runner's pipe, because
#: JSON escapes characters
MAX_EVENT = 50_000_000

#: types of a study's keys, and names of the keys of each type
_OF_STUDY = {
    "stream": ("events", "inbox"),
    "hash": ("attempts", "breakers", "gangs", "seats", "inputs"),
    "zset": ("leases",),
    "set": ("cancel", "known", "yields"),
    "string": ("done", "holder", "sources"),
}
#: keys of the fleet, and their types
_OF_FLEET = {"shadho:workers": "set", "shadho:studies": "set", "shadho:drains": "hash"}

#: maximum of the first part (ms) of the id of a stream's entry. No clock reaches it. If another client adds an entry
#: with this id, Redis refuses all further entries
_LAST_ID = str(2**64 - 1)

#: format of the lock's value: the holder's name, its fencing number, and its signature
_HOLDER = re.compile(r"\S+ \d{1,10}( \S+){1,2}:\d{1,19}:[0-9a-f]*")

#: format of the members of `leases`
_MEMBER = re.compile(r"(\d{1,16})\.(\d{1,16})")
#: returns the member of `leases` for a (number, attempt) pair
_member = "{0[0]}.{0[1]}".format

_EVENTS = Sealed[Event | GangEvent](Event | GangEvent, MAX_EVENT)

#: strikes in a row that open a worker's circuit breaker
MAX_STRIKES = 2
#: period in ms during which a half-open circuit breaker allows one trial
HALF_OPEN_MS = 5000

#: maximum number of characters of sealed sources: their bytes in base64, with paths and signature
MAX_SEALED = 2 * MAX_SOURCES

_SOURCES = Sealed[Sources](Sources, MAX_SEALED)


def configured_lease() -> float:
    """Return the seconds of silence until a running attempt is lost: 30, or the number in SHADHO_LEASE_SECONDS (at
    least 20 if machines may vanish).
    """
    told = os.environ.get("SHADHO_LEASE_SECONDS") or "30"
    try:
        seconds = float(told)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 86400.0:
        raise UsageError(f"SHADHO_LEASE_SECONDS is {told!r}; give a number of seconds from 1 to 86400")
    return seconds


def unseal(study: str, text: str, signer: Signer) -> Event | GangEvent | None:
    """Return the event in a text of the stream, or None if the text is not an event or lacks a required signature.

    The signature covers the study's key, so an event of another study is refused.
    """
    event = _EVENTS.read(study, text, signer)
    # Only the study's scheduler decides whether a trial is retried, so a result that asks for a retry is refused.
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


class ChannelEnd:
    """Base of both ends of the channel: the connection to Redis, and the key that signs its events."""

    def __init__(self, client: Redis, signer: Signer) -> None:
        self._client, self._signer = client, signer

    def _take_back(
        self, study: str, mode: str, attempts: Iterable[tuple[int, int]], reason: str, **facts: bool
    ) -> None:
        """Take back attempts in a mode of the script `cancel`. `facts` are fields of their Lost events."""
        parts: list[int | str] = []
        for number, attempt in attempts:
            lost = Lost(number=number, attempt=attempt, reason=reason, **({"claimed": False} | facts))
            parts += (number, attempt, self._signer.seal(study, lost))
        run(self._client, "cancel", study, mode, *parts)


class WorkerEnd(ChannelEnd):
    """Base of `WorkerChannel` and `WorkerSeats`: the worker's name, and the duration of its leases."""

    def __init__(
        self, client: Redis, lease_seconds: float | None = None, worker: str = "", signer: Signer = UNSIGNED
    ) -> None:
        """Claim attempts and take seats under the name `worker`. By default, leases last as configured."""
        super().__init__(client, signer)
        self._lease_ms = int(1000 * (configured_lease() if lease_seconds is None else lease_seconds))
        self.worker = worker


class WorkerChannel(WorkerEnd):
    """A worker's end of the channel: claim or decline, renew, report, finish."""

    def decline(self, study: str, number: int, attempt: int, reason: str, *, is_too_long: bool = False) -> None:
        """Give back an attempt that this worker has not claimed. It ends LOST, which does not count against its trial.

        `is_too_long` is as in `Lost`.
        """
        self._take_back(study, "keep", [(number, attempt)], reason, is_too_long=is_too_long)

    def exchange(
        self, study: str, results: Sequence[Result], claims: Sequence[Started], delivery: str, *, watched: bool = False
    ) -> tuple[list[bool], list[Claim]]:
        """Send the results of attempts, and claim other attempts, in one round trip to Redis.

        Returns for each result whether it was accepted, and for each claim its answer. If no answer arrived, repeat the
        call with the same `delivery`. Failures count as strikes against the worker only if `watched` is True.
        """
        parts: list[int | str] = [self._lease_ms, delivery, self.worker, MAX_STRIKES, HALF_OPEN_MS, len(results)]
        for result in results:
            failure = ""
            if result.outcome.state not in WELL:
                failed = result.outcome.state is TrialState.FAILED and not result.outcome.out_of_memory
                failure = read_failure(result.outcome.error).cause if watched and failed else "unwatched"
            parts += (*self._sealed(study, result), failure)
        for started in claims:
            parts += self._sealed(study, started)
        finished, claimed = run(self._client, "finish_and_claim", study, *parts)
        return [bool(each) for each in finished], [Claim(each) for each in claimed]

    def give_back(self, study: str, attempts: Sequence[tuple[int, int]], reason: str) -> None:
        """Give back claimed attempts that this worker cannot finish. They end LOST, which does not count against their
        trials.
        """
        self._take_back(study, "revoke", attempts, reason, given_back=True)

    def renew(self, study: str, attempts: Sequence[tuple[int, int]]) -> list[str]:
        """Renew the leases of (number, attempt) pairs. Return an answer for each pair.

        The answers are the same as from `told`, and ``gone`` if this worker does not have the lease.
        """
        return list(run(self._client, "renew", study, self._lease_ms, *map(_member, attempts)))

    def are_refused(
        self, study: str, attempts: Collection[tuple[int, int]], *, replicas: bool = False
    ) -> list[tuple[int, int]]:
        """Return the (number, attempt) pairs among `attempts` that no worker can claim any more.

        With `replicas`, leave out attempts that still run: workers can take seats in the gangs of running attempts.
        """
        answers = run(self._client, "refusals", study, int(replicas), *chain.from_iterable(attempts))
        return [attempt for attempt, is_refused in zip(attempts, answers, strict=True) if is_refused]

    def count_refused(self, study: str) -> None:
        """Count a late result that was refused before it was sent."""
        [attempts] = keys(study, "attempts")
        with self._client.pipeline() as pipe:
            # If Redis no longer had the study's keys, this creates the key anew, so it needs a time to live.
            pipe.hincrby(attempts, "refused", 1).expire(attempts, ERASED_SECONDS).execute()

    def report(self, study: str, report: Report) -> str:
        """Send a report. Return one of the answers of `told` for its trial, or ``refused``.

        A report is refused if the attempt's lease has ended, or if too many events wait for the scheduler.
        """
        return str(run(self._client, "report", study, *self._sealed(study, report), MAX_WAITING))

    def told(self, study: str, numbers: Sequence[int]) -> list[str]:
        """Return for each trial whether it should stop: ``ok`` (no), ``cancel`` (yes) or ``prune`` (yes, as pruned).

        This is cheaper than `renew`.
        """
        [cancelled] = keys(study, "cancel")
        found = self._client.smismember(cancelled, [*numbers, *(f"{number}:pruned" for number in numbers)])
        answers = zip(found[: len(numbers)], found[len(numbers) :], strict=True)
        return [("prune" if is_pruned else "cancel") if is_told else "ok" for is_told, is_pruned in answers]

    def _sealed(self, study: str, event: Result | Started | Report) -> tuple[int, int, str]:
        return event.number, event.attempt, self._signer.seal(study, event)


class SchedulerChannel(ChannelEnd):
    """A scheduler's end of the channel: it drains events, finds ended leases and takes attempts back.

    The study has a lock in Redis besides the one in the store. Without it, schedulers with copies of the same store
    would take each other's events.
    """

    def __init__(
        self, client: Redis, study: str, signer: Signer = UNSIGNED, fence: int = 0, inbox: Inbox | None = None
    ) -> None:
        """Create the channel. `fence` is the fencing number of the scheduler's lock in its store. `inbox` receives
        requests.
        """
        super().__init__(client, signer)
        self._study = study
        self._attempts, self._leases, self._events = keys(study, "attempts", "leases", "events")
        self._fence = fence
        self._inbox = inbox
        self._holder_name = f"{holder_name()}:{fence}"
        self._holder = self._signed(self._holder_name)
        #: number of events, leases, locks and keys that were refused: unsigned, malformed, or of a wrong type
        self.forged = 0
        #: id of the last event that was read but not confirmed, or "". If it is "", the stream is read from its start,
        #: because new events have lower ids after a failover to a server whose clock is behind
        self._last = ""
        #: True if the last `drain` reached the end of the stream
        self.is_drained = False
        #: (number, attempt) pairs that ended their trials: first those since the last `confirm`, then those that are
        #: recorded in the store but still in `attempts`
        self._ended: list[tuple[int, int]] = []
        self._recorded: list[tuple[int, int]] = []

    def drain(self, wait_ms: int) -> list[Event | GangEvent]:
        """Return the events since the last call. Wait up to `wait_ms` for the first one (0: do not wait).

        A request to the scheduler also ends the wait; the inbox receives it.
        """
        streams = {self._events: self._last or "0"} | ({} if self._inbox is None else {self._inbox.key: "0"})
        answer = self._client.xread(streams, count=READ, block=wait_ms or None) or {}
        # The form of the answer depends on the version of Redis's protocol (RESP2 or RESP3).
        found = {key: parts[0] for key, parts in answer.items()} if isinstance(answer, dict) else dict(answer)
        if self._inbox is not None and found.get(self._inbox.key):
            forged = self._inbox.forged
            # Remove as many requests as XREAD can return, because it would return the remaining ones again.
            self._inbox.read(READ)
            self.forged += self._inbox.forged - forged
        entries = found.get(self._events, [])
        self.is_drained = len(entries) < READ
        if not entries:
            return []
        self._last = entries[-1][0]
        texts = [text for _, fields in entries for text in fields.get("e", "").split("\n")]
        events = [unseal(self._study, text, self._signer) for text in texts]
        self.forged += events.count(None)
        return [event for event in events if event is not None]

    def lock(self) -> None:
        """Lock the study on this Redis. Raises StudyLocked if another scheduler runs it from another store."""
        held = self._hold()
        if held != self._holder and not is_held(held.partition(":")[0], math.inf, 0.0):
            held = self._hold(dead=held)
        if held != self._holder:
            raise StudyLocked(
                f"this study is run on the same Redis by the scheduler on {described(held)}, from another copy of "
                "the store; stop it first, or begin another study (the lock of one that died ends after "
                f"{HOLD_SECONDS:.0f} s)"
            )

    def confirm(self) -> None:
        """Remove the events drained so far, and renew the lock. Call this once these events are recorded in the store.

        It also moves old ended trials from `attempts` to `done`. If another scheduler has the lock, nothing is removed.
        Raises LockLost in that case.
        """
        self.renew_lock(self._last)
        if self._last.startswith(_LAST_ID):
            self._client.delete(self._events)
        self._last = ""
        self._recorded += self._ended
        self._ended.clear()
        if len(self._recorded) >= KEPT_ENDED + ARCHIVED:
            self._archive(ARCHIVED)

    def renew_lock(self, recorded: str = "") -> None:
        """Renew the lock, and remove the events up to the id `recorded`.

        Raises LockLost if another scheduler has the lock.
        """
        self._holder = self._signed(self._holder_name)
        held = self._hold(recorded=recorded)
        if held != self._holder and _fence(held) < self._fence:
            # An earlier scheduler has taken the lock back. If two schedulers are live, the scheduler with the greater
            # fencing number continues.
            self.forged += 1
            held = self._hold(dead=held, recorded=recorded)
        if held != self._holder:
            raise LockLost("another scheduler has taken over this study's lock on Redis, so this one stops")

    def unlock(self) -> None:
        """Unlock the study, unless another scheduler has taken over the lock."""
        self._hold(seconds=0.0)

    def _hold(self, *, seconds: float = HOLD_SECONDS, dead: str = "", recorded: str = "") -> str:
        """Renew the lock, or take it if it is free, forged or held by `dead`. Return the lock's value, which names its
        holder.

        Raises redis-py's ConnectionError if forged values are written faster than they are removed.
        """
        for _ in range(FORGED_HOLDERS):
            held = str(run(self._client, "confirm", self._study, self._holder, int(1000 * seconds), dead, recorded))
            if held in (self._holder, dead):
                return held
            name, _, signature = held.rpartition(":")
            # Our own name was signed with an earlier key, so the value is replaced, too.
            is_own = name == self._holder_name
            if not is_own and _HOLDER.fullmatch(held) and self._signer.is_signed(self._study + name, signature):
                return held
            self.forged += not is_own
            dead = held
        raise redis.ConnectionError("another client keeps overwriting the study's lock")

    def _signed(self, holder: str) -> str:
        """Return the lock's value for a holder: its name, its fence, and a signature if there is a key."""
        return f"{holder}:{self._signer.sign(self._study + holder)}"

    def note_end(self, number: int, attempt: int) -> None:
        """Note that an attempt has ended its trial. Once the store has recorded that, the trial may be removed from
        `attempts`.
        """
        self._ended.append((number, attempt))

    def _archive(self, count: int) -> None:
        """Move the first `count` recorded trials from `attempts` to `done`."""
        run(self._client, "archive", self._study, *chain.from_iterable(self._recorded[:count]))
        del self._recorded[:count]

    def ended_leases(self) -> list[tuple[int, int]]:
        """Return the (number, attempt) pairs whose lease has ended. Each call returns them until `forget`."""
        found = {member: _MEMBER.fullmatch(member) for member in run(self._client, "expire", self._study)}
        if strange := [member for member, pair in found.items() if pair is None]:
            self.forged += self._client.zrem(self._leases, *strange)
        return [(int(pair[1]), int(pair[2])) for pair in found.values() if pair is not None]

    def extend_leases(self) -> None:
        """Renew all leases that have not ended. Call this after an outage in which workers could not reach Redis."""
        run(self._client, "extend", self._study, int(1000 * configured_lease()))

    def forget(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Remove the ended leases of these attempts, after their loss was recorded."""
        if members := [*map(_member, attempts)]:
            self._client.zrem(self._leases, *members)

    def states(self, attempts: Sequence[tuple[int, int]]) -> list[str]:
        """Return the state of each (number, attempt) pair: ``leased`` (it or the trial's latest attempt has a lease),
        ``free`` (it may be claimed) or ``void``.

        An attempt stays leased until `forget`, even if its lease has ended. The last event of a void attempt was
        already added to the stream.
        """
        return list(run(self._client, "attempt_states", self._study, *map(_member, attempts))) if attempts else []

    def cancel(self, attempts: Sequence[tuple[int, int]], *, running: bool, pruned: bool = False) -> None:
        """Take back the unclaimed attempts, with a Lost event for each. With `running`, also stop the claimed attempts.

        With `pruned`, their workers learn that the trials are pruned.
        """
        mode = "prune" if running and pruned else "stop" if running else "keep"
        self._take_back(self._study, mode, attempts, "taken back")

    def give_up(self, attempts: Sequence[tuple[int, int]], reason: str, *, claimed: bool = False) -> None:
        """Take back attempts, claimed or not, because their worker is gone or must stop. Ended trials do not change.

        With `claimed`, the loss counts against the trials.
        """
        self._take_back(self._study, "revoke", attempts, reason, claimed=claimed)

    def take_back_missing(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Take back ``void`` attempts whose results never arrived, even if Redis has recorded that they ended.

        Later attempts of their trials may then be claimed. Nothing changes for a trial while its latest attempt runs,
        which an earlier scheduler may have sent.
        """
        reason = "Redis has no record that it runs, and no result arrived"
        self._take_back(self._study, "void", attempts, reason)

    def reopen(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Allow later attempts of these trials to be claimed, although Redis has recorded that these attempts ended
        them.
        """
        run(self._client, "reopen", self._study, *chain.from_iterable(attempts))

    def refused(self) -> int:
        """Return the number of late results that were refused so far."""
        return count(self._client.hget(self._attempts, "refused"))

    def repair(self) -> None:
        """Remove keys of a wrong type. Any command on such a key fails, so all workers of the study would stop."""
        ours = {key: kind for kind, names in _OF_STUDY.items() for key in keys(self._study, *names)}
        expected = {**_OF_FLEET, **ours}
        with self._client.pipeline(transaction=False) as pipe:
            for key in expected:
                pipe.type(key)
            found = zip(expected.items(), pipe.execute(), strict=False)
        if wrong := [key for (key, kind), is_now in found if is_now not in (kind, "none")]:
            self.forged += self._client.delete(*wrong)

    def erase(self) -> None:
        """Remove the study's keys after it has ended and everything is recorded.

        The keys `attempts`, `done` and `breakers` are kept for ERASED_SECONDS, because messages of attempts that were
        taken back may still be in a queue, and their claims must be refused.
        """
        self._archive(len(self._recorded))
        kept = keys(self._study, "attempts", "breakers", "done")
        self._client.delete(*{*_keys(self._study)} - {*kept})
        for key in kept:
            self._client.expire(key, ERASED_SECONDS)

    def remove(self, numbers: int) -> str:
        """Remove the keys of a deleted study, and mark all of its trials, whose numbers are below `numbers`, as ended.

        Workers then stop its running trials and refuse its messages. Returns "". If a scheduler runs the study from
        another copy of the store, nothing is removed, and the host and process of that scheduler are returned.
        """
        [holder, done] = keys(self._study, "holder", "done")
        held = self._client.get(holder)
        if held is not None and is_held(held.partition(":")[0], math.inf, 0.0):
            return described(held)
        whole, rest = divmod(min(numbers, MAX_REMOVED), 8)
        with self._client.pipeline() as pipe:
            pipe.delete(*_keys(self._study))
            pipe.set(done, whole * b"\xff" + bytes([0xFF00 >> rest & 0xFF]), ex=ERASED_SECONDS)
            pipe.execute()
        return ""


def _keys(study: str) -> list[str]:
    """Return all keys of a study."""
    return keys(study, *chain.from_iterable(_OF_STUDY.values()))


def _fence(holder: str) -> int:
    """Return the fencing number in a lock's value."""
    return int(holder.rsplit(":", 2)[1])


class Breaker(str, Enum):
    """State of a worker's circuit breaker for one study."""

    #: the worker may claim trials
    CLOSED = "closed"
    #: the worker may not claim trials until the scheduler has examined its failures
    OPEN = "open"
    #: the worker may not claim trials any more
    QUARANTINED = "quarantined"


class Quarantine:
    """The circuit breakers of the workers for one study, as Redis stores them."""

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
        """Close a worker's circuit breaker. Failures of `kind`, if given, count as caused by the trials from now on.

        A quarantined worker stays quarantined.
        """
        if kind is not None:
            self._client.sadd(self._known, kind)
        if self.state(worker) is not Breaker.QUARANTINED:
            self._client.hdel(self._breakers, worker)

    def half_open(self, worker: str) -> None:
        """Half-open a circuit breaker: allow one trial per HALF_OPEN_MS. A success closes the breaker, a strike opens
        it.
        """
        if self.state(worker) is not Breaker.QUARANTINED:
            self._client.hset(self._breakers, worker, "half:0")

    def quarantine(self, worker: str) -> None:
        """Send no more trials of this study to a worker."""
        self._client.hset(self._breakers, worker, Breaker.QUARANTINED.value)

    def reset(self, code: Digest = "") -> None:
        """Close the breakers of all workers; those of quarantined workers only if the version `code` of the study has
        changed.
        """
        if self._client.hget(self._breakers, "") not in (None, code):
            self._client.delete(self._breakers, self._known)
        for worker in self._client.hkeys(self._breakers):
            self.close(worker)
        if code:
            # The version of the code is stored under "", which is no worker's name.
            self._client.hset(self._breakers, "", code)
            self._client.expire(self._breakers, ERASED_SECONDS)


class Shipping:
    """Stores a study's sources in Redis, and fetches them from there on workers that accept code.

    Shipped code is always signed, so a signing key is required.
    """

    def __init__(self, client: Redis, signer: Signer) -> None:
        """Raises UsageError if `signer` has no key."""
        if not signer.fingerprint:
            raise UsageError("code is shipped to workers on a signed fleet only; give --signing-key-file on both sides")
        self._client = client
        self._signer = signer

    def send(self, study: str, sources: Sources, inputs: Mapping[FullDigest, bytes] | None = None) -> None:
        """Store the sources and inputs for the workers. Repeat the call now and then, in case Redis has lost its data.

        `inputs` are the files of `Sources.inputs`. They need no signature, because the sources contain their digests.
        """
        [key, files] = keys(study, "sources", "inputs")
        for digest, content in (inputs or {}).items():
            if not self._client.hexists(files, digest):
                self._client.hset(files, digest, base64.b64encode(content).decode())
        self._client.expire(files, ERASED_SECONDS)
        self._client.set(key, self._signer.seal(key, sources), ex=ERASED_SECONDS)

    def fetch(self, study: str) -> Sources | None:
        """Return a study's sources, or None if Redis has no sources with our signature."""
        [key] = keys(study, "sources")
        return _SOURCES.read(key, self._client.get(key) or "", self._signer)

    def fetch_input(self, study: str, digest: FullDigest) -> bytes | None:
        """Return the file with a digest, or None if Redis does not have it."""
        [key] = keys(study, "inputs")
        # If the value is not base64, another client has written it.
        with suppress(ValueError):
            content = base64.b64decode(self._client.hget(key, digest) or "")
            return content if hashlib.sha256(content).hexdigest() == digest else None
        return None
