"""A model's parameters, buffers and gradient as flat vectors of float32, and back.

What travels: the parameters that want gradients, in the order of ``model.parameters()``, and the buffers that training
changes (the floating-point ones, and BatchNorm's count of batches). Where the model is on a GPU the vectors lie in
pinned memory, and a hook on each parameter copies its gradient while the rest of the backward pass goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn

from shadho_celery.errors import UsageError
from shadho_celery.training.strategies import Vector

#: beyond so many parameters the coordinator is the bottleneck by far
MOST_PARAMETERS = 50_000_000


class Tensors:
    """Tensors in a fixed order, as one vector."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        ends = list(accumulate(t.numel() for t in self.tensors))
        self.size = ends[-1] if ends else 0
        self._parts = [slice(end - t.numel(), end) for end, t in zip(ends, self.tensors, strict=True)]

    def views(self, vector: Tensor) -> Iterator[Tensor]:
        """The parts of a vector in the tensors' shapes."""
        for part, tensor in zip(self._parts, self.tensors, strict=True):
            yield vector[part].view(tensor.shape)

    def read(self, out: Vector) -> None:
        """Copy the tensors to a vector."""
        with torch.no_grad():
            for view, tensor in zip(self.views(torch.from_numpy(out)), self.tensors, strict=True):
                view.copy_(tensor)

    def write(self, vector: Vector) -> None:
        """Copy a vector to the tensors."""
        with torch.no_grad():
            for view, tensor in zip(self.views(torch.from_numpy(vector)), self.tensors, strict=True):
                # Counts of batches are whole numbers, and come as means of such.
                tensor.copy_(view if tensor.is_floating_point() else view.round())


class Shape:
    """What of a model travels. Raises UsageError where that is nothing, or complex numbers."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise UsageError("the model has no parameters that want gradients; there is nothing to train")
        for name, parameter in named:
            if not parameter.is_floating_point():
                raise UsageError(f"parameter {name} is {parameter.dtype}; only real floating-point numbers can travel")
        counts = "num_batches_tracked"
        kept = [(n, b) for n, b in model.named_buffers() if b.is_floating_point() or n.rpartition(".")[2] == counts]
        self.parameters = Tensors(p for _, p in named)
        self.buffers = Tensors(b for _, b in kept)
        self.on_gpu = any(p.is_cuda for _, p in named)
        described = [(name, tuple(t.shape), str(t.dtype)) for name, t in [*named, *kept]]
        #: of names, shapes and types; equal for equal models
        self.digest = hashlib.sha256(repr(described).encode()).hexdigest()[:16]

    def has_finite_gradients(self) -> bool:
        """True where every number of the gradients that the parameters have is finite."""
        gradients = (parameter.grad for parameter in self.parameters.tensors if parameter.grad is not None)
        return all(map(_all_finite, gradients))

    def vector(self, size: int | None = None) -> Vector:
        """A vector of zeros, of the parameters' size by default; in pinned memory where that helps."""
        size = self.parameters.size if size is None else size
        vector: Vector = torch.zeros(size, dtype=torch.float32, pin_memory=self.on_gpu).numpy()
        return vector


class Bucket:
    """Gathers the gradient of a model into one vector while it is computed.

    As soon as a parameter's gradient is complete, a hook copies it; on a GPU that copy overlaps the rest of the
    backward pass. `armed` tells the hooks that this is the last micro-batch.
    """

    def __init__(self, shape: Shape) -> None:
        self.vector = shape.vector()
        self.armed = False
        self._parameters = shape.parameters.tensors
        self._views = list(shape.parameters.views(torch.from_numpy(self.vector)))
        self._filled = [False] * len(self._views)
        self._on_gpu = shape.on_gpu
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._copy(place))
            for place, parameter in enumerate(self._parameters)
        ]

    def _copy(self, place: int) -> Callable[[Tensor], None]:
        def copy(parameter: Tensor) -> None:
            if self.armed and parameter.grad is not None:
                self._views[place].copy_(parameter.grad, non_blocking=True)
                self._filled[place] = True

        return copy

    def begin(self) -> None:
        """Begin anew: a gradient that was given up leaves nothing."""
        self.armed = False
        self._filled = [False] * len(self._views)

    def finish(self) -> Vector:
        """Return the whole gradient; a parameter that the last micro-batch did not use has what earlier ones left."""
        for place, (view, parameter) in enumerate(zip(self._views, self._parameters, strict=True)):
            if not self._filled[place]:
                view.copy_(parameter.grad) if parameter.grad is not None else view.zero_()
        if self._on_gpu:
            torch.cuda.synchronize()
        self.begin()
        return self.vector

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()


def is_finite(vector: Vector) -> bool:
    """True where every number is."""
    return _all_finite(torch.from_numpy(vector))


def _all_finite(tensor: Tensor) -> bool:
    """True where every number is; one pass in most cases."""
    # The sum is finite only if all are; where it is not, it may still have overflowed.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
