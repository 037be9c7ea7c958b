"""The coordinator's model and optimizer, and the moving average of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shadho_celery.errors import UsageError
from shadho_celery.training.strategies import Vector
from shadho_celery.training.vectors import Shape


class ModelCentre:
    """Takes what a strategy's central rule has for the model, and keeps an exponential moving average where asked to.

    The average is over the parameters only: a_t = d a_(t-1) + (1 - d) theta_t.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, average: float | None = None) -> None:
        if average is not None and not 0 <= average < 1:
            raise UsageError(f"ema is {average}: it is the weight of the past, from 0 up to, but not, 1")
        self.model, self.optimizer, self.shape = model, optimizer, Shape(model)
        _check(model, optimizer)
        self.size = self.shape.parameters.size
        #: factor on the learning rate of every group, for the time being
        self.scale = 1.0
        self._decay = average
        self._averaged: Vector | None = None
        self._gradient: Vector | None = None
        if average is not None:
            self._averaged = self.shape.vector()
            self.read(self._averaged)

    @property
    def settings(self) -> str:
        """What a checkpoint must have been made with, to go on from it here."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return f"{type(self.optimizer).__name__} {groups} {self._decay}"

    def descend(self, gradient: Vector) -> None:
        if self._gradient is None:
            self._gradient = self.shape.vector()
        if gradient is not self._gradient:
            self._gradient[:] = gradient
        views = self.shape.parameters.views(torch.from_numpy(self._gradient))
        for parameter, view in zip(self.shape.parameters.tensors, views, strict=True):
            # On a CPU and in float32 this copies nothing.
            parameter.grad = view.to(device=parameter.device, dtype=parameter.dtype)
        self.step()

    def step(self) -> None:
        """One step of the optimizer along the gradients that the parameters have."""
        with self._scaled():
            self.optimizer.step()

    def scratch(self) -> Vector:
        """A vector that `descend` takes without copying it."""
        if self._gradient is None:
            self._gradient = self.shape.vector()
        return self._gradient

    def follow(self) -> None:
        """Take the parameters as they are into the moving average."""
        if self._averaged is not None and self._decay is not None:
            now = self.shape.vector()
            self.read(now)
            torch.from_numpy(self._averaged).lerp_(torch.from_numpy(now), 1 - self._decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the averaged parameters, where there are such; afterwards with its own."""
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

    def settle(self) -> None:
        """Leave the averaged parameters in the model, where there are such."""
        if self._averaged is not None:
            self.write(self._averaged)

    def read(self, out: Vector) -> None:
        self.shape.parameters.read(out)

    def write(self, vector: Vector) -> None:
        self.shape.parameters.write(vector)

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint needs: tensors, numbers and plain containers."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averaged": None if self._averaged is None else torch.from_numpy(self._averaged),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._averaged is not None and state["averaged"] is not None:
            self._averaged[:] = state["averaged"].numpy()

    @contextmanager
    def _scaled(self) -> Iterator[None]:
        if self.scale == 1.0:
            yield
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * self.scale
        try:
            yield
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def _check(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise UsageError for an optimizer that could train nothing here."""
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise UsageError(f"optimizer is {kind}; give one that steps along a gradient, such as SGD(model.parameters())")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise UsageError("the optimizer has none of the model's parameters; make it of this model's own parameters")
