"""A gang in one process: every replica a thread, the coordinator a lock; no sockets, so only the rules are at work."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from shadho_celery.training.strategies import Gradient, Strategy
from shadho_celery.training.wire.vectors import Quantize, Vector

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Over(BaseException):
    """The last step has been taken."""


class TorchCentre:
    """A model and its optimizer, as a strategy sees them; the same serves as the core of a replica."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._parameters = list(model.parameters())
        self.size = sum(p.numel() for p in self._parameters)

    def descend(self, gradient: Vector) -> None:
        at = 0
        for p in self._parameters:
            p.grad = torch.from_numpy(gradient[at : at + p.numel()].copy()).view_as(p)
            at += p.numel()
        self.optimizer.step()

    def read(self, out: Vector) -> None:
        out[:] = np.concatenate([p.detach().numpy().ravel() for p in self._parameters])

    def write(self, vector: Vector) -> None:
        at = 0
        with torch.no_grad():
            for p in self._parameters:
                p.copy_(torch.from_numpy(vector[at : at + p.numel()]).view_as(p))
                at += p.numel()

    def gradients(self) -> Vector:
        return np.concatenate([p.grad.numpy().ravel() for p in self._parameters if p.grad is not None])


class Hub:
    """Takes vectors by the strategy's rules; steps are counted from 0."""

    def __init__(self, strategy: Strategy, centre: TorchCentre, *, steps: int, codec: Quantize | None = None) -> None:
        self.strategy, self.centre, self.steps = strategy, centre, steps
        self.codec = codec
        self.step = 0
        #: bytes of vectors that replicas sent
        self.bytes_in = 0
        #: vectors that came too late, by place
        self.dropped: dict[int, int] = {}
        self.changed = threading.Condition()
        self._parameters = np.empty(centre.size, dtype=np.float32)
        centre.read(self._parameters)
        self._got: dict[int, Vector] = {}

    def take(self, place: int, step: int, payload: bytes) -> None:
        vector = np.empty(self.centre.size, dtype=np.float32)
        with self.changed:
            self.bytes_in += len(payload)
            if self.step >= self.steps:
                raise Over
            if self.codec is None:
                vector[:] = np.frombuffer(payload, dtype=np.float32)
            else:
                self.codec.decode(payload, vector)
            if self.strategy.lockstep:
                if step != self.step:
                    self.dropped[place] = self.dropped.get(place, 0) + 1
                    return
                self._got[place] = vector
                if len(self._got) < self.strategy.replicas:
                    return
                # In the places' order: the sum does not depend on who came first.
                vector = np.mean([each for _, each in sorted(self._got.items())], axis=0, dtype=np.float32)
                self._got = {}
            self.strategy.apply(self.centre, vector)
            self.step += 1
            self.centre.read(self._parameters)
            self.changed.notify_all()

    def parameters(self, out: Vector) -> int:
        with self.changed:
            out[:] = self._parameters
            return self.step

    def run(self, replicas: list[HubReplica]) -> None:
        """Train until the last step; raise what went wrong in a replica."""
        errors: list[BaseException] = []

        def train(replica: HubReplica) -> None:
            try:
                self.strategy.train(replica)
            except Over:
                pass
            except BaseException as error:
                errors.append(error)
                with self.changed:
                    self.step = self.steps
                    self.changed.notify_all()

        threads = [threading.Thread(target=train, args=(replica,)) for replica in replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class HubReplica:
    """`Replica` with its own model, on its own thread."""

    def __init__(
        self,
        hub: Hub,
        place: int,
        core: TorchCentre,
        loss: Loss,
        data: tuple[Tensor, Tensor],
        batch: int,
        seed: int = 0,
    ) -> None:
        self.hub, self.place, self.size, self._core = hub, place, core.size, core
        self._loss, self._data, self._batch, self._seed = loss, data, batch, seed
        self._buffer = np.empty(core.size, dtype=np.float32)
        #: local steps and gradients that this replica has done
        self.draws: list[int] = []

    def wait(self, after: int) -> int:
        with self.hub.changed:
            self.hub.changed.wait_for(lambda: self.hub.step > after)
            if self.hub.step >= self.hub.steps:
                raise Over
            return self.hub.step

    def newest(self) -> int:
        return self.hub.step

    def received(self, out: Vector) -> int:
        return self.hub.parameters(out)

    def load(self) -> int:
        step = self.hub.parameters(self._buffer)
        self._core.write(self._buffer)
        return step

    def read(self, out: Vector) -> None:
        self._core.read(out)

    def write(self, vector: Vector) -> None:
        self._core.write(vector)

    def gradient(self, draw: int, abandon: Callable[[], bool] | None = None) -> Gradient | None:
        if self.hub.step >= self.hub.steps:
            raise Over
        loss = self._backward(draw)
        return None if abandon is not None and abandon() else Gradient(vector=self._core.gradients(), loss=loss)

    def descend(self, draw: int) -> float:
        if self.hub.step >= self.hub.steps:
            raise Over
        loss = self._backward(draw)
        self._core.optimizer.step()
        return loss

    def send(self, step: int, vector: Vector, loss: float, weight: float = 1.0) -> None:
        generator, codec = np.random.default_rng([self._seed, step, self.place]), self.hub.codec
        self.hub.take(self.place, step, vector.tobytes() if codec is None else codec.encode(vector, generator))

    def _backward(self, draw: int) -> float:
        self.draws.append(draw)
        inputs, targets = self._data
        chosen = np.random.default_rng([self._seed, draw, self.place]).integers(0, len(inputs), self._batch)
        rows = torch.from_numpy(chosen)
        self._core.optimizer.zero_grad()
        loss = self._loss(self._core.model, inputs[rows], targets[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())
