"""Record of a distributed training, step by step, from which one process can compute it again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

#: a step in a checkpoint: number, accepted places, loss, seconds, scale
Row = tuple[int, list[int], float, float, float]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a training."""

    #: number of the step, from 0
    step: int
    #: places whose vectors made the step, in the order in which they were added; empty if the step was skipped
    accepted: tuple[int, ...]
    #: mean loss of their batches, at the parameters before the step
    loss: float
    #: seconds since the step before, or since the start
    seconds: float
    #: factor on the learning rate; below 1 while replicas were missing
    scale: float = 1.0

    def as_row(self) -> Row:
        """Return the step as a row of plain numbers, for a checkpoint."""
        return self.step, list(self.accepted), self.loss, self.seconds, self.scale

    @staticmethod
    def from_row(row: Row) -> Step:
        """Return the step of a checkpoint's row."""
        step, accepted, loss, seconds, scale = row
        return Step(step=step, accepted=tuple(accepted), loss=loss, seconds=seconds, scale=scale)


@dataclass(kw_only=True)
class Log:
    """Steps of a training and counts of its vectors; the coordinator writes it."""

    #: number of positions in the gang, by which the stream of batches is numbered
    places: int = 1
    steps: list[Step] = field(default_factory=list)
    #: vectors that made a step, by place
    accepted: Counter[int] = field(default_factory=Counter)
    #: vectors that came too late and were dropped, by place
    late: Counter[int] = field(default_factory=Counter)
    #: vectors that never arrived because their step ended without them, by place
    cancelled: Counter[int] = field(default_factory=Counter)
    #: frames refused, by cause
    refused: Counter[str] = field(default_factory=Counter)
    #: messages for the user, in order
    notes: list[str] = field(default_factory=list)
    #: steps restored from a checkpoint, which are also in `steps`; None for a training from the start
    resumed_from: int | None = None
