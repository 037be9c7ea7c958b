"""The live attempts of trials, and the rule by which one of them ends its trial.

The rule stands here for Python, and in `transport/lua/step.lua` for Redis; one contract test drives both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

T = TypeVar("T")

_NONE: Mapping[int, object] = MappingProxyType({})


class Attempts(Generic[T]):
    """What is known of each live attempt, by trial and attempt, in the order in which they were sent."""

    def __init__(self) -> None:
        self._live: dict[int, dict[int, T]] = {}

    def __iter__(self) -> Iterator[T]:
        for attempts in self._live.values():
            yield from attempts.values()

    def __len__(self) -> int:
        """Trials that have a live attempt."""
        return len(self._live)

    @property
    def numbers(self) -> Collection[int]:
        """Numbers of those trials, in the order in which they were sent."""
        return self._live.keys()

    def put(self, number: int, attempt: int, known: T) -> None:
        """Enter an attempt, or what is known of it by now."""
        self._live.setdefault(number, {})[attempt] = known

    def of(self, number: int) -> Mapping[int, T]:
        """The trial's live attempts by their number."""
        return self._live.get(number, _NONE)  # type: ignore[arg-type]

    def find(self, number: int, attempt: int) -> T | None:
        """The attempt; None where it does not live."""
        return self.of(number).get(attempt)

    def lose(self, number: int, attempt: int) -> bool:
        """Take away an attempt that will not end; return whether its trial lives on in another one."""
        live = self._live.get(number, {})
        live.pop(attempt, None)
        if not live:
            self._live.pop(number, None)
        return bool(live)

    def settle(self, number: int, attempt: int, *, well: bool) -> bool:
        """Take away an attempt that has ended; return whether its trial ends with it.

        The first attempt that ends well ends its trial, and with it the others. One that does not leaves the trial to
        those that live. A result of an attempt that was given up ends its trial in any case: nobody else has told yet.
        """
        live = self._live.get(number, {})
        if well or attempt not in live or len(live) == 1:
            self._live.pop(number, None)
            return True
        del live[attempt]
        return False
