"""The live attempts of trials, and the rule by which one of them ends its trial.

The rule is written here for Python and in `transport/lua/finish_and_claim.lua` for Redis. One contract test checks
both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Attempts(Generic[T]):
    """Facts about each live attempt, by trial and attempt, in the order of sending."""

    def __init__(self) -> None:
        self._live: dict[int, dict[int, T]] = {}

    def __iter__(self) -> Iterator[T]:
        for attempts in self._live.values():
            yield from attempts.values()

    def __len__(self) -> int:
        """Number of trials that have a live attempt."""
        return len(self._live)

    @property
    def numbers(self) -> Collection[int]:
        """Numbers of those trials, in the order of sending."""
        return self._live.keys()

    def put(self, number: int, attempt: int, known: T) -> None:
        """Add an attempt, or replace the facts about it."""
        self._live.setdefault(number, {})[attempt] = known

    def of(self, number: int) -> Mapping[int, T]:
        """Return the trial's live attempts by their number."""
        return self._live.get(number, {})

    def find(self, number: int, attempt: int) -> T | None:
        """Return the attempt, or None if it is not live."""
        return self.of(number).get(attempt)

    def lose(self, number: int, attempt: int) -> bool:
        """Remove a lost attempt. Return True if its trial has no other live attempt."""
        live = self._live.get(number, {})
        live.pop(attempt, None)
        if not live:
            self._live.pop(number, None)
        return not live

    def finish(self, number: int, attempt: int, *, well: bool) -> bool:
        """Remove an attempt that has ended; return True if its trial ends with it.

        The first attempt that ends well ends its trial, and with it the others, also if it was thought to be lost. An
        attempt that ends badly leaves the trial to the other live attempts, and ends it if it is the only one. The bad
        end of an attempt that is not live changes nothing: it may be one that was finished before, and is heard again.
        """
        live = self._live.get(number, {})
        if well or live.keys() == {attempt}:
            self._live.pop(number, None)
            return True
        live.pop(attempt, None)
        return False
