"""Log and report of a training: steps, step times, and the share of each replica's gradients that counted.

The log is enough to compute the training again in one process (`replay`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shadho_celery.core.units import counted

#: a warning names each replica of whose gradients a smaller share than this was used
FEW_ACCEPTED = 0.2
#: there is a warning if a larger share of the batches than this never counted
MANY_DROPPED = 0.05
#: reported percentiles of the step times
PERCENTILES = (50, 90, 99)


class Step(NamedTuple):
    """One step of a training."""

    #: number of the step, from 0
    step: int
    #: places whose vectors made the step, in the order in which they arrived; empty if the step was skipped
    accepted: tuple[int, ...]
    #: mean loss of the batches, at the parameters before the step
    loss: float
    #: seconds since the previous step, or since the start
    seconds: float
    #: factor on the learning rate; below 1 while replicas were missing
    scale: float = 1.0
    #: number of steps between the parameters from which the vector was computed and this step; 0 in lockstep
    staleness: int = 0
    #: factor on the loss, for gradients in half precision
    loss_scale: float = 1.0


@dataclass(kw_only=True)
class Log:
    """Log of a training, written by the coordinator: its steps, and how many vectors of each place counted."""

    #: number of replicas N
    replicas: int = 1
    #: number of places in the gang, N + b; the numbers of batches depend on it
    places: int = 1
    #: True if the training can be computed again: each vector depends only on parameters, step and place
    can_replay: bool = True
    steps: list[Step] = field(default_factory=list)
    #: rank -> number of times that a replica with this rank joined; backup replicas have the ranks from N on
    joined: Counter[int] = field(default_factory=Counter)
    #: place -> number of its vectors that counted
    accepted: Counter[int] = field(default_factory=Counter)
    #: place -> number of its vectors that came too late and were dropped
    late: Counter[int] = field(default_factory=Counter)
    #: place -> number of its vectors that were abandoned, because their step ended without them
    cancelled: Counter[int] = field(default_factory=Counter)
    #: cause -> number of frames and connections that were refused
    refused: Counter[str] = field(default_factory=Counter)
    #: number of batches that were dropped and did not count later; 0 before the end of the training
    dropped_batches: int = 0
    #: messages for the user, in order
    notes: list[str] = field(default_factory=list)
    #: number of steps restored from a checkpoint, which `steps` includes; None if the training was not resumed
    resumed_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of a training, for users, for the study and for `replay`."""

    #: number of backup replicas b, as given, or as last chosen for "auto"
    backups: int
    #: log of the training
    log: Log
    #: the last evaluated loss, or the mean training loss since the last report; None if no step was taken
    loss: float | None = None
    #: bytes received from the replicas
    bytes_in: int = 0
    #: bytes sent to the replicas
    bytes_out: int = 0
    #: predicted seconds per step for each b from 0 on; empty if too few times are known, or the strategy is not `Sync`
    predictions: Sequence[float] = ()

    @property
    def replicas(self) -> int:
        """Number of replicas N."""
        return self.log.replicas

    @property
    def steps(self) -> int:
        """Number of steps taken, including those before a restart."""
        return len(self.log.steps)

    @property
    def seconds(self) -> float:
        """Seconds of all steps together."""
        return math.fsum(step.seconds for step in self.log.steps)

    @property
    def backups_came(self) -> list[int]:
        """Ranks of the backup replicas that have ever joined."""
        return sorted(rank for rank in self.log.joined if rank >= self.replicas)

    def dropped_share(self) -> dict[int, float]:
        """Return the share of each place's gradients that came too late or were abandoned."""
        used, dropped = self.log.accepted, self.log.late + self.log.cancelled
        return {name: dropped[name] / (used[name] + dropped[name]) for name in sorted(+used | dropped)}

    def percentiles(self) -> dict[int, float]:
        """Return the 50th, 90th and 99th percentile of the seconds per step."""
        if not self.log.steps:
            return {}
        values = np.percentile([step.seconds for step in self.log.steps], PERCENTILES)
        return {name: float(value) for name, value in zip(PERCENTILES, values, strict=True)}

    def warnings(self) -> list[str]:
        """Return warnings about replicas whose gradients rarely counted, absent backups, and dropped batches."""
        warnings = [
            f"replica {name}: only {1 - share:.0%} of its gradients were used; it is too slow for this training"
            for name, share in self.dropped_share().items()
            if 1 - share < FEW_ACCEPTED
        ]
        wanted = self.log.places - self.replicas
        if (absent := wanted - len(self.backups_came)) > 0:
            warnings.append(
                f"{absent} of {counted(wanted, 'backup')} never came: no slot was free, or the training was short"
            )
        dropped = self.log.dropped_batches
        if (share := dropped / max(1, dropped + self.log.accepted.total())) > MANY_DROPPED:
            warnings.append(
                f"{share:.0%} of the batches never counted, because others were faster or replicas were missing; "
                "examples that make a batch slow may count too little: use fewer backups"
            )
        return warnings

    def staleness(self) -> float:
        """Return the mean staleness of the vectors that counted; it is 0 in lockstep."""
        stale = [step.staleness for step in self.log.steps if step.accepted]
        return sum(stale) / len(stale) if stale else 0.0

    def as_metrics(self) -> dict[str, object]:
        """Return the report as a trial's metrics, with values that JSON can represent."""
        return {
            "replicas": self.replicas,
            "backups": self.backups,
            "backups_came": self.backups_came,
            "steps": self.steps,
            "training_seconds": self.seconds,
            **{f"step_seconds_p{name}": value for name, value in self.percentiles().items()},
            "dropped_share": {str(name): share for name, share in self.dropped_share().items()},
            "dropped_batches": self.log.dropped_batches,
            "staleness": self.staleness(),
            "refused": dict(self.log.refused),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "step_seconds_by_backups": {str(b): seconds for b, seconds in enumerate(self.predictions)},
            "notes": [*self.log.notes, *self.warnings()],
        }
