"""Mean of a step's vectors, summed in the order of arrival, so a gang and its replay get the same bits."""

from __future__ import annotations

import math

import numpy as np

from shadho_celery.training.strategies import Vector


class Mean:
    """Running sums of one step's vectors and buffers."""

    def __init__(self, vector: Vector, buffers: Vector) -> None:
        """Keep the sums in `vector` and `buffers`."""
        self.vector, self.buffers = vector, buffers
        #: places whose vectors were added, in order of arrival
        self.places: list[int] = []
        self._losses: list[float] = []

    def __len__(self) -> int:
        return len(self.places)

    def add(self, place: int, vector: Vector, buffers: Vector, loss: float) -> None:
        """Add a copy of one vector."""
        if self.places:
            self.vector += vector
            self.buffers += buffers
        else:
            self.vector[:] = vector
            self.buffers[:] = buffers
        self.places.append(place)
        self._losses.append(loss)

    def take(self) -> tuple[tuple[int, ...], float]:
        """Turn the sums into means, in place. Return the places and the mean loss, and start a new step."""
        places, loss = tuple(self.places), math.fsum(self._losses) / len(self._losses)
        if len(places) > 1:
            share = np.float32(1.0 / len(places))
            self.vector *= share
            self.buffers *= share
        self.places, self._losses = [], []
        return places, loss
