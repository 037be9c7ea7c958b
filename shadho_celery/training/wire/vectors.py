"""Conversion of a model's parameters, buffers and gradient to flat float32 vectors, and back.

It converts the parameters that require gradients, in the order of ``model.parameters()``, and the buffers that training
changes: floating-point buffers, and BatchNorm's count of batches. For a model on a GPU the vectors are in pinned
memory. A hook on each parameter copies its gradient while the backward pass continues.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from shadho_celery.errors import UsageError
from shadho_celery.training.strategies import Vector

#: number of parameters that one coordinator supports well; with more, it is by far the bottleneck
MAX_PARAMETERS = 50_000_000


class Tensors:
    """Tensors in a fixed order, read and written as one vector."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        ends = list(accumulate(t.numel() for t in self.tensors))
        self.size = ends[-1] if ends else 0
        self._parts = [slice(end - t.numel(), end) for end, t in zip(ends, self.tensors, strict=True)]

    def views(self, vector: Tensor) -> Iterator[Tensor]:
        """Yield a view of `vector` for each tensor, in the shape of that tensor."""
        for part, tensor in zip(self._parts, self.tensors, strict=True):
            yield vector[part].view(tensor.shape)

    def read(self, out: Vector) -> None:
        """Copy the tensors into a vector."""
        with torch.no_grad():
            for view, tensor in zip(self.views(torch.from_numpy(out)), self.tensors, strict=True):
                view.copy_(tensor)

    def write(self, vector: Vector) -> None:
        """Copy a vector into the tensors."""
        with torch.no_grad():
            for view, tensor in zip(self.views(torch.from_numpy(vector)), self.tensors, strict=True):
                # Counts of batches are integers, but their mean may not be one.
                tensor.copy_(view if tensor.is_floating_point() else view.round())


class Shape:
    """The parameters and buffers of a model that are sent.

    Raises UsageError if no parameter requires gradients, or if one that does is not a real floating-point tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise UsageError("the model has no parameters that require gradients; there is nothing to train")
        for name, parameter in named:
            if not parameter.is_floating_point():
                raise UsageError(
                    f"parameter {name} is {parameter.dtype}; a gang trains real floating-point numbers only"
                )
        counts = "num_batches_tracked"
        kept = [(n, b) for n, b in model.named_buffers() if b.is_floating_point() or n.rpartition(".")[2] == counts]
        self.parameters = Tensors(p for _, p in named)
        self.buffers = Tensors(b for _, b in kept)
        self.on_gpu = any(p.is_cuda for _, p in named)
        described = [(name, tuple(t.shape), str(t.dtype)) for name, t in [*named, *kept]]
        #: digest of names, shapes and types; equal for equal models
        self.digest = hashlib.sha256(repr(described).encode()).hexdigest()[:16]

    def has_finite_gradients(self) -> bool:
        """Return True if every number of the parameters' gradients is finite."""
        gradients = (parameter.grad for parameter in self.parameters.tensors if parameter.grad is not None)
        return all(map(_all_finite, gradients))

    def divide_gradients(self, by: float) -> None:
        """Divide the parameters' gradients by a number."""
        if by != 1.0:
            for parameter in self.parameters.tensors:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / by)

    def vector(self, size: int | None = None) -> Vector:
        """Return a vector of `size` zeros, by default as long as the parameters. It is pinned for a model on a GPU."""
        size = self.parameters.size if size is None else size
        vector: Vector = torch.zeros(size, dtype=torch.float32, pin_memory=self.on_gpu).numpy()
        return vector


class Bucket:
    """Vector that collects a model's gradient while it is computed.

    A hook copies the gradient of each parameter as soon as it is complete. On a GPU the copy overlaps the rest of the
    backward pass.
    """

    def __init__(self, shape: Shape) -> None:
        self.vector = shape.vector()
        #: True during the last micro-batch, because the hooks copy only then
        self.armed = False
        self._parameters = shape.parameters.tensors
        self._views = list(shape.parameters.views(torch.from_numpy(self.vector)))
        self._filled = [False] * len(self._views)
        self._on_gpu = shape.on_gpu
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._copy, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def _copy(self, index: int, parameter: Tensor) -> None:
        if self.armed and parameter.grad is not None:
            self._views[index].copy_(parameter.grad, non_blocking=True)
            self._filled[index] = True

    def begin(self) -> None:
        """Begin a new gradient, and discard the parts of an abandoned one."""
        self.armed = False
        self._filled = [False] * len(self._views)

    def finish(self) -> Vector:
        """Return the whole gradient, including parameters that only earlier micro-batches used."""
        for index, (view, parameter) in enumerate(zip(self._views, self._parameters, strict=True)):
            if not self._filled[index]:
                view.copy_(parameter.grad) if parameter.grad is not None else view.zero_()
        if self._on_gpu:
            torch.cuda.synchronize()
        self.begin()
        return self.vector

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()


def is_finite(vector: Vector) -> bool:
    """Return True if every number is finite."""
    return _all_finite(torch.from_numpy(vector))


def _all_finite(tensor: Tensor) -> bool:
    # One pass in most cases: if the sum is finite, all terms are. An infinite sum may be an overflow.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
