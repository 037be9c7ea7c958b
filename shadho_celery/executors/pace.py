"""How fast the classes work, and so how much should wait in their queues and how often to look after them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shadho_celery.clock import Clock
from shadho_celery.executors.sharing import BUNDLE_SECONDS, MESSAGE_SECONDS
from shadho_celery.hardware import ComputeClass

#: seconds of a class's work that should wait in its queue: about what the scheduler takes to notice and refill
AHEAD_SECONDS = 0.2
MAX_AHEAD = 256

#: seconds between two turns while the queues hold work ahead: each turn then does more at once
PACE_SECONDS = 0.04


class Pace:
    """The pace of one study's classes, and of its scheduler's turns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: mean seconds of a class's trials
        self._seconds: dict[str, float] = {}
        self._turned_at = -math.inf

    def tell(self, compute_class: str, seconds: float) -> None:
        """Learn how long a class's trials take: a mean that forgets, and never believes the first short one."""
        before = self.seconds(compute_class, 10 * BUNDLE_SECONDS)
        self._seconds[compute_class] = before + 0.2 * (max(seconds, MESSAGE_SECONDS) - before)

    def seconds(self, compute_class: str, unknown: float = math.inf) -> float:
        """How long a class's trials take, `unknown` before the first has ended."""
        return self._seconds.get(compute_class, unknown)

    def ahead(self, compute_class: ComputeClass) -> int:
        """Trials to keep waiting: what the class does while the scheduler takes its turn."""
        return min(MAX_AHEAD, round(compute_class.share * AHEAD_SECONDS / self.seconds(compute_class.name)))

    def turn(self, classes: Iterable[ComputeClass]) -> None:
        """A turn begins: where the queues hold work ahead, let some events gather first."""
        if any(self.ahead(compute_class) for compute_class in classes):
            self._clock.sleep(max(0.0, self._turned_at + PACE_SECONDS - self._clock.now()))
        self._turned_at = self._clock.now()
