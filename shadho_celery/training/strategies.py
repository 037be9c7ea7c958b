"""What a replica sends and when (the local rule), and what the coordinator does with it (the central rule).

A strategy is a frozen record that goes by the bus's two ends: `Strategy.train` runs in every replica, `Strategy.apply`
in the coordinator. The bus, the commit rule, late frames, failures and checkpoints are the same for all of them.
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

#: more than these go through one coordinator slowly, or not at all
MOST_REPLICAS = 16


class Worker(Protocol):
    """One replica's hands: its copy of the model, its data, its line to the coordinator.

    `wait`, `load`, `descend`, `gradient` and `send` raise an exception of the bus's own when the replica shall end, at
    the latest half a second after it is told so: a local rule lets it pass. `wait`, `newest`, `received`, `read`,
    `write` and `send` may be called from another thread than the rest.
    """

    #: numbers in the parameters
    size: int
    #: which of the gang's places this replica has, from 0; no two replicas have one place at a time
    slot: int

    def wait(self, after: int) -> int:
        """Block until the parameters of a step beyond `after` are here; return their step. Loads nothing."""

    def newest(self) -> int:
        """The newest step heard of, which may be ahead of what is here; -1 before the first."""

    def received(self, out: Vector) -> int:
        """Copy the newest parameters that are here to `out`; return their step."""

    def load(self) -> int:
        """Put the newest parameters that are here, and their buffers, into the model; return their step."""

    def read(self, out: Vector) -> None:
        """Copy the model's parameters to `out`."""

    def write(self, vector: Vector) -> None:
        """Put `vector` into the model as its parameters."""

    def gradient(self, draw: int, abandon: Callable[[], bool] | None = None) -> Gradient | None:
        """Gradient of the mean loss at the model's parameters, on batch (draw, slot) of the data.

        None where `abandon` was true between two micro-batches. The vector is the replica's own buffer: the next call
        writes over it.
        """

    def descend(self, draw: int) -> float:
        """One step of the replica's own optimizer on batch (draw, slot); return the loss.

        No step is taken along a gradient that is not finite.
        """

    def send(self, step: int, vector: Vector, loss: float) -> None:
        """Send a vector that came of the parameters of `step`; back when it may be written over."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What one batch says."""

    #: the replica's own buffer
    vector: Vector
    #: mean loss over the batch
    loss: float


class Centre(Protocol):
    """The coordinator's model and optimizer."""

    #: numbers in the parameters
    size: int

    def descend(self, gradient: Vector) -> None:
        """One step of the optimizer along `gradient`; its rate is scaled while the gang is short of replicas."""

    def read(self, out: Vector) -> None:
        """Copy the parameters to `out`."""

    def write(self, vector: Vector) -> None:
        """Put `vector` in place of the parameters."""


class Strategy(Protocol):
    """Both rules, and how many replicas they are for."""

    #: N: contributions that make a step
    @property
    def replicas(self) -> int: ...

    #: b: spare replicas beyond those, or "auto"
    @property
    def backups(self) -> int | Literal["auto"]: ...

    #: True: a step takes N vectors of that very step, one of each replica, and what comes later is dropped; every
    #: replica gets the new parameters. False: each vector counts at once, however old the parameters it came from, and
    #: is a step of its own; only its sender gets the new parameters.
    @property
    def lockstep(self) -> bool: ...

    def apply(self, centre: Centre, mean: Vector) -> None:
        """The central rule: take the mean of a step's vectors (of one, where not lockstep) into the centre.

        `mean` is scratch: it may be written over.
        """

    def train(self, worker: Worker) -> None:
        """The local rule: goes on until the worker's methods say that it is over, by an exception."""


def check_width(replicas: int, backups: int | str) -> None:
    """Raise UsageError unless `replicas` is at least 1 and `backups` at least 0 or "auto"."""
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise UsageError(f"replicas is {replicas!r}: a step needs at least one gradient; give a whole number from 1 up")
    if backups != "auto" and (isinstance(backups, bool) or not isinstance(backups, int) or backups < 0):
        raise UsageError(f"backups is {backups!r}: give a whole number from 0 up, or 'auto'")


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Synchronous SGD with backup workers (Chen et al., arXiv 1604.00981, algorithms 3 and 4).

    The first N gradients of a step make it, as their mean; the b late ones are dropped, never averaged in later, and
    abandoned between two micro-batches as soon as the replica hears of the next step. No gradient is stale.
    """

    #: N
    replicas: int
    #: b
    backups: int | Literal["auto"] = 0
    #: whether a replica abandons a gradient that comes too late; False makes it finish and send it, for comparison
    cancel: bool = True
    lockstep: bool = True

    def __post_init__(self) -> None:
        check_width(self.replicas, self.backups)

    def apply(self, centre: Centre, mean: Vector) -> None:
        centre.descend(mean)

    def train(self, worker: Worker) -> None:
        step = -1
        while True:
            worker.wait(after=step)
            step = worker.load()
            gradient = worker.gradient(step, abandon=partial(self._too_late, worker, step) if self.cancel else None)
            if gradient is not None:
                worker.send(step, gradient.vector, gradient.loss)

    @staticmethod
    def _too_late(worker: Worker, step: int) -> bool:
        return worker.newest() > step
