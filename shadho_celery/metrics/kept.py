"""Values that are computed in a thread, so that a scrape does not wait for a server that hangs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: maximum seconds for which a scrape waits for a new value
WAIT_SECONDS = 2.0


class Kept(Generic[T]):
    """Caches the result of `make`. The first `get` after `seconds` computes it again, in a separate thread.

    A result is used for at most `most_seconds`.
    """

    def __init__(self, make: Callable[[], T], seconds: float, most_seconds: float = math.inf) -> None:
        self._make, self._seconds, self._most_seconds = make, seconds, most_seconds
        self._made_at = -math.inf
        self._found: T | None = None
        self._lock = threading.Lock()
        self._making: threading.Thread | None = None

    def get(self) -> T | None:
        """Return the result. If a new one is not ready within WAIT_SECONDS, return the previous one, or None if there
        is none.
        """
        with self._lock:
            is_due = self._found is None or time.monotonic() - self._made_at >= self._seconds
            if is_due and (self._making is None or not self._making.is_alive()):
                self._making = threading.Thread(target=self._renew, daemon=True)
                self._making.start()
            making = self._making
        if making is not None:
            making.join(WAIT_SECONDS)
        return self._found if time.monotonic() - self._made_at <= self._most_seconds else None

    def _renew(self) -> None:
        self._found, self._made_at = self._make(), time.monotonic()
