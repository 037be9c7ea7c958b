"""Which drain a worker obeys: the latest that it has seen."""

from __future__ import annotations

import logging

from shadho_celery.transport.drains import Drain, Drains

log = logging.getLogger(__name__)


class Obeyed:
    """The record that the workers of one place, or one worker alone, obey.

    An older record in Redis is refused: somebody has put it back. A record that is missing changes nothing.
    """

    def __init__(self, drains: Drains, place: str) -> None:
        self._drains, self._place = drains, place
        #: the latest record; None before there is one
        self.latest: Drain | None = None
        self._has_warned = False

    @property
    def drain(self) -> Drain | None:
        """Who has drained the worker; None if it is not drained."""
        return self.latest if self.latest is not None and self.latest.is_drained else None

    def follow(self) -> None:
        """Read the record in Redis, and obey it if it is new. Raises redis-py's errors."""
        found = self._drains.latest(self._place)
        before = 0 if self.latest is None else self.latest.sequence
        if found is None or found.sequence == before:
            return
        if found.sequence > before:
            self.latest = found
        elif not self._has_warned:
            self._has_warned = True
            log.warning("an old drain or undrain of this worker was put back into Redis; it is refused")
