"""Outages of a server: one line when it stops to answer, and one when it answers again, however often it is tried."""

from __future__ import annotations

import threading

#: seconds without an error after which an outage is over: longer than between two tries of the same call
OVER_SECONDS = 6.0


class Outage:
    """State of one server as its errors show it. For any thread."""

    def __init__(self, server: str, over_seconds: float = OVER_SECONDS) -> None:
        self._server, self._over_seconds = server, over_seconds
        #: number of outages so far
        self.count = 0
        #: times of the first error of the current outage, and of the last one
        self._since: float | None = None
        self._until = 0.0
        self._lock = threading.Lock()

    def see(self, trouble: str | None, now: float) -> str | None:
        """Note an error, or None for an answer. Return the line to show: `trouble` at the first error of an outage."""
        with self._lock:
            if trouble is not None:
                is_new, self._until = self._since is None, now
                self._since = now if self._since is None else self._since
                self.count += is_new
                return trouble if is_new else None
            if self._since is None or now - self._until < self._over_seconds:
                return None
            seconds, self._since = now - self._over_seconds - self._since, None
            return f"{self._server} answers again, after {seconds:.0f} s"
