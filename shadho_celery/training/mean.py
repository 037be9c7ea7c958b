"""The mean of a step's vectors, added up one by one as they come: the same sums in a gang and when it is replayed."""

from __future__ import annotations

import math

import numpy as np

from shadho_celery.training.strategies import Vector


class Mean:
    """Vectors and buffers of one step so far."""

    def __init__(self, vector: Vector, buffers: Vector) -> None:
        """`vector` and `buffers` are where the sums are kept."""
        self.vector, self.buffers = vector, buffers
        #: places whose vectors are in, in the order in which they came
        self.slots: list[int] = []
        self._losses: list[float] = []

    def __len__(self) -> int:
        return len(self.slots)

    def add(self, slot: int, vector: Vector, buffers: Vector, loss: float) -> None:
        """One more; it is copied."""
        if self.slots:
            self.vector += vector
            self.buffers += buffers
        else:
            self.vector[:] = vector
            self.buffers[:] = buffers
        self.slots.append(slot)
        self._losses.append(loss)

    def take(self) -> tuple[tuple[int, ...], float]:
        """Make means of the sums, where they are; return the places and the mean loss, and begin anew."""
        slots, loss = tuple(self.slots), math.fsum(self._losses) / len(self._losses)
        if len(slots) > 1:
            share = np.float32(1.0 / len(slots))
            self.vector *= share
            self.buffers *= share
        self.slots, self._losses = [], []
        return slots, loss
