"""Finds the drains and undrains that the workers of a fleet obey, so that the scheduler can record them.

They are asked of Redis, not of a scheduler, and work without one. A scheduler that runs then, or the next one, finds
them by the sequences that the workers announce: the latest one of each place.
"""

from __future__ import annotations

from collections.abc import Mapping

from shadho_celery.transport.drains import Drain, Drains
from shadho_celery.transport.registry import Worker, place_of


class DrainWatch:
    """The drains and undrains that one scheduler knows."""

    def __init__(self, drains: Drains) -> None:
        self._drains = drains
        #: sequence of the latest drain or undrain of each place
        self._known: dict[str, int] = {}

    def news(self, workers: Mapping[str, Worker]) -> dict[str, Drain]:
        """Return the drains and undrains, by place, that these workers obey since the last call.

        Records that Redis has lost are left out. Raises redis-py's errors.
        """
        found = {}
        for name, worker in workers.items():
            place, sequence = place_of(name), worker.drain_sequence
            if sequence > self._known.get(place, 0):
                drain = self._drains.latest(place)
                self._known[place] = sequence
                if drain is not None and drain.sequence == sequence:
                    found[place] = drain
        return found
