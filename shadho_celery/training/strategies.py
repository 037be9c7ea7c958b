"""Strategies of a training, and the roles `Replica` and `Centre` (the coordinator's model) that they use.

A strategy is a frozen record with two rules. The local rule, `Strategy.train`, runs in every replica and sends vectors.
The central rule, `Strategy.apply`, runs in the coordinator and applies the mean of the vectors to the model.
Connections, failures, checkpoints, the commit rule and the dropping of late vectors are the same for all strategies:
see `coordinator/coordinator.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np

from shadho_celery.core.checks import check_whole
from shadho_celery.errors import UsageError
from shadho_celery.training.wire.vectors import Vector as Vector  # noqa: PLC0414  # users take it from here

#: number of replicas that one coordinator supports well
MAX_REPLICAS = 16


class Replica(Protocol):
    """Replica as its strategy sees it: a copy of the model, the data, and the connection to the coordinator.

    `wait`, `load`, `descend`, `gradient` and `send` raise an exception within half a second after the replica must end.
    It ends the local rule, which must not catch it. `wait`, `newest`, `received`, `read`, `write` and `send` may be
    called from a second thread. The role has eleven members, more than other roles, because they are everything that a
    local rule may use.
    """

    #: number of values in the model's parameters
    size: int
    #: position in the gang, from 0; connected replicas have different places
    place: int

    def wait(self, after: int) -> int:
        """Block until parameters of a later step than `after` have arrived. Return their step. They are not loaded."""

    def newest(self) -> int:
        """Return the newest announced step, or -1 before the first one. Its parameters may not have arrived yet."""

    def received(self, out: Vector) -> int:
        """Copy the newest received parameters to `out`. Return their step."""

    def load(self) -> int:
        """Write the newest received parameters and buffers into the model. Return their step."""

    def read(self, out: Vector) -> None:
        """Copy the model's parameters to `out`."""

    def write(self, vector: Vector) -> None:
        """Write `vector` into the model as its parameters."""

    def gradient(self, draw: int, abandon: Callable[[], bool] | None = None) -> Gradient | None:
        """Return the gradient of the mean loss on this place's batch of step `draw`, at the model's parameters.

        `draw` is the step whose parameters were loaded. Returns None if `abandon` returned True before a micro-batch.
        The next call overwrites the returned vector.
        """

    def descend(self, draw: int) -> float:
        """Take one step of the replica's own optimizer on batch (draw, place). Return the loss.

        If the loss or the gradient is not finite, the step is skipped.
        """

    def send(self, step: int, vector: Vector, loss: float, weight: float = 1.0) -> None:
        """Send a vector that was computed from the parameters of `step`. The caller may overwrite it afterwards."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Gradient of one batch."""

    #: the gradient, in a buffer that the replica's next gradient overwrites
    vector: Vector
    #: mean loss over the batch
    loss: float
    #: weight of the batch in the mean of a step
    weight: float = 1.0


class Centre(Protocol):
    """The coordinator's model and optimizer, as a central rule sees them."""

    def descend(self, gradient: Vector) -> None:
        """Take one step of the optimizer along `gradient`. The learning rate is lower while replicas are missing."""

    def read(self, out: Vector) -> None:
        """Copy the parameters to `out`."""

    def write(self, vector: Vector) -> None:
        """Copy `vector` to the parameters."""


class Strategy(Protocol):
    """Strategy of a training: local rule, central rule, and the numbers of replicas and backup replicas."""

    @property
    def replicas(self) -> int:
        """Number of replicas N. In lockstep, this many vectors make a step."""
        ...

    @property
    def backups(self) -> int | Literal["auto"]:
        """Number b of backup replicas beyond N, or "auto"."""
        ...

    @property
    def lockstep(self) -> bool:
        """True for a synchronous strategy, False for an asynchronous one.

        If True, the first N vectors of a step make the step, and later ones are dropped. All replicas then get the new
        parameters. If False, each vector makes a step of its own, however stale it is, and only its sender gets the new
        parameters.
        """
        ...

    def apply(self, centre: Centre, mean: Vector) -> None:
        """Apply the mean of a step's vectors to the model (central rule). Without lockstep, it is the mean of one
        vector.

        This method may overwrite `mean`.
        """

    def train(self, replica: Replica) -> None:
        """Compute and send vectors (local rule), until a method of the replica raises the exception that ends it."""


def _send_gradients(replica: Replica, *, cancel: bool) -> None:
    """Send one gradient for each set of parameters received.

    With `cancel`, a gradient is abandoned once parameters of a later step have arrived.
    """

    def is_late() -> bool:
        return replica.newest() > step

    step = -1
    while True:
        replica.wait(after=step)
        step = replica.load()
        gradient = replica.gradient(step, abandon=is_late if cancel else None)
        if gradient is not None:
            replica.send(step, gradient.vector, gradient.loss, gradient.weight)


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """Base class of the strategies, which checks the numbers of replicas. Without lockstep there are no backup
    replicas. By default, the vectors are gradients.
    """

    #: number of replicas N
    replicas: int
    #: number of backup replicas b
    backups: int | Literal["auto"] = 0
    lockstep: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(1, replicas=self.replicas)
        if self.backups != "auto":
            check_whole(0, other="or 'auto'", backups=self.backups)
        if self.backups and not self.lockstep:
            raise UsageError(
                f"{type(self).__name__} takes no backups, because no step waits for a slow replica; "
                "give more replicas instead"
            )

    def apply(self, centre: Centre, mean: Vector) -> None:
        """Take a step of the optimizer along the mean gradient."""
        centre.descend(mean)


@dataclass(frozen=True, kw_only=True)
class Sync(_Numbers):
    """Synchronous SGD with backup replicas ("backup workers", Chen et al., arXiv 1604.00981, algorithms 3 and 4).

    The mean of the first N gradients makes the step, and the gradients of the b slowest replicas are dropped. A late
    replica abandons its gradient between two micro-batches once the next step is announced. No gradient that counts is
    stale.
    """

    #: True if replicas abandon late gradients; False if they finish and send them (for comparison)
    cancel: bool = True

    def train(self, replica: Replica) -> None:
        """Send one gradient for each step."""
        _send_gradients(replica, cancel=self.cancel)


@dataclass(frozen=True, kw_only=True)
class Async(_Numbers):
    """Asynchronous SGD, for comparison: each gradient is applied at once, however stale it is.

    Each step uses one gradient, so the same number of examples takes N times as many steps as with `Sync`.
    """

    lockstep: ClassVar[bool] = False

    def train(self, replica: Replica) -> None:
        """Send one gradient for each set of parameters received."""
        _send_gradients(replica, cancel=False)


@dataclass(frozen=True, kw_only=True)
class Average(_Numbers):
    """Local SGD with delayed averaging (DaSGD, Zhou et al., arXiv 2006.00441).

    A replica sends the difference that `tau` local steps have made to its parameters, and continues. After `delay`
    further local steps it merges the average: x = average + (x_now - x_sent). With `delay` 0 this is local SGD. Each
    replica has its own optimizer. Each averaging counts as one step. A replica that is late for a step starts again
    from the newest parameters.
    """

    #: number of local steps between two differences
    tau: int = 4
    #: number of local steps from sending a difference to merging the average, 0 to `tau`
    delay: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(1, tau=self.tau)
        # An average must be merged before the next difference is sent.
        check_whole(0, self.tau, delay=self.delay)

    def apply(self, centre: Centre, mean: Vector) -> None:
        """Add the mean difference to the parameters."""
        _add(centre, mean)

    def train(self, replica: Replica) -> None:
        """Send the difference of every `tau` local steps. Merge each average `delay` local steps later."""
        # Send differences instead of parameters, because a codec can quantise such small numbers.
        base, sent, now = (np.empty(replica.size, dtype=np.float32) for _ in range(3))
        step = self._restart(replica, -1, base)
        done, loss = 0, math.nan
        while True:
            while done < self.tau and replica.newest() <= step:
                loss = replica.descend(step * self.tau + done)
                done += 1
            if done < self.tau:
                step, done = self._restart(replica, step, base), 0
                continue
            replica.read(sent)
            replica.send(step, sent - base, loss)
            # Take the first local steps of the next round before the average has arrived.
            for ahead in range(self.delay):
                loss = replica.descend((step + 1) * self.tau + ahead)
            replica.wait(after=step)
            step = replica.received(base)
            replica.read(now)
            replica.write(base + (now - sent))
            done = self.delay

    @staticmethod
    def _restart(replica: Replica, after: int, base: Vector) -> int:
        """Wait for parameters of a later step than `after`, load them, and copy them to `base`. Return their step."""
        replica.wait(after=after)
        step = replica.load()
        replica.read(base)
        return step


@dataclass(frozen=True, kw_only=True)
class Elastic(_Numbers):
    """Elastic averaging in the background (ShadowSync's S-EASGD, Zheng et al., arXiv 2003.03477).

    A replica trains without waiting, while a second thread sends and receives. When newer parameters x~ of the
    coordinator have arrived, the replica's parameters x and x~ are moved towards each other (EASGD, Zhang et al., arXiv
    1412.6651): e = alpha (x - x~), x <- x - e, x~ <- x~ + e. Each such exchange counts as one step.
    """

    #: fraction of the difference by which x and x~ are moved, between 0 and 1; about 0.9 / N is stable
    alpha: float = 0.1
    #: minimum number of local steps between two exchanges
    every: int = 4
    lockstep: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha < 1:
            raise UsageError(
                f"alpha is {self.alpha}: 0 exchanges nothing and 1 discards the local steps; give a number in between"
            )
        check_whole(1, every=self.every)

    def apply(self, centre: Centre, mean: Vector) -> None:
        """Add one elastic difference to the parameters."""
        _add(centre, mean)

    def train(self, replica: Replica) -> None:
        """Take local steps. Exchange the elastic difference whenever newer parameters have arrived."""
        replica.wait(after=-1)
        step = replica.load()
        #: parameters of the replica, and the last received parameters of the coordinator
        local, centre = (np.empty(replica.size, dtype=np.float32) for _ in range(2))
        replica.read(centre)
        # A replica that joins late starts with about the batch that the other replicas have reached.
        draw = step * self.every // self.replicas
        exchange: Future[int] | None = None
        # The block ends quickly at the end of the training, because the replica's methods then raise in the pool's
        # thread.
        with ThreadPoolExecutor(1, "elastic-exchange") as pool:
            while True:
                for _ in range(self.every):
                    loss = replica.descend(draw)
                    draw += 1
                if exchange is None or exchange.done():
                    step = step if exchange is None else exchange.result()
                    replica.read(local)
                    difference = self.alpha * (local - centre)
                    replica.write(local - difference)
                    exchange = pool.submit(_exchange, replica, step, centre, difference, loss)


def _add(centre: Centre, difference: Vector) -> None:
    parameters = np.empty_like(difference)
    centre.read(parameters)
    centre.write(parameters + difference)


def _exchange(replica: Replica, step: int, centre: Vector, difference: Vector, loss: float) -> int:
    """Send an elastic difference, and receive the coordinator's next parameters into `centre`. Return their step."""
    replica.send(step, difference, loss)
    replica.wait(after=step)
    return replica.received(centre)
