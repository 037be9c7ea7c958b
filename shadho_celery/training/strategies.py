"""Roles of a training: the strategy (local rule and central rule), the replica, and the model on which it works.

A strategy is a frozen record. Its local rule, `Strategy.train`, runs in every replica and sends vectors. Its central
rule, `Strategy.apply`, runs in the coordinator and applies their mean to the model. Connections, commit rule, late
frames, failures and checkpoints are the same for all strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from shadho_celery.errors import UsageError

#: one-dimensional: the model's parameters, or their gradient, in the order of ``model.parameters()``
Vector = NDArray[np.float32]

#: number of replicas that one coordinator supports well
MAX_REPLICAS = 16


class Replica(Protocol):
    """Replica as its strategy sees it: a copy of the model, the data, and the connection to the coordinator.

    `wait`, `load`, `descend`, `gradient` and `send` raise an exception to end the local rule, at the latest half a
    second after the replica must end; a local rule must not catch it. `wait`, `newest`, `received`, `read`,
    `write` and `send` may be called from another thread than the others. Eleven members, more than other roles have: it
    is all that a local rule may ask, and each rule asks for a part of it.
    """

    #: count of the model's parameters
    size: int
    #: position in the gang, from 0; unique at any time
    place: int

    def wait(self, after: int) -> int:
        """Block until the parameters of a step after `after` have arrived. Return their step. Loads nothing."""

    def newest(self) -> int:
        """Return the newest announced step, or -1 before the first. Its parameters may still be on their way."""

    def received(self, out: Vector) -> int:
        """Copy the newest received parameters to `out`. Return their step."""

    def load(self) -> int:
        """Write the newest received parameters and their buffers into the model. Return their step."""

    def read(self, out: Vector) -> None:
        """Copy the model's parameters to `out`."""

    def write(self, vector: Vector) -> None:
        """Write `vector` into the model as its parameters."""

    def gradient(self, draw: int, abandon: Callable[[], bool] | None = None) -> Gradient | None:
        """Return the gradient of the mean loss on batch (draw, place) of the data, at the model's parameters.

        Returns None if `abandon` returned True between two micro-batches. The next call overwrites the vector.
        """

    def descend(self, draw: int) -> float:
        """Take one step of the replica's own optimizer on batch (draw, place). Return the loss.

        A gradient that is not finite changes nothing.
        """

    def send(self, step: int, vector: Vector, loss: float) -> None:
        """Send a vector computed from the parameters of `step`. Return when it may be overwritten."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Gradient of one batch."""

    #: the replica's own buffer
    vector: Vector
    #: mean loss over the batch
    loss: float


class Centre(Protocol):
    """Model and optimizer of the coordinator."""

    #: count of the model's parameters
    size: int

    def descend(self, gradient: Vector) -> None:
        """Take one step of the optimizer along `gradient`. The rate is lower while replicas are missing."""

    def read(self, out: Vector) -> None:
        """Copy the parameters to `out`."""

    def write(self, vector: Vector) -> None:
        """Replace the parameters by `vector`."""


class Strategy(Protocol):
    """Local rule, central rule, and the numbers of replicas and backup replicas."""

    @property
    def replicas(self) -> int:
        """N: vectors that make a step."""
        ...

    @property
    def backups(self) -> int | Literal["auto"]:
        """b: spare replicas beyond N, or "auto"."""
        ...

    @property
    def lockstep(self) -> bool:
        """Whether replicas work in lockstep.

        True: a step takes N vectors of exactly this step, one from each replica, and drops later ones. All replicas get
        the new parameters. False: each vector makes a step at once, however stale. Only its sender gets the new
        parameters.
        """
        ...

    def apply(self, centre: Centre, mean: Vector) -> None:
        """Apply the mean of a step's vectors to the model (central rule). Without lockstep, apply a single vector.

        `mean` may be overwritten.
        """

    def train(self, replica: Replica) -> None:
        """Compute and send vectors (local rule), until a method of the replica raises the exception that ends it."""


def check_replicas(replicas: int, backups: int | str) -> None:
    """Raise UsageError unless `replicas` is at least 1 and `backups` at least 0 or "auto"."""
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise UsageError(f"replicas is {replicas!r}: a step needs at least one gradient; give a whole number from 1 up")
    if backups != "auto" and (isinstance(backups, bool) or not isinstance(backups, int) or backups < 0):
        raise UsageError(f"backups is {backups!r}: give a whole number from 0 up, or 'auto'")


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Synchronous SGD with backup replicas ("backup workers", Chen et al., arXiv 1604.00981, algorithms 3 and 4).

    The mean of the first N gradients makes the step. The b late ones are dropped: a replica abandons its gradient
    between two micro-batches as soon as the next step is announced. No gradient that counts is stale.
    """

    #: N
    replicas: int
    #: b
    backups: int | Literal["auto"] = 0
    #: True: a replica abandons a gradient that is too late. False: it finishes and sends it, for comparison.
    cancel: bool = True
    lockstep: bool = True

    def __post_init__(self) -> None:
        check_replicas(self.replicas, self.backups)

    def apply(self, centre: Centre, mean: Vector) -> None:
        """Take a step of the optimizer along the mean gradient."""
        centre.descend(mean)

    def train(self, replica: Replica) -> None:
        """Send one gradient for each step."""
        step = -1
        while True:
            replica.wait(after=step)
            step = replica.load()
            gradient = replica.gradient(step, abandon=partial(self._is_late, replica, step) if self.cancel else None)
            if gradient is not None:
                replica.send(step, gradient.vector, gradient.loss)

    @staticmethod
    def _is_late(replica: Replica, step: int) -> bool:
        return replica.newest() > step
