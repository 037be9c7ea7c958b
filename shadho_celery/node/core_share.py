"""Share of its host's cores that a worker gives to its trials, beside other workers on the host."""

from __future__ import annotations

import logging
from collections.abc import Collection

from shadho_celery.core.hardware import Machine
from shadho_celery.transport.registry import Worker

log = logging.getLogger(__name__)


class CoreShare:
    """Number of threads of a trial in one of a worker's slots."""

    def __init__(self, machine: Machine, slots: int) -> None:
        self._machine = machine
        self._slots = slots
        #: slots on the host that share its cores, and threads per trial; and the line that was last logged
        self._sharing = slots
        self.threads = machine.threads(slots)
        self._said = self._sharing, self.threads
        self._neighbours: list[tuple[Machine, int]] = []

    def follow(self, neighbours: Collection[Worker]) -> bool:
        """Divide the cores again if other workers of the host started or ended. Return whether the threads have
        changed.
        """
        before, known = self.threads, self._neighbours
        self._neighbours = [(each.machine, each.slots) for each in neighbours]
        if self._neighbours != known:
            self._sharing = self._slots + sum(slots for machine, slots in self._neighbours if not machine.is_limited)
            self.threads = self._machine.threads(self._slots, self._neighbours)
        return self.threads != before

    def tell(self) -> None:
        """Log how the cores are divided, unless that was already logged."""
        if self._said != (self._sharing, self.threads) and not self._machine.is_limited:
            self._said = self._sharing, self.threads
            log.info("%s on this host: %s a trial", _counted(self._sharing, "slot"), _counted(self.threads, "thread"))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
