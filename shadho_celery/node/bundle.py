"""Bundle: the attempts of one message, which are claimed and finished together while they are short.

A round trip to Redis costs as much as a short trial. The first attempt of a message is therefore claimed alone. If that
trial was quick and succeeded, all others are claimed at once, and their results are sent at the end. Attempts that wait
behind a long trial are given back.

Attempts take all the slots that they need or none, in the order in which their messages arrived. They may share GPUs as
far as their memory fits. An attempt whose memory is not known has its GPU alone.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from shadho_celery.core.payload import Payload
from shadho_celery.core.system import Clock
from shadho_celery.core.trial import Attempt, Result, Started
from shadho_celery.fleet.channel import Claim, WorkerChannel

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


#: seconds between two checks whether an attempt still waits for slots
CHECK_SECONDS = 1.0

#: bytes of GPU memory that a process takes beside those that are measured: the context of CUDA, and its libraries
CONTEXT_BYTES = 2**30
#: number of the latest attempts whose median memory is expected of the next ones
RECENT = 8


class Gpu:
    """A GPU that attempts share as far as their memory fits."""

    def __init__(self, memory: int, slots: int) -> None:
        """`memory` are its bytes, and `slots` the greatest number of attempts at a time."""
        self.memory = memory
        self._slots = slots
        #: bytes of the attempt in each taken slot; None if it has the GPU alone
        self.taken: dict[int, int | None] = {}
        #: slots whose process may have a context of CUDA
        self.begun: set[int] = set()
        #: taken slots whose attempt has not been alone
        self.shared: set[int] = set()

    def left(self, slot: int) -> int:
        """Return the bytes that another attempt may take in a free slot; negative if there are none."""
        if None in self.taken.values():
            return -1
        used = sum(each or 0 for each in self.taken.values())
        return self.memory - used - CONTEXT_BYTES * len(self.begun | {slot})

    def open(self, typical: int) -> int:
        """Return the number of attempts that may run at a time: those that do, and more of `typical` bytes each."""
        if None in self.taken.values():
            return len(self.taken)
        left = self.memory - sum([(each or 0) + CONTEXT_BYTES for each in self.taken.values()])
        more = max(left // (typical + CONTEXT_BYTES), 0 if self.taken else 1)
        return min(self._slots, len(self.taken) + more)

    def take(self, slot: int, need: int | None) -> None:
        """Note that an attempt has a slot."""
        self.taken[slot] = need
        self.begun.add(slot)
        self.shared.discard(slot)
        if len(self.taken) > 1:
            self.shared |= self.taken.keys()

    def put(self, slot: int) -> None:
        """Note that a slot is free."""
        self.taken.pop(slot, None)


class FreeSlots:
    """The slots of a worker that run nothing. Its methods may be called from any thread."""

    def __init__(self, count: int, cards: int = 0, memories: Sequence[int] = ()) -> None:
        """Slots have the numbers from 0 to `count` - 1. Slot i has GPU i modulo `cards`, if there are any.

        With `memories`, the bytes of each GPU, attempts share GPUs as far as their memory fits.
        """
        self.count = count
        self.cards = cards
        self.gpus = [Gpu(memory, len(range(card, count, cards))) for card, memory in enumerate(memories)]
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._free = set(range(count))
        #: tickets of the attempts that wait, with the number of slots that each needs
        self._waiting: deque[tuple[object, int]] = deque()
        self._changed = threading.Condition()

    @property
    def is_any(self) -> bool:
        """True if a slot is free and no attempt waits for it."""
        with self._changed:
            return self._open() > self.count - len(self._free) and not self._waiting

    @property
    def open(self) -> int:
        """Number of slots that attempts may have at a time: all, unless the memory of shared GPUs limits it."""
        with self._changed:
            return self._open()

    @property
    def kept(self) -> int:
        """Number of free slots that are kept for an attempt that waits for more."""
        with self._changed:
            return min(len(self._free), sum(number for _, number in self._waiting))

    def take(self, number: int, is_wanted: Callable[[], bool] = lambda: True, *, need: int | None = None) -> list[int]:
        """Wait until `number` slots are free, and take them. While an attempt waits, later ones wait behind it.

        `need` are the bytes of GPU memory that the attempt takes; None if it needs its GPUs alone. `is_wanted` is
        called every CHECK_SECONDS meanwhile. Once it returns False, the result is an empty list.
        """
        ticket = object()
        with self._changed:
            self._waiting.append((ticket, number))
        try:
            while True:
                with self._changed:
                    chosen = self._changed.wait_for(lambda: self._chosen(ticket, number, need), CHECK_SECONDS)
                    if chosen:
                        self._note(chosen, need)
                        return chosen
                if not is_wanted():
                    return []
        finally:
            with self._changed:
                self._waiting.remove((ticket, number))
                self._changed.notify_all()

    def put(self, slots: Sequence[int]) -> None:
        """Give slots back."""
        with self._changed:
            self._free.update(slots)
            for slot in slots if self.gpus else ():
                self.gpus[slot % self.cards].put(slot)
            self._changed.notify_all()

    def beside(self, taken: Sequence[int]) -> list[int]:
        """Return the other slots of the GPUs that an attempt has alone. Their processes must not keep GPU memory."""
        with self._changed:
            alone = [gpu for gpu in self.gpus if None in [gpu.taken.get(slot, 0) for slot in taken]]
            others = [slot for gpu in alone for slot in gpu.begun.difference(taken)]
            for gpu in alone:
                gpu.begun.intersection_update(taken)
        return others

    def was_shared(self, slot: int) -> bool:
        """Return whether the attempt in a slot has shared its GPU."""
        return bool(self.gpus) and slot in self.gpus[slot % self.cards].shared

    def _open(self) -> int:
        if not self.gpus:
            return self.count
        if self._waiting:
            wanted = sum(number for _, number in self._waiting)
            return min(self.count, self.count - len(self._free) + wanted)
        typical = sorted(self._recent)[len(self._recent) // 2] if self._recent else max(gpu.memory for gpu in self.gpus)
        return sum(gpu.open(typical) for gpu in self.gpus)

    def _note(self, chosen: Sequence[int], need: int | None) -> None:
        self._free.difference_update(chosen)
        for slot in chosen if self.gpus else ():
            gpu = self.gpus[slot % self.cards]
            self._recent.append(gpu.memory if need is None else need)
            is_alone = len(chosen) > 1 or need is None or gpu.left(slot) < need
            gpu.take(slot, None if is_alone else need)

    def _chosen(self, ticket: object, number: int, need: int | None) -> list[int]:
        """Return free slots for the attempt with a ticket, or [] while there are too few, or too little GPU memory."""
        if self._waiting[0][0] is not ticket or len(self._free) < number:
            return []
        if not self.gpus:
            return self._spread(self._free, number)
        if number == 1 and need is not None:
            # The lowest free slot of each GPU, to use its process again. On the emptiest GPU an attempt is fastest.
            first = {slot % self.cards: slot for slot in sorted(self._free, reverse=True)}
            left, card = max((self.gpus[card].left(slot), -card) for card, slot in first.items())
            if left >= need:
                return [first[-card]]
        idle = [card for card, gpu in enumerate(self.gpus) if not gpu.taken][:number]
        if len(idle) < min(number, self.cards):
            return []
        return self._spread({slot for slot in self._free if slot % self.cards in idle}, number)

    def _spread(self, free: Collection[int], number: int) -> list[int]:
        """Return some of the free slots: those with the lowest numbers, on different GPUs if that is possible."""
        chosen: list[int] = []
        left = sorted(free)
        for _ in range(number):
            used = {slot % self.cards for slot in chosen} if self.cards else set()
            best = next((slot for slot in left if self.cards and slot % self.cards not in used), left[0])
            left.remove(best)
            chosen.append(best)
        return sorted(chosen)
