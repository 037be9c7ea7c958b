"""What happened in a distributed training, step by step: enough to compute it again in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step that was taken."""

    #: the parameters it started from
    step: int
    #: places whose vectors made it, in the order in which they were added
    slots: tuple[int, ...]
    #: mean loss of their batches, before the step
    loss: float
    #: seconds since the step before, or since the start
    seconds: float
    #: factor on the learning rate
    scale: float = 1.0

    def as_row(self) -> list[Any]:
        """For a checkpoint."""
        return [self.step, list(self.slots), self.loss, self.seconds, self.scale]

    @staticmethod
    def from_row(row: Sequence[Any]) -> Step:
        step, slots, loss, seconds, scale = row
        return Step(step=step, slots=tuple(slots), loss=loss, seconds=seconds, scale=scale)


@dataclass(kw_only=True)
class Log:
    """The steps, and what became of every replica's vectors; the coordinator writes it."""

    #: places there were: the data's batches are numbered by it
    places: int = 1
    steps: list[Step] = field(default_factory=list)
    #: by place: vectors that made a step
    accepted: Counter[int] = field(default_factory=Counter)
    #: by place: vectors that came too late
    late: Counter[int] = field(default_factory=Counter)
    #: by place: vectors that were given up on the way, or never came, when their step ended without them
    cancelled: Counter[int] = field(default_factory=Counter)
    #: frames refused, by cause
    refused: Counter[str] = field(default_factory=Counter)
    #: what a person should know, in order
    notes: list[str] = field(default_factory=list)
    #: steps that were computed before the coordinator was started again, and are in `steps` too
    resumed_from: int | None = None
