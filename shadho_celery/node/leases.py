"""Claims and leases: a worker claims attempts in Redis before it runs them, and renews their leases while they run.

A round trip to Redis costs as much as a short trial. Therefore the first attempt of a message is claimed alone. If it
succeeds quickly, all other attempts of the message are claimed at once, and their results are sent together at the end
(`Bundle`). Attempts that wait behind a long trial are given back. An attempt that loses its lease is stopped.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, TypeVar

import redis

from shadho_celery.core.payload import Payload
from shadho_celery.core.system import Clock, NoThread, Outage, start_thread
from shadho_celery.core.trial import Attempt, Result, Started
from shadho_celery.fleet.channel import Claim, WorkerChannel
from shadho_celery.fleet.redis import flush, is_outage
from shadho_celery.fleet.registry import MAX_TOLD, RunningTrial, Share
from shadho_celery.fleet.seats import Seat, WorkerSeats
from shadho_celery.node.logs import tell
from shadho_celery.runner.runner import INTERRUPT_SECONDS, STOP_SECONDS, Runner

log = logging.getLogger(__name__)

T = TypeVar("T")

#: seconds after which attempts that are claimed but not started are given back
PATIENCE_SECONDS = 0.5

REFUSED = "the result of trial %s, attempt %s was refused: its lease was lost, or its trial has ended"


@dataclass(eq=False)
class Bundle:
    """The attempts of one delivery of a message: which are claimed, and the results that are not sent yet.

    `relieve` may be called from any thread, the other methods only from the slot's thread.
    """

    channel: WorkerChannel
    payload: Payload
    attempts: InitVar[Sequence[Attempt]]
    clock: Clock
    #: name of this machine
    host: str
    #: number of the slot that runs the attempts
    slot: int | None = None

    def __post_init__(self, attempts: Sequence[Attempt]) -> None:
        #: random name of this delivery of the message, so that Redis recognises a repeated call
        self.delivery = uuid.uuid4().hex[:8]
        #: attempts that are not claimed yet
        self.unclaimed = deque(attempts)
        #: claimed attempts that have not started yet, and results that have not been sent yet
        self._waiting: deque[Attempt] = deque()
        self._results: list[Result] = []
        self._claimed_at = self.clock.now()
        self._lock = threading.Lock()

    def exchange(self, count: int) -> list[Claim]:
        """Send the collected results and claim the next `count` attempts. Return the answers to the claims.

        Attempts that the open circuit breaker of this worker refuses stay unclaimed. Raises redis-py's errors. After an
        error, repeat the call.
        """
        with self._lock:
            asked = [*self.unclaimed][:count]
            who: dict[str, Any] = {"host": self.host, "worker": self.channel.worker, "slot": self.slot}
            who["at"] = self.clock.wall()
            answers = self._send([Started(number=each.number, attempt=each.attempt, **who) for each in asked])
            for attempt, answer in zip(asked, answers, strict=True):
                if answer is Claim.BREAKER_OPEN:
                    continue
                self.unclaimed.remove(attempt)
                if answer is Claim.TAKEN:
                    self._waiting.append(attempt)
                else:
                    log.info("trial %s, attempt %s does not run: refused at its claim", attempt.number, attempt.attempt)
            self._claimed_at = self.clock.now()
        return answers

    def next(self) -> Attempt | None:
        """Return the next claimed attempt to run, or None if no claimed attempt waits."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def waiting(self) -> list[Attempt]:
        """Return the claimed attempts that have not started yet."""
        with self._lock:
            return list(self._waiting)

    def add(self, result: Result) -> None:
        """Add a result, which the next `exchange` sends."""
        with self._lock:
            self._results.append(result)

    def refuse(self, reason: str, attempt: Attempt | None = None) -> None:
        """Send the collected results. Give back `attempt` and all attempts after it, which cannot finish on this
        worker.

        Raises redis-py's errors. After an error, repeat the call.
        """
        study = self.payload.study
        with self._lock:
            self._send([])
            claimed = [(each.number, each.attempt) for each in (attempt, *self._waiting) if each is not None]
            if claimed:
                self.channel.give_back(study, claimed, reason)
            self._waiting.clear()
            while self.unclaimed:
                self.channel.decline(study, self.unclaimed[0].number, self.unclaimed[0].attempt, reason)
                self.unclaimed.popleft()

    def relieve(self, recall: Callable[[], None]) -> None:
        """If the running trial takes long, send the collected results and give back the attempts that wait behind it.

        `recall` takes back the attempts that were already sent to the slot's process. Raises redis-py's errors.
        """
        if self.clock.now() - self._claimed_at < PATIENCE_SECONDS or not self._lock.acquire(blocking=False):
            # If the lock is taken, the slot's thread is sending results or attempts right now.
            return
        try:
            self._send([])
            if self._waiting:
                recall()
                waiting = [(attempt.number, attempt.attempt) for attempt in self._waiting]
                reason = "it waited behind a long trial of the same message"
                self.channel.give_back(self.payload.study, waiting, reason)
                self._waiting.clear()
        finally:
            self._lock.release()

    def _send(self, claims: Sequence[Started]) -> list[Claim]:
        if not (self._results or claims):
            return []
        study, watched = self.payload.study, self.payload.watched
        taken, answers = self.channel.exchange(study, self._results, claims, self.delivery, watched=watched)
        for result, is_taken in zip(self._results, taken, strict=True):
            if not is_taken:
                log.warning(REFUSED, result.number, result.attempt)
        self._results.clear()
        return answers


class Claims:
    """This worker's calls to Redis about attempts, which are repeated during an outage. Any thread may call the
    methods.
    """

    def __init__(self, channel: WorkerChannel, outage: Outage, clock: Clock, closing: threading.Event) -> None:
        """After `closing` is set, no call is repeated."""
        self.channel = channel
        self._outage, self._clock, self._closing = outage, clock, closing
        #: pending calls that decline attempts; `flush` makes them
        self._declined: list[Callable[[], object]] = []
        self._declining = threading.Lock()

    def persist(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, repeated until Redis answers, so that a restart of Redis loses nothing."""
        wait = 0.1
        while True:
            try:
                return call()
            except redis.RedisError as error:
                if not is_outage(error) or self._closing.wait(wait):
                    raise
                self.note(error)
                wait = min(5.0, wait * 2)

    def note(self, error: redis.RedisError | None) -> None:
        """Log that Redis does not answer (`error`) or answers again (None), once for each outage."""
        text = None if error is None else f"Redis does not answer ({error}); trying again, and leases may run out"
        if (line := self._outage.see(text, self._clock.now())) is not None:
            log.warning("%s", line) if error is not None else tell(line)

    def is_void(self, payload: Payload) -> bool:
        """Return whether no worker needs a message any more, because claims of all its attempts would be refused."""
        attempts = [(attempt.number, attempt.attempt) for attempt in payload.attempts]
        with suppress(redis.RedisError):
            refused = self.channel.are_refused(payload.study, attempts, replicas=payload.replica is not None)
            return len(refused) == len(attempts)
        return False

    def decline(self, study: str, attempt: Attempt, reason: str, *, is_too_long: bool) -> None:
        """Decline an attempt, so that its scheduler gets it back.

        Its message does not return to the queue: it would be the first one there again, and block all messages behind
        it.
        """
        number, which = attempt.number, attempt.attempt
        log.info("trial %s, attempt %s does not run here: %s", number, which, reason)
        decline = partial(self.channel.decline, study, number, which, reason, is_too_long=is_too_long)
        if attempt.failed_on or attempt.expected is not None:
            # The scheduler sends a declined attempt again at once, and if no other worker is free, to this worker. To
            # avoid a loop without a pause, decline the attempt only in the next beat, about once a second.
            self._declined.append(decline)
        else:
            self.persist(decline)

    def flush(self) -> None:
        """Make the pending calls that decline attempts. Raises redis-py's errors."""
        with self._declining:
            flush(self._declined)


#: value of `stopped` for an attempt that is given back because its worker ends
GIVEN_BACK = "given back"


@dataclass(kw_only=True, eq=False)
class Lease:
    """The right to run an attempt, or a replica of its gang, in a slot of this worker."""

    study: str
    number: int
    attempt: int
    delivery: str
    runner: Runner
    #: the study's name
    name: str = ""
    #: number of the trial whose folder the attempt uses
    folder: int | None = None
    #: start of the run, in seconds since the epoch
    started_at: float = 0.0
    #: number of slots of this worker that the attempt takes
    slots: int = 1
    #: predicted seconds of the attempt; None if they are not known
    expected: float | None = None
    #: the replica's seat in the attempt's gang; None for the attempt itself
    seat: Seat | None = None
    #: reason why the attempt was stopped: ``cancel``, ``prune``, ``gone``, ``yield`` or GIVEN_BACK; "" if it was not
    stopped: str = ""
    #: number of times the attempt has called for replicas
    calls: int = 0
    #: True once the attempt has sent a report, after which it may be pruned at any time
    has_reported: bool = False


class Leases:
    """The leases of one worker. Any thread may call the methods."""

    def __init__(self, channel: WorkerChannel, seats: WorkerSeats) -> None:
        self._channel = channel
        self._seats = seats
        self._live: list[Lease] = []
        self._lock = threading.Lock()
        self._is_closed = False
        #: set once the worker is preempted
        self.preempted = threading.Event()

    def __len__(self) -> int:
        with self._lock:
            return len(self._live)

    def studies(self) -> dict[str, Share]:
        """Return for each study, by its key, its running trials and the number of their slots."""
        by_study: dict[str, list[Lease]] = defaultdict(list)
        with self._lock:
            for lease in self._live:
                by_study[lease.study].append(lease)
        return {
            study: Share(
                name=held[0].name,
                slots=sum(each.slots for each in held),
                trials=[
                    RunningTrial(
                        number=each.number,
                        started_at=each.started_at,
                        rank=None if each.seat is None else each.seat.rank,
                        slots=each.slots,
                        expected=each.expected,
                    )
                    for each in held[:MAX_TOLD]
                ],
            )
            for study, held in by_study.items()
        }

    def in_use(self, study: str) -> set[int]:
        """Return the numbers of the trials of a study whose folders are in use."""
        with self._lock:
            return {lease.folder for lease in self._live if lease.study == study and lease.folder is not None}

    @contextmanager
    def holding(self, lease: Lease) -> Iterator[None]:
        """Hold a lease for the duration of a `with` block, in which `renew` renews the lease."""
        with self._lock:
            self._live.append(lease)
            lease.stopped = GIVEN_BACK if self._is_closed else ""
        try:
            yield
        finally:
            with self._lock:
                self._live.remove(lease)

    def close(self) -> None:
        """Mark all attempts that are not stopped yet, and those that start later, as given back."""
        with self._lock:
            self._is_closed = True
            for lease in self._live:
                lease.stopped = lease.stopped or GIVEN_BACK

    def preempt(self) -> None:
        """Tell the running trials that the worker ends soon. Repeat the call, because further trials may just be
        starting.
        """
        with self._lock:
            self.preempted.set()
            live = list(self._live)
        for lease in live:
            self._while_live(lease, lease.runner.preempt)

    def renew(self) -> int:
        """Renew all leases and seats, and return their number. Stop the attempts and replicas whose answer is not
        ``ok``.

        Raises redis-py's errors.
        """
        with self._lock:
            live = list(self._live)
        for study in {lease.study for lease in live}:
            attempts = [lease for lease in live if lease.study == study and lease.seat is None]
            answers = self._channel.renew(study, [(a.number, a.attempt) for a in attempts]) if attempts else []
            replicas = [lease for lease in live if lease.study == study and lease.seat is not None]
            seats = [(replica.seat, replica.delivery) for replica in replicas if replica.seat is not None]
            answers += self._seats.renew(study, seats) if seats else []
            for lease, answer in zip(attempts + replicas, answers, strict=True):
                if answer != "ok" and not lease.stopped:
                    self.stop(lease, answer)
        return len(live)

    def look(self) -> None:
        """Stop the attempts that were pruned since their last report. Raises redis-py's errors."""
        with self._lock:
            reporting = [each for each in self._live if each.has_reported and not each.stopped]
        for study in {lease.study for lease in reporting}:
            ours = [lease for lease in reporting if lease.study == study]
            for lease, answer in zip(ours, self._channel.told(study, [a.number for a in ours]), strict=True):
                if answer != "ok":
                    self.stop(lease, answer)

    def stop(self, lease: Lease, why: str) -> None:
        """Ask the trial to stop. If it does not, interrupt it, and then kill its process."""

        def ask() -> None:
            lease.stopped = why
            lease.runner.stop_trial()

        # If the trial has ended since the request to Redis, there is nothing to stop.
        if self._while_live(lease, ask):
            for seconds, act in (
                (INTERRUPT_SECONDS, partial(lease.runner.stop_trial, "interrupt")),
                (STOP_SECONDS, lease.runner.kill),
            ):
                timer = threading.Timer(seconds, self._while_live, (lease, act))
                timer.daemon = True
                try:
                    start_thread(timer)
                except NoThread:
                    # Act now: the trial gets no time to stop by itself, but its slot must become free.
                    self._while_live(lease, act)

    def _while_live(self, lease: Lease, act: Callable[[], None]) -> bool:
        # `act` is called under the lock: once the lease has ended, the slot's process may run another trial.
        with self._lock:
            if lease not in self._live:
                return False
            act()
            return True
