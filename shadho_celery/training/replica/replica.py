"""Replica of a gang: runs the strategy's local rule on its own copy of the model until the training ends."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import nn
from torch.optim import Optimizer

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.training.replica.batches import Batches, Computer, Data, Loss, mixed
from shadho_celery.training.replica.client import Client, ConnectionLost
from shadho_celery.training.strategies import Gradient, Strategy, Vector
from shadho_celery.training.wire.codecs import Codec, Layout
from shadho_celery.training.wire.frames import Header, Kind
from shadho_celery.training.wire.handshake import TrainingOver, Welcome
from shadho_celery.training.wire.vectors import Bucket, Shape

logger = logging.getLogger(__name__)

#: (place, draw) -> minimum seconds of a gradient, to simulate slow machines
Delay = Callable[[int, int], float]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Parts that a replica works with: model, data, loss, strategy and codec. They are the same in the whole gang."""

    model: nn.Module
    #: the replica's own optimizer, for strategies with local steps
    optimizer: Optimizer
    data: Data
    loss: Loss
    strategy: Strategy
    codec: Codec
    #: digest of model, data and settings, which must be equal at both ends
    digest: str
    #: True if the replica's connection is encrypted
    encrypted: bool = False
    #: returns the minimum seconds of a gradient, to simulate slow machines; None otherwise
    delay: Delay | None = None
    #: seconds for which a replica tries to reconnect to its coordinator
    reconnect_seconds: float = 60.0


def serve(seat: ReplicaSeat, workload: Workload, stop: Callable[[], bool] = lambda: False) -> None:
    """Act as a replica until the training ends. Raises Refused if the coordinator does not admit this replica."""
    shape = Shape(workload.model)
    layout = Layout(shape, workload.codec)
    total = layout.size + layout.buffers
    client = Client(
        seat,
        workload.digest,
        (shape.vector(total), shape.vector(total)),
        stop=stop,
        encrypted=workload.encrypted,
        reconnect_seconds=workload.reconnect_seconds,
    )
    bucket = Bucket(shape)
    try:
        while True:
            welcome = client.connect()
            replica = ConnectedReplica(workload, shape, layout=layout, bucket=bucket, client=client, welcome=welcome)
            try:
                workload.strategy.train(replica)
            except ConnectionLost as error:
                logger.warning("replica %d lost its coordinator (%s) and reconnects", seat.rank, error)
    except TrainingOver as over:
        logger.info("replica %d ends: %s", seat.rank, over)
    except Exception as error:
        # Send the reason to the coordinator, because users see the coordinator's error and not this one.
        client.send_quit(f"{type(error).__name__}: {error}")
        raise
    finally:
        bucket.remove()
        client.close()


class ConnectedReplica:
    """Implementation of `Replica` for one connection."""

    def __init__(
        self,
        workload: Workload,
        shape: Shape,
        *,
        layout: Layout,
        bucket: Bucket,
        client: Client,
        welcome: Welcome,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size, self.place = layout.size, welcome.place
        self._workload, self._shape, self._layout, self._bucket = workload, shape, layout, bucket
        self._client, self._now = client, now
        self.wait, self.read, self.write = client.wait, shape.parameters.read, shape.parameters.write
        batches = Batches(
            workload.data,
            batch=welcome.batch,
            seed=welcome.seed,
            places=welcome.places,
            micro_batches=welcome.micro_batches,
        )
        self._computer = Computer(workload.model, workload.loss, batches, bucket)
        self._encoder = workload.codec.encoder()
        self._generator = np.random.default_rng(mixed(welcome.seed, self.place, client.epoch, 2))
        self._buffers = shape.vector(layout.buffers)

    def newest(self) -> int:
        return self._client.newest

    def received(self, out: Vector) -> int:
        return self._client.read_params(lambda params: np.copyto(out, params[: self.size]))

    def load(self) -> int:
        def write(params: Vector) -> None:
            parameters, buffers = self._layout.split(params)
            self._shape.parameters.write(parameters)
            self._shape.buffers.write(buffers)

        return self._client.read_params(write)

    def gradient(self, draw: int, abandon: Callable[[], bool] | None = None) -> Gradient | None:
        loss = self._backward(draw, abandon)
        return None if loss is None else Gradient(vector=self._bucket.finish(), loss=loss)

    def descend(self, draw: int) -> float:
        self._shape.buffers.read(self._buffers)
        loss = self._backward(draw, None)
        assert loss is not None
        if math.isfinite(loss) and self._shape.has_finite_gradients():
            self._workload.optimizer.step()
        else:
            # Skip the step, because one such batch would affect all later parameters and the momentum.
            self._shape.buffers.write(self._buffers)
        return loss

    def send(self, step: int, vector: Vector, loss: float) -> None:
        self._shape.buffers.read(self._buffers)
        header = Header(kind=Kind.GRAD, epoch=self._client.epoch, sender=self.place, step=step)
        encoded = self._encoder.encode(vector, self._generator)
        self._client.send(self._layout.grad(header, loss, self._buffers, encoded))

    def _backward(self, draw: int, abandon: Callable[[], bool] | None) -> float | None:
        def abandoned() -> bool:
            self._client.raise_if_ended()
            return abandon is not None and abandon()

        began = self._now()
        loss = self._computer.backward(draw, self.place, abandoned)
        if loss is None or self._workload.delay is None:
            return loss
        # The time that the gradient really took is part of the delay.
        left = began + self._workload.delay(self.place, draw) - self._now()
        return None if self._client.pause(left, abandoned) else loss
