"""The live attempts of trials, and the rule that decides whether the end of an attempt ends its trial.

The rule is `Attempts.finish`, and for Redis it is written in `fleet/lua/finish_and_claim.lua`. A contract test checks
both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shadho_celery.core.trial import Attempt, Report, Trial, TrialState

T = TypeVar("T")


@dataclass
class Sent:
    """A live attempt, with facts about it that only this scheduler knows."""

    #: RUNNING once a worker has claimed it
    attempt: Attempt
    #: time at which it was sent (`Clock.now`)
    at: float
    #: time at which this scheduler learned that a worker has claimed it; infinite until then. The time of the worker is
    #: not used, because its clock may differ
    began: float = math.inf
    #: its latest report, or None
    report: Report | None = None
    #: number of consecutive checks that found no trace of the claimed attempt in Redis
    unleased: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Number of the trial, and number of the attempt of this trial."""
        return self.attempt.number, self.attempt.attempt

    @property
    def is_claimed(self) -> bool:
        """True once a worker has claimed it and runs it."""
        return self.attempt.state is TrialState.RUNNING

    def slot_seconds(self, now: float) -> float:
        """Return the slot seconds that it has used: the seconds since it was claimed, times its number of slots."""
        return max(0.0, now - self.began) * self.attempt.slots


@dataclass(frozen=True, kw_only=True)
class Transition:
    """What an event has changed in the state of a study."""

    #: the trial after the event; None if the event does not change it
    trial: Trial | None = None
    #: the attempts that are no longer live because of the event; None if the event is not the end of an attempt
    ended: Sequence[Sent] | None = None
    #: True if, because of the event, the trial has no live attempt any more
    is_over: bool = False


class Attempts(Generic[T]):
    """Facts about the live attempts, by number of the trial and of the attempt, in the order of sending."""

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
        """Numbers of the trials that have a live attempt, in the order of sending."""
        return self._live.keys()

    def put(self, number: int, attempt: int, known: T) -> None:
        """Add an attempt, or replace the facts about it."""
        self._live.setdefault(number, {})[attempt] = known

    def of(self, number: int) -> Mapping[int, T]:
        """Return the facts about the trial's live attempts, by the number of the attempt."""
        return self._live.get(number, {})

    def find(self, number: int, attempt: int) -> T | None:
        """Return the facts about an attempt, or None if it is not live."""
        return self._live.get(number, {}).get(attempt)

    def lose(self, number: int, attempt: int) -> bool:
        """Remove a lost attempt. Return True if its trial has no other live attempt."""
        live = self._live.get(number, {})
        live.pop(attempt, None)
        if not live:
            self._live.pop(number, None)
        return not live

    def finish(self, number: int, attempt: int, *, well: bool) -> bool:
        """Remove an attempt that has ended. Return True if its trial ends with it.

        The first attempt that ends `well` (COMPLETE or PRUNED) ends its trial and all other attempts of the trial, even
        if this attempt had been given up as lost. An attempt that fails ends its trial only if it is the last live
        attempt. The failure of an attempt that is not live changes nothing, because it may have been handled before.
        """
        live = self._live.get(number, {})
        if well or live.keys() == {attempt}:
            self._live.pop(number, None)
            return True
        live.pop(attempt, None)
        return False
