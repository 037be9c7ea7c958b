"""Model and optimizer of the coordinator, the mean of a step's vectors, and the moving average of the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shadho_celery.errors import UsageError
from shadho_celery.training.strategies import Vector
from shadho_celery.training.wire.vectors import Shape


class Mean:
    """Mean of one step's vectors and buffers, from running sums."""

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
        """Turn the sums into means, in place, and start a new step. Return the places and the mean loss."""
        places, loss = tuple(self.places), math.fsum(self._losses) / len(self._losses)
        if len(places) > 1:
            share = np.float32(1.0 / len(places))
            self.vector *= share
            self.buffers *= share
        self.places, self._losses = [], []
        return places, loss


class CentreState(TypedDict):
    """State of a `ModelCentre` in a checkpoint: tensors, numbers and plain containers."""

    model: dict[str, Tensor]
    #: as returned by the optimizer's ``state_dict``
    optimizer: dict[str, Any]
    #: moving average of the parameters; None if it is not used
    averaged: Tensor | None


class ModelCentre:
    """The coordinator's model and optimizer, with an optional moving average of the parameters.

    A strategy's central rule works on it. The average is exponential: a_t = d a_(t-1) + (1 - d) theta_t. It does not
    include the model's buffers.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, average: float | None = None) -> None:
        if average is not None and not 0 <= average < 1:
            raise UsageError(f"ema is {average}; give the weight of the past, at least 0 and less than 1")
        self.model, self.optimizer, self.shape = model, optimizer, Shape(model)
        _check_optimizer(model, optimizer)
        parameters = self.shape.parameters
        self.size, self.read, self.write = parameters.size, parameters.read, parameters.write
        #: factor on the learning rate of every parameter group in the current step
        self.scale = 1.0
        self._decay = average
        self._averaged: Vector | None = None
        self._gradient: Vector | None = None
        if average is not None:
            self._averaged = self.shape.vector()
            self.read(self._averaged)

    @property
    def settings(self) -> str:
        """Text of the optimizer's settings. A checkpoint can be used only with equal settings."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return f"{type(self.optimizer).__name__} {groups} {self._decay}"

    def descend(self, gradient: Vector) -> None:
        """Take one step of the optimizer along `gradient`."""
        if gradient is not self.scratch():
            self.scratch()[:] = gradient
        views = self.shape.parameters.views(torch.from_numpy(self.scratch()))
        for parameter, view in zip(self.shape.parameters.tensors, views, strict=True):
            # On a CPU and in float32 this copies nothing.
            parameter.grad = view.to(device=parameter.device, dtype=parameter.dtype)
        self.step()

    def step(self) -> None:
        """Take one step of the optimizer along the parameters' gradients, with learning rates multiplied by `scale`."""
        groups = self.optimizer.param_groups if self.scale != 1.0 else []
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self.scale
        try:
            self.optimizer.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def scratch(self) -> Vector:
        """Return a vector for gradients. `descend` does not copy a gradient that is in this vector."""
        if self._gradient is None:
            self._gradient = self.shape.vector()
        return self._gradient

    def update_average(self) -> None:
        """Update the moving average with the current parameters."""
        if self._averaged is not None and self._decay is not None:
            now = self.shape.vector()
            self.read(now)
            torch.from_numpy(self._averaged).lerp_(torch.from_numpy(now), 1 - self._decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged parameters, if there are any, into the model for the duration of the block."""
        if self._averaged is None:
            yield
            return
        own = self.shape.vector()
        self.read(own)
        self.write(self._averaged)
        try:
            yield
        finally:
            self.write(own)

    def keep_average(self) -> None:
        """Put the averaged parameters, if there are any, into the model permanently."""
        if self._averaged is not None:
            self.write(self._averaged)

    def state(self) -> CentreState:
        """Return the state for a checkpoint. Its tensors share memory with the model."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averaged": None if self._averaged is None else torch.from_numpy(self._averaged),
        }

    def restore(self, state: CentreState) -> None:
        """Load the state of a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._averaged is not None and state["averaged"] is not None:
            self._averaged[:] = state["averaged"].numpy()


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise UsageError for an optimizer that cannot train this model in a gang."""
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise UsageError(f"optimizer is {kind}; give one that steps along a gradient, such as SGD(model.parameters())")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise UsageError(
            "the optimizer has none of the model's parameters; construct it with this model's own parameters"
        )
