"""The messages that carry attempts to the workers of a study: what they say, and which trials travel in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shadho_celery.executors.fleet import Fleet
from shadho_celery.executors.in_flight import InFlight
from shadho_celery.executors.pace import Pace
from shadho_celery.executors.sharing import bundles
from shadho_celery.trial import Trial


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Puts the trials of one study into messages."""

    study: str
    #: what its workers must have been started with
    module: str
    #: seconds after which a trial is stopped
    trial_timeout: float | None
    #: False where all workers are on one machine: what one of them fails, the others would fail, too
    may_watch: bool
    fleet: Fleet
    in_flight: InFlight
    pace: Pace

    def carrying(self, trials: Sequence[Trial]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The messages for these trials, each beside the name of its queue."""
        by_class: dict[str, list[Trial]] = defaultdict(list)
        for trial in trials:
            by_class[str(trial.compute_class)].append(trial)
        slots = {compute_class.name: compute_class.slots for compute_class in self.fleet.classes}
        for name, group in by_class.items():
            sociable = [trial for trial in group if not self._goes_alone(trial)]
            alone = [[trial] for trial in group if self._goes_alone(trial)]
            for bundle in [*bundles(sociable, self.pace.seconds(name), slots.get(name, 1)), *alone]:
                yield name, self._payload([self._record(trial) for trial in bundle])

    def for_replicas(self, trial: Trial) -> dict[str, Any]:
        """The message for the replicas of a trial, but for their seat."""
        # Its time limit is its coordinator's; with that one all of them end.
        return self._payload([_attempt(trial)])

    def _goes_alone(self, trial: Trial) -> bool:
        """Whether a message may carry nothing but this: it takes several slots, or not every machine may have it."""
        return trial.slots > 1 or self.in_flight.other_host(trial) is not None

    def _record(self, trial: Trial) -> dict[str, Any]:
        return _attempt(trial, self.trial_timeout, self.in_flight.other_host(trial))

    def _payload(self, attempts: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "study": self.study,
            "module": self.module,
            "attempts": attempts,
            # Where there is nobody to compare it with, a worker's failures tell nothing of it.
            "watched": self.may_watch and len(self.fleet.able) > 1,
        }


def _attempt(trial: Trial, timeout: float | None = None, not_on: str | None = None) -> dict[str, Any]:
    record = {"number": trial.number, "attempt": trial.attempt, "params": trial.params, "seed": trial.seed}
    others: dict[str, Any] = {
        "budget": trial.budget,
        "timeout": timeout,
        "slots": trial.slots if trial.slots > 1 else None,
    }
    others |= {"origin": trial.origin, "not_on": not_on}
    return {**record, **{name: value for name, value in others.items() if value is not None}}
