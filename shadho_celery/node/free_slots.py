"""Free slots of a worker: attempts take all that they need or none, in the order in which their messages arrived."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

#: seconds between two checks whether an attempt still waits for slots
CHECK_SECONDS = 1.0


class FreeSlots:
    """The slots of a worker that run nothing. Its methods may be called from any thread."""

    def __init__(self, count: int, cards: int = 0) -> None:
        """Slots have the numbers from 0 to `count` - 1. Slot i has GPU i modulo `cards`, if there are any."""
        self.count = count
        self.cards = cards
        self._free = set(range(count))
        #: tickets of the attempts that wait, with the number of slots that each needs
        self._waiting: deque[tuple[object, int]] = deque()
        self._changed = threading.Condition()

    @property
    def is_any(self) -> bool:
        """True if a slot is free and no attempt waits for it."""
        with self._changed:
            return bool(self._free) and not self._waiting

    @property
    def kept(self) -> int:
        """Number of free slots that are kept for an attempt that waits for more."""
        with self._changed:
            return min(len(self._free), sum(number for _, number in self._waiting))

    def take(self, number: int, is_wanted: Callable[[], bool] = lambda: True) -> list[int]:
        """Wait until `number` slots are free, and take them. While an attempt waits, later ones wait behind it.

        `is_wanted` is called every CHECK_SECONDS meanwhile. Once it returns False, the result is an empty list.
        """
        ticket = object()
        with self._changed:
            self._waiting.append((ticket, number))
        try:
            while True:
                with self._changed:
                    is_next = self._changed.wait_for(lambda: self._may_take(ticket, number), CHECK_SECONDS)
                    if is_next:
                        return self._chosen(number)
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
            self._changed.notify_all()

    def _may_take(self, ticket: object, number: int) -> bool:
        return self._waiting[0][0] is ticket and len(self._free) >= number

    def _chosen(self, number: int) -> list[int]:
        """Remove some of the free slots: those with the lowest numbers, on different GPUs if that is possible."""
        chosen: list[int] = []
        left = sorted(self._free)
        for _ in range(number):
            used = {slot % self.cards for slot in chosen} if self.cards else set()
            best = next((slot for slot in left if self.cards and slot % self.cards not in used), left[0])
            left.remove(best)
            chosen.append(best)
        self._free.difference_update(chosen)
        return sorted(chosen)
