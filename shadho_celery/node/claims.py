"""Claims: a worker claims attempts in Redis before it runs them, and declines attempts that it must not run.

A round trip to Redis costs as much as a short trial. Therefore the first attempt of a message is claimed alone. If it
succeeds quickly, all other attempts of the message are claimed at once, and their results are sent together at the end
(`Bundle`). Attempts that wait behind a long trial are given back.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import redis

from shadho_celery.core.payload import Payload
from shadho_celery.core.system import Clock, Outage
from shadho_celery.core.trial import Attempt, Result, Started
from shadho_celery.fleet.channel import Claim, WorkerChannel
from shadho_celery.fleet.redis import flush, is_outage
from shadho_celery.node.logs import tell

log = logging.getLogger(__name__)

T = TypeVar("T")

#: seconds after which attempts that are claimed but not started are given back
PATIENCE_SECONDS = 0.5

REFUSED = "the result of trial %s, attempt %s was refused: its lease was lost, or its trial has ended"


class Bundle:
    """The attempts of one delivery of a message, with those claimed and the results not sent yet.

    `relieve` may be called from any thread, the other methods only from the slot's thread.
    """

    def __init__(
        self,
        channel: WorkerChannel,
        payload: Payload,
        attempts: Sequence[Attempt],
        clock: Clock,
        host: str,
        *,
        slot: int | None = None,
    ) -> None:
        """`host` is the name of this machine, and `slot` the number of the slot that runs the attempts."""
        self.payload = payload
        #: random name of this delivery of the message, so that Redis recognises a repeated call
        self.delivery = uuid.uuid4().hex[:8]
        #: attempts that are not claimed yet
        self.unclaimed = deque(attempts)
        self._channel = channel
        self._clock = clock
        self._host = host
        self._slot = slot
        #: claimed attempts that have not started yet, and results that have not been sent yet
        self._waiting: deque[Attempt] = deque()
        self._results: list[Result] = []
        self._claimed_at = clock.now()
        self._lock = threading.Lock()

    def exchange(self, count: int) -> list[Claim]:
        """Send the collected results and claim the next `count` attempts. Return the answers to the claims.

        Attempts that the open circuit breaker of this worker refuses stay unclaimed. Raises redis-py's errors. After an
        error, repeat the call.
        """
        with self._lock:
            asked = [*self.unclaimed][:count]
            who: dict[str, Any] = {"host": self._host, "worker": self._channel.worker, "slot": self._slot}
            who["at"] = self._clock.wall()
            answers = self._send([Started(number=each.number, attempt=each.attempt, **who) for each in asked])
            for attempt, answer in zip(asked, answers, strict=True):
                if answer is Claim.BREAKER_OPEN:
                    continue
                self.unclaimed.remove(attempt)
                if answer is Claim.TAKEN:
                    self._waiting.append(attempt)
                else:
                    log.info("trial %s, attempt %s does not run: refused at its claim", attempt.number, attempt.attempt)
            self._claimed_at = self._clock.now()
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
                self._channel.give_back(study, claimed, reason)
            self._waiting.clear()
            while self.unclaimed:
                self._channel.decline(study, self.unclaimed[0].number, self.unclaimed[0].attempt, reason)
                self.unclaimed.popleft()

    def relieve(self, recall: Callable[[], None]) -> None:
        """If the running trial takes long, send the collected results and give back the attempts that wait behind it.

        `recall` takes back the attempts that were already sent to the slot's process. Raises redis-py's errors.
        """
        if self._clock.now() - self._claimed_at < PATIENCE_SECONDS or not self._lock.acquire(blocking=False):
            # If the lock is taken, the slot's thread is sending results or attempts right now.
            return
        try:
            self._send([])
            if self._waiting:
                recall()
                waiting = [(attempt.number, attempt.attempt) for attempt in self._waiting]
                reason = "it waited behind a long trial of the same message"
                self._channel.give_back(self.payload.study, waiting, reason)
                self._waiting.clear()
        finally:
            self._lock.release()

    def _send(self, claims: Sequence[Started]) -> list[Claim]:
        if not (self._results or claims):
            return []
        study, watched = self.payload.study, self.payload.watched
        taken, answers = self._channel.exchange(study, self._results, claims, self.delivery, watched=watched)
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
            # The scheduler sends a declined attempt again at once, and if no other worker is free, to this worker.
            # Therefore decline it only in the next beat, about once a second.
            self._declined.append(decline)
        else:
            self.persist(decline)

    def flush(self) -> None:
        """Make the pending calls that decline attempts. Raises redis-py's errors."""
        with self._declining:
            flush(self._declined)
