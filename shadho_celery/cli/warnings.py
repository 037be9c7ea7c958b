"""Warnings for the person at the terminal while a study runs."""

from __future__ import annotations

import time
from collections import Counter

from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.transport.registry import able, start_command, unable
from shadho_celery.transport.signing import Signer

#: seconds after which a class that is expected but has no live worker is warned of
MISSING_SECONDS = 10.0


class Warnings:
    """Warns once each of servers that are away, classes without workers, and workers that cannot run the study."""

    def __init__(self, expected: tuple[str, ...], executor: QueueExecutor, module: str, widest: int = 1) -> None:
        """`widest` are the slots of one class that a trial may take."""
        self._expected = expected
        self._widest = widest
        self._executor = executor
        self._module = module
        self._began = time.monotonic()
        self._said: set[str] = set()

    def due(self) -> list[str]:
        """Return what has to be said now."""
        found = [f"Warning: {self._executor.trouble}; trying again"] if self._executor.trouble is not None else []
        found += self._executor.notices()
        if time.monotonic() - self._began >= MISSING_SECONDS:
            found += self._missing()
        new = [text for text in found if text not in self._said]
        self._said.update(new)
        return new

    def _missing(self) -> list[str]:
        live = self._executor.workers
        fingerprint = Signer.configured().fingerprint
        trouble = unable(live, self._module, fingerprint)
        found = [f"Warning: {trouble}"] if trouble is not None else []
        served: Counter[str] = Counter()
        for worker in able(live, self._module, fingerprint).values():
            served[worker.compute_class] += worker.slots
        if served and max(served.values()) < self._widest:
            found.append(
                f"Warning: trials take up to {self._widest} slots of one class, and no class has as many; "
                "start more workers of one class, or with more slots"
            )
        found += [
            f"Warning: no worker serves the queue {name}; start one: {start_command(name, self._module)}"
            for name in self._expected
            if name not in served
        ]
        return found
