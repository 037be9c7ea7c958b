"""How slots go round between studies, and short trials between messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shadho_celery.trial import Trial

#: seconds that a message costs a worker
MESSAGE_SECONDS = 0.001

#: seconds of work that one message may carry, where trials are that short; and the most trials in it
BUNDLE_SECONDS = 0.02
MAX_BUNDLE = 16


def bundles(trials: Sequence[Trial], seconds: float, slots: int) -> list[Sequence[Trial]]:
    """`trials` of one class in the messages that carry them, where one takes about `seconds` and there are `slots`.

    A message costs about a millisecond of a worker's time: trials that take little longer travel together, as long as
    every slot gets its part.
    """
    size = min(MAX_BUNDLE, int(BUNDLE_SECONDS / seconds), math.ceil(len(trials) / slots))
    return [trials[i : i + size] for i in range(0, len(trials), size)] if size > 1 else [[t] for t in trials]


def allow(slots: int, weight: float, others: Sequence[tuple[float, float]]) -> float:
    """Slots that a study of `weight` may fill beside `others`, pairs of weight and slots wanted.

    Slots go by weight; what one does not want goes to those that do (water filling).
    """
    free, total = float(slots), weight + sum(other for other, _ in others)
    # Those that want least for their weight are served first, in full, as long as their part covers it.
    for other, want in sorted(others, key=lambda pair: pair[1] / pair[0]):
        part = min(want, free * other / total)
        free -= part
        total -= other
    return free
