"""Bundle: the attempts of one message, which are claimed and finished together while they are short.

A round trip to Redis costs as much as a short trial. The first attempt of a message is therefore claimed alone. If that
trial was quick and succeeded, all others are claimed at once, and their results are sent at the end. Attempts that wait
behind a long trial are given back.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from shadho_celery.core.clock import Clock
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Result, Started
from shadho_celery.transport.channel import Claim, WorkerChannel

log = logging.getLogger(__name__)

#: seconds after which attempts that are claimed but not started are given back
PATIENCE_SECONDS = 0.5

REFUSED = "the result of trial %s, attempt %s was refused: its lease was lost, or its trial has ended"


class Bundle:
    """Attempts of one delivery of a message.

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
        #: random name of this delivery of the message, by which Redis recognises a repeated call
        self.delivery = uuid.uuid4().hex[:8]
        #: attempts that are not claimed yet
        self.unclaimed = deque(attempts)
        self._channel = channel
        self._clock = clock
        self._host = host
        self._slot = slot
        #: claimed attempts that are not started yet, and results that are not sent yet
        self._waiting: deque[Attempt] = deque()
        self._results: list[Result] = []
        self._claimed_at = clock.now()
        self._lock = threading.Lock()

    def exchange(self, count: int) -> list[Claim]:
        """Send the results and claim the next `count` attempts. Return the answers to the claims.

        Raises redis-py's errors. After an error, repeat the call.
        """
        with self._lock:
            asked = [*self.unclaimed][:count]
            who: dict[str, Any] = {"host": self._host, "worker": self._channel.worker, "slot": self._slot}
            who["at"] = self._clock.wall()
            answers = self._send([Started(number=each.number, attempt=each.attempt, **who) for each in asked])
            for attempt, answer in zip(asked, answers, strict=True):
                self.unclaimed.popleft()
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
        """Return the claimed attempts that are not started yet."""
        with self._lock:
            return list(self._waiting)

    def add(self, result: Result) -> None:
        """Add a result, which the next `exchange` sends."""
        with self._lock:
            self._results.append(result)

    def refuse(self, reason: str, attempt: Attempt | None = None) -> None:
        """Send the results. Give back `attempt` and all attempts after it, because they cannot finish on this worker.

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
        """If the running trial takes long, send the results and give back the attempts that wait behind it.

        `recall` takes the attempts that were sent ahead back from the slot's process. Raises redis-py's errors.
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
