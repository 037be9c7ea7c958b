"""Log and report of a training: its steps, step times, and the share of each replica's gradients that counted.

With the log, one process can compute the training again (`replay`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shadho_celery.core.units import counted

#: share of accepted gradients below which a warning names a replica
FEW_ACCEPTED = 0.2
#: share of batches that were dropped and did not count later above which there is a warning
MANY_DROPPED = 0.05
#: percentiles of the step times that are reported
PERCENTILES = (50, 90, 99)


class Step(NamedTuple):
    """One step of a training."""

    #: number of the step, from 0
    step: int
    #: places whose vectors made the step, in the order in which they arrived; empty if the step was skipped
    accepted: tuple[int, ...]
    #: mean loss of their batches, at the parameters before the step
    loss: float
    #: seconds since the previous step, or since the start
    seconds: float
    #: factor on the learning rate; below 1 while replicas were missing
    scale: float = 1.0
    #: number of steps from the parameters of the vector to this step; 0 in lockstep
    staleness: int = 0
    #: factor on the loss, for gradients in half precision
    loss_scale: float = 1.0


@dataclass(kw_only=True)
class Log:
    """Log of a training, which the coordinator writes: its steps, and how many vectors of each place counted."""

    #: number of replicas N
    replicas: int = 1
    #: number of positions in the gang, N + b, by which the stream of batches is numbered
    places: int = 1
    #: True if the log determines the parameters: each vector is a function of its step and place
    can_replay: bool = True
    steps: list[Step] = field(default_factory=list)
    #: number of times that a replica joined, by rank; backup replicas have the ranks from N on
    joined: Counter[int] = field(default_factory=Counter)
    #: number of vectors that made a step, by place
    accepted: Counter[int] = field(default_factory=Counter)
    #: number of vectors that came too late and were dropped, by place
    late: Counter[int] = field(default_factory=Counter)
    #: number of vectors that never arrived because their step ended without them, by place
    cancelled: Counter[int] = field(default_factory=Counter)
    #: number of frames and connections refused, by cause
    refused: Counter[str] = field(default_factory=Counter)
    #: number of batches that were dropped and did not count later, as far as the training went; 0 before its end
    dropped_batches: int = 0
    #: messages for the user, in order
    notes: list[str] = field(default_factory=list)
    #: number of steps restored from a checkpoint, which are also in `steps`; None for a training from the start
    resumed_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of a training: for users, for the study, and for its replay."""

    #: number of backup replicas b, as given or as chosen last
    backups: int
    #: log of the training
    log: Log
    #: value of the last evaluation, or mean training loss since the last report; None without a step
    loss: float | None = None
    #: bytes received from the replicas
    bytes_in: int = 0
    #: bytes sent to the replicas
    bytes_out: int = 0
    #: predicted seconds per step for each b from 0 on; empty without enough times, or if the strategy is not `Sync`
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
        """Ranks of the backup replicas that joined, at any time."""
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
        """Return warnings of slow replicas whose gradients seldom counted, absent backups, and dropped batches."""
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
        """Return the mean staleness of the vectors that counted: 0 in lockstep."""
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
