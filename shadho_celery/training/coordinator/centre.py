"""State that the coordinator owns: model and optimizer, the mean of a step's vectors, and the parameters' moving
average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shadho_celery.errors import UsageError
from shadho_celery.training.plan import Plan
from shadho_celery.training.replica.update import LossScale, Update
from shadho_celery.training.wire.vectors import Shape, Vector


class Mean:
    """Mean of one step's vectors and buffers. The result does not depend on the order in which they arrive.

    Floating-point sums depend on the order of their terms, so the vectors are added along a binary tree with a leaf for
    each place. Two siblings are added as soon as both are there, in the memory of one of them. So most of the sum is
    complete before the last vector arrives.
    """

    def __init__(self, vector: Vector, buffers: Vector, places: int) -> None:
        """`take` writes the means to `vector` and `buffers`."""
        self.vector, self.buffers = vector, buffers
        #: places whose vectors were added, in order of arrival
        self.places: list[int] = []
        #: number of leaves of the tree, a power of two; the root is node 1, and the children of n are 2 n and 2 n + 1
        self._leaves = 1 << (places - 1).bit_length()
        #: node -> sum that waits for the sum of its sibling
        self._sums: dict[int, tuple[Vector, Vector]] = {}
        self._losses: list[float] = []
        self._weights: list[float] = []

    def __len__(self) -> int:
        return len(self.places)

    def add(self, place: int, vector: Vector, buffers: Vector, loss: float, weight: float = 1.0) -> None:
        """Add a vector with a weight of at least 0. `vector` and `buffers` may be overwritten until `take` returns."""
        if weight != 1.0:
            vector *= np.float32(weight)
            buffers *= np.float32(weight)
        self._join(self._leaves + place, vector, buffers)
        self.places.append(place)
        self._losses.append(weight * loss)
        self._weights.append(weight)

    def take(self) -> tuple[tuple[int, ...], float]:
        """Write the means, and begin the next step. Return the places whose vectors were added, and the mean loss.

        Raises UsageError if all weights are zero.
        """
        places, total = tuple(self.places), math.fsum(self._weights)
        if not total:
            raise UsageError("the weights of all batches of a step are 0; give a weight= that counts something")
        loss = math.fsum(self._losses) / total
        while len(self._sums) > 1:
            # The sibling of the lowest node in the tree has no vector.
            lowest = max(self._sums)
            self._join(lowest // 2, *self._sums.pop(lowest))
        ((vector, buffers),) = self._sums.values()
        share = np.float32(1.0 / total)
        np.multiply(vector, share, out=self.vector)
        np.multiply(buffers, share, out=self.buffers)
        self.places, self._sums, self._losses, self._weights = [], {}, [], []
        return places, loss

    def _join(self, node: int, vector: Vector, buffers: Vector) -> None:
        """Add the sum of a node to that of its sibling, which gives the sum of their parent. Repeat this while the
        sibling has a sum.
        """
        while (sibling := self._sums.pop(node ^ 1, None)) is not None:
            vector += sibling[0]
            buffers += sibling[1]
            node //= 2
        self._sums[node] = vector, buffers


class ModelCentre:
    """Model and optimizer of a coordinator, with an optional moving average of the parameters.

    The central rule of a strategy changes it. The average is exponential: a_t = d a_(t-1) + (1 - d) theta_t. It does
    not include the model's buffers. `replicas` is N.
    """

    def __init__(self, plan: Plan, replicas: int) -> None:
        if plan.ema is not None and not 0 <= plan.ema < 1:
            raise UsageError(f"ema is {plan.ema}; give the weight of the past, at least 0 and less than 1")
        self.model, self.optimizer, self.shape = plan.model, plan.optimizer, Shape(plan.model)
        rate = float(replicas) if plan.scale_with_replicas else 1.0
        self.update = Update(plan.optimizer, plan.schedule, warmup=plan.warmup, clip=plan.clip, rate=rate)
        _check_optimizer(plan.model, plan.optimizer)
        self.loss_scale = LossScale(plan.scaler)
        self._keep = dict(plan.keep or {})
        for name, kept in self._keep.items():
            if not (hasattr(kept, "state_dict") and hasattr(kept, "load_state_dict")):
                raise UsageError(f"keep[{name!r}] has no state_dict; give objects that have, such as a scheduler")
        parameters = self.shape.parameters
        self.size, self.read, self.write = parameters.size, parameters.read, parameters.write
        #: factor on all learning rates in the current step, below 1 while replicas are missing
        self.scale = 1.0
        self._decay = plan.ema
        self._averaged: Vector | None = None
        if plan.ema is not None:
            self._averaged = self.shape.vector()
            self.read(self._averaged)

    @property
    def settings(self) -> str:
        """The optimizer's settings as text. A checkpoint can be used only if they are equal."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return f"{type(self.optimizer).__name__} {groups} {self._decay} {self.update.settings} {sorted(self._keep)}"

    def descend(self, gradient: Vector) -> None:
        """Take one step of the optimizer along `gradient`."""
        self.set_gradient(gradient)
        self.step()

    def set_gradient(self, gradient: Vector, *, scaled: bool = False) -> None:
        """Write `gradient` to the parameters' gradients.

        With `scaled`, it is multiplied by `scale`, for loops in which the caller steps the optimizer.
        """
        if scaled and self.scale != 1.0:
            gradient = gradient * np.float32(self.scale)
        if gradient is not self.scratch:
            self.scratch[:] = gradient
        views = self.shape.parameters.on_device(self.scratch)
        for parameter, view in zip(self.shape.parameters.tensors, views, strict=True):
            # On a CPU and with float32, this copies nothing.
            parameter.grad = view.to(device=parameter.device, dtype=parameter.dtype)

    def step(self) -> None:
        """Take one step of the optimizer along the parameters' gradients, with learning rates multiplied by `scale`."""
        self.update.apply(self.shape.parameters.tensors, self.scale)

    def end_step(self, loss: float = math.nan) -> None:
        """Advance the schedule and the loss scale by a step. `loss` is the mean loss of the step, if there is one."""
        self.update.advance(loss)
        self.loss_scale.advance()

    @cached_property
    def scratch(self) -> Vector:
        """Vector for gradients. A gradient in this vector is not copied by `descend`."""
        return self.shape.vector()

    def update_average(self) -> None:
        """Update the moving average with the current parameters."""
        if self._averaged is not None and self._decay is not None:
            now = self.shape.vector()
            self.read(now)
            torch.from_numpy(self._averaged).lerp_(torch.from_numpy(now), 1 - self._decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged parameters, if there are any, into the model for the duration of a `with` block."""
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
        """Put the averaged parameters, if any, into the model permanently, and the loss scale into the scaler."""
        self.loss_scale.keep()
        if self._averaged is not None:
            self.write(self._averaged)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: tensors, numbers and plain containers. Its tensors share memory with the
        model.
        """
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averaged": None if self._averaged is None else torch.from_numpy(self._averaged),
            "update": self.update.state(),
            "loss_scale": self.loss_scale.state,
            "kept": {name: kept.state_dict() for name, kept in self._keep.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.update.restore(state["update"])
        self.loss_scale.restore(state["loss_scale"])
        for name, kept in self._keep.items():
            kept.load_state_dict(state["kept"][name])
        if self._averaged is not None and state["averaged"] is not None:
            self._averaged[:] = state["averaged"].numpy()


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise UsageError if the optimizer has none of the model's parameters."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise UsageError(
            "the optimizer has none of the model's parameters; construct it with this model's own parameters"
        )
