"""A replica: does on its copy of the model what the strategy's local rule says, until it is told that it is over."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from shadho_celery.context import ReplicaSeat
from shadho_celery.training.codecs import Codec
from shadho_celery.training.compute import Computer
from shadho_celery.training.data import Batches, Data, Loss, mixed
from shadho_celery.training.frames import Header, Kind
from shadho_celery.training.handshake import Over
from shadho_celery.training.line import Line, Lost
from shadho_celery.training.payload import Layout
from shadho_celery.training.strategies import Gradient, Strategy, Vector
from shadho_celery.training.vectors import Bucket, Shape

logger = logging.getLogger(__name__)

#: (place, draw) -> seconds that a gradient takes at least, to play slow machines; see `Gang`
Delay = Callable[[int, int], float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a replica has to compute with: the same in every replica of a gang."""

    model: nn.Module
    #: the replica's own, for strategies with local steps
    optimizer: Optimizer
    data: Data
    loss: Loss
    strategy: Strategy
    codec: Codec
    #: digest of all that must be equal at both ends
    setup: str
    delay: Delay | None = None
    #: seconds for which a coordinator that is gone is looked for
    patience_seconds: float = 60.0


def serve(seat: ReplicaSeat, job: Job, stop: Callable[[], bool] = lambda: False) -> None:
    """Take part in the gang until it is over. Raises Refused where the coordinator turns this replica away."""
    shape = Shape(job.model)
    layout = Layout(shape, job.codec)
    total = layout.size + layout.buffers
    line = Line(
        seat,
        {"setup": job.setup},
        (shape.vector(total), shape.vector(total)),
        stop=stop,
        patience_seconds=job.patience_seconds,
    )
    bucket = Bucket(shape)
    try:
        while True:
            hands = Hands(job, shape, layout=layout, bucket=bucket, line=line, welcome=line.connect())
            try:
                job.strategy.train(hands)
            except Lost as error:
                logger.warning("replica %d lost its coordinator (%s) and looks for it", seat.rank, error)
    except Over as over:
        logger.info("replica %d ends: %s", seat.rank, over)
    except Exception as error:
        # The coordinator is told why: its error is the one that people see.
        line.leave(f"{type(error).__name__}: {error}")
        raise
    finally:
        bucket.remove()
        line.close()


class Hands:
    """The `Worker` of one connection."""

    def __init__(
        self, job: Job, shape: Shape, *, layout: Layout, bucket: Bucket, line: Line, welcome: dict[str, Any]
    ) -> None:
        self.size, self.slot = layout.size, int(welcome["slot"])
        self._job, self._shape, self._layout, self._bucket, self._line = job, shape, layout, bucket, line
        seed = int(welcome["seed"])
        batches = Batches(
            job.data,
            batch=int(welcome["batch"]),
            seed=seed,
            places=int(welcome["places"]),
            micro_batches=int(welcome["micro_batches"]),
        )
        self._computer = Computer(job.model, job.loss, batches, bucket)
        self._encoder = job.codec.encoder()
        self._generator = np.random.default_rng(mixed(seed, self.slot, line.epoch, 2))
        self._buffers = shape.vector(layout.buffers)

    def wait(self, after: int) -> int:
        return self._line.wait(after)

    def newest(self) -> int:
        return self._line.newest

    def received(self, out: Vector) -> int:
        return self._line.use(lambda params: np.copyto(out, params[: self.size]))

    def load(self) -> int:
        def put(params: Vector) -> None:
            parameters, buffers = self._layout.split(params)
            self._shape.parameters.write(parameters)
            self._shape.buffers.write(buffers)

        return self._line.use(put)

    def read(self, out: Vector) -> None:
        self._shape.parameters.read(out)

    def write(self, vector: Vector) -> None:
        self._shape.parameters.write(vector)

    def gradient(self, draw: int, abandon: Callable[[], bool] | None = None) -> Gradient | None:
        loss = self._backward(draw, abandon)
        return None if loss is None else Gradient(vector=self._bucket.finish(), loss=loss)

    def descend(self, draw: int) -> float:
        self._shape.buffers.read(self._buffers)
        loss = self._backward(draw, None)
        assert loss is not None
        if math.isfinite(loss) and self._shape.has_finite_gradients():
            self._job.optimizer.step()
        else:
            # Passed over: one such batch would be in the parameters and the momentum for good.
            self._shape.buffers.write(self._buffers)
        return loss

    def send(self, step: int, vector: Vector, loss: float) -> None:
        self._shape.buffers.read(self._buffers)
        header = Header(kind=Kind.GRAD, epoch=self._line.epoch, sender=self.slot, step=step)
        encoded = self._encoder.encode(vector, self._generator)
        self._line.send(self._layout.grad(header, loss, self._buffers, encoded))

    def _backward(self, draw: int, abandon: Callable[[], bool] | None) -> float | None:
        def given_up() -> bool:
            self._line.check()
            return abandon is not None and abandon()

        began = time.monotonic()
        loss = self._computer.backward(draw, self.slot, given_up)
        if loss is None or self._job.delay is None:
            return loss
        # What it really took is part of what a slow machine is to take.
        left = began + self._job.delay(self.slot, draw) - time.monotonic()
        return None if self._line.pause(left, given_up) else loss
