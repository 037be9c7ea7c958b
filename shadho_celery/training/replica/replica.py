"""Replica of a gang: it runs the strategy's local rule on its own copy of the model until the training ends."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.errors import UsageError
from shadho_celery.training.replica.batches import Computer, mixed
from shadho_celery.training.replica.client import Client, ConnectionLost
from shadho_celery.training.replica.update import Update
from shadho_celery.training.strategies import Gradient, Strategy
from shadho_celery.training.wire.frames import Header, Kind
from shadho_celery.training.wire.handshake import TrainingOver
from shadho_celery.training.wire.vectors import Layout, Quantize, Shape, Vector

logger = logging.getLogger(__name__)

#: (place, draw) -> minimum seconds of a gradient, to simulate slow machines
Delay = Callable[[int, int], float]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, data and settings that a replica works with. They are the same in the whole gang."""

    #: model, batches and loss
    computer: Computer
    #: the replica's optimizer, with schedule and clipping; used by strategies with local steps
    update: Update
    strategy: Strategy
    codec: Quantize | None
    #: digest of model, batches and settings, which must equal the coordinator's digest
    digest: str
    #: True if the replica's connection is encrypted
    encrypted: bool = False
    #: returns the minimum seconds of a gradient, to simulate slow machines; None for no minimum
    delay: Delay | None = None


def serve(seat: ReplicaSeat, workload: Workload, stop: Callable[[], bool] = lambda: False) -> None:
    """Act as a replica until the training ends. Raises Refused if the coordinator does not admit this replica."""
    computer = workload.computer
    shape = Shape(computer.model)
    layout = Layout(shape, workload.codec, computer.batches.places)
    client = Client(
        seat,
        workload.digest,
        (shape.vector(layout.params_size), shape.vector(layout.params_size)),
        stop=stop,
        encrypted=workload.encrypted,
    )
    try:
        while True:
            place = client.connect()
            replica = ConnectedReplica(workload, shape, layout=layout, client=client, place=place)
            computer.batches.load_ahead(place)
            try:
                workload.strategy.train(replica)
            except ConnectionLost as error:
                logger.warning("replica %d lost its coordinator (%s) and reconnects", seat.rank, error)
            finally:
                computer.batches.close()
    except TrainingOver as over:
        logger.info("replica %d ends: %s", seat.rank, over)
    except Exception as error:
        # Send the reason to the coordinator, because users see the coordinator's error and not this one. UsageError
        # ends the gang, because it would end every other replica too.
        reason = f"{computer.blame(error)}{type(error).__name__}: {error}"
        client.send_quit(reason, error=isinstance(error, UsageError))
        raise
    finally:
        client.close()


class ConnectedReplica:
    """Implementation of `Replica` for one connection."""

    def __init__(
        self,
        workload: Workload,
        shape: Shape,
        *,
        layout: Layout,
        client: Client,
        place: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size, self.place = layout.size, place
        self._workload, self._shape, self._layout = workload, shape, layout
        self._client, self._now = client, now
        self.wait, self.read, self.write = client.wait, shape.parameters.read, shape.parameters.write
        self._computer, self._batches, self._update = workload.computer, workload.computer.batches, workload.update
        #: step of the newest parameters that the strategy has read
        self._step = 0
        #: loss scale, and number of this place's batch, which came with these parameters
        self._orders = 1.0, 0
        self._buffers = shape.vector(layout.buffers)
        self._gradient = shape.vector()

    def newest(self) -> int:
        return self._client.newest

    def received(self, out: Vector) -> int:
        self._step = self._client.read_params(lambda params: np.copyto(out, params[: self.size]))
        return self._step

    def load(self) -> int:
        def write(params: Vector) -> None:
            parameters, buffers = self._layout.split(params)
            self._shape.parameters.write(parameters)
            self._shape.buffers.write(buffers)
            self._orders = self._layout.orders(params, self.place)

        self._step = self._client.read_params(write)
        return self._step

    def gradient(self, draw: int, abandon: Callable[[], bool] | None = None) -> Gradient | None:
        scale, number = self._orders
        result = self._backward(*divmod(number, self._batches.places), draw, abandon, scale)
        if result is None:
            return None
        loss, weight = result
        self._shape.parameters.read_gradients(self._gradient, scale)
        return Gradient(vector=self._gradient, loss=loss, weight=weight)

    def descend(self, draw: int) -> float:
        self._shape.buffers.read(self._buffers)
        result = self._backward(draw, self.place, draw, None)
        assert result is not None
        loss, _ = result
        self._update.go_to(self._step)
        if math.isfinite(loss) and self._shape.has_finite_gradients():
            self._update.apply(self._shape.parameters.tensors)
        else:
            # Skip the step: a gradient that is not finite would make the parameters and the momentum not finite for
            # ever.
            self._shape.buffers.write(self._buffers)
        return loss

    def send(self, step: int, vector: Vector, loss: float, weight: float = 1.0) -> None:
        self._shape.buffers.read(self._buffers)
        header = Header(kind=Kind.GRAD, epoch=self._client.epoch, step=step)
        # The seed makes the rounding the same again after a restart.
        seed = mixed(self._batches.seed, self.place, step, 2)
        self._client.send(self._layout.grad(header, loss, weight, self._buffers, vector, seed=seed))

    def _backward(
        self, step: int, place: int, draw: int, abandon: Callable[[], bool] | None, loss_scale: float = 1.0
    ) -> tuple[float, float] | None:
        """Compute the gradient of batch (step, place). Then wait for the rest of the simulated delay of `draw`."""

        def abandoned() -> bool:
            self._client.raise_if_ended()
            return abandon is not None and abandon()

        began = self._now()
        result = self._computer.backward(step, place, abandoned, loss_scale=loss_scale)
        if result is None or self._workload.delay is None:
            return result
        # The time that the gradient took counts towards the delay.
        left = began + self._workload.delay(self.place, draw) - self._now()
        return None if self._client.pause(left, abandoned) else result
