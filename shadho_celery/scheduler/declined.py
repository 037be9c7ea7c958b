"""Trials that a worker has declined because its time is limited: their class gets them again only after a pause."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: seconds from the first time that a class declines a trial until it is sent there again; doubled each further time
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 600.0


@dataclass
class Declined:
    """Pauses of declined trials, by class.

    Otherwise a trial that no worker of the class can end in time would return to the same worker again and again, and
    take the place of shorter trials.
    """

    #: by number of the trial and class: the time at which the pause ends, and its seconds
    _pauses: dict[int, dict[str, tuple[float, float]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return True if there are declined trials."""
        return bool(self._pauses)

    def add(self, number: int, compute_class: str, now: float) -> None:
        """Record that a worker of a class has declined a trial."""
        known = self._pauses.setdefault(number, {})
        _, last = known.get(compute_class, (0.0, FIRST_PAUSE / 2))
        pause = min(2 * last, LONGEST_PAUSE)
        known[compute_class] = now + pause, pause

    def end(self, number: int) -> None:
        """Forget a trial, because a worker has taken it or it has ended."""
        self._pauses.pop(number, None)

    def is_paused(self, number: int, compute_class: str, now: float) -> bool:
        """Return whether a trial should not be sent to a class now."""
        until, _ = self._pauses.get(number, {}).get(compute_class, (-math.inf, 0.0))
        return now < until

    def due(self, now: float) -> float:
        """Return the time at which the next pause ends."""
        ends = [until for by_class in self._pauses.values() for until, _ in by_class.values() if until > now]
        return min(ends, default=math.inf)
