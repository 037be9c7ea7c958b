"""Conversion of a model's parameters, buffers and gradient to flat float32 vectors, and back.

It converts the parameters that require gradients, in the order of ``model.parameters()``, and the buffers that training
changes: floating-point buffers, and BatchNorm's count of batches. For a model on a GPU the vectors are in pinned
memory, and are copied as a whole between it and flat memory on the GPU. A gradient is copied in pieces, on a stream of
its own, while the backward pass continues. On a CPU the flat memory is the vector itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shadho_celery.errors import UsageError

#: one-dimensional: the model's parameters, or their gradient, in the order of ``model.parameters()``
Vector = NDArray[np.float32]

#: number of parameters that one coordinator supports well; with more, it is by far the bottleneck
MAX_PARAMETERS = 50_000_000
#: minimum number of a gradient's numbers that are copied from a GPU at a time
PIECE = 1 << 20


class Tensors:
    """Tensors in a fixed order, read and written as one vector."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        ends = list(accumulate(t.numel() for t in self.tensors))
        self.size = ends[-1] if ends else 0
        self.parts = [slice(end - t.numel(), end) for end, t in zip(ends, self.tensors, strict=True)]
        #: device of the first tensor, on which flat memory is
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")

    def views(self, vector: Tensor) -> Iterator[Tensor]:
        """Yield a view of `vector` for each tensor, in the shape of that tensor."""
        for part, tensor in zip(self.parts, self.tensors, strict=True):
            yield vector[part].view(tensor.shape)

    def flat(self, host: Tensor) -> Tensor:
        """Return flat memory for a vector: on a CPU `host` itself, else new memory on the device."""
        return host if self.device.type == "cpu" else torch.empty_like(host, device=self.device)

    def on_device(self, vector: Vector) -> Iterator[Tensor]:
        """Copy a vector to the device as a whole. Yield the view for each tensor."""
        host = torch.from_numpy(vector)
        return self.views(self.flat(host).copy_(host))

    def read(self, out: Vector) -> None:
        """Copy the tensors into a vector."""
        host = torch.from_numpy(out)
        flat = self.flat(host)
        with torch.no_grad():
            for view, tensor in zip(self.views(flat), self.tensors, strict=True):
                view.copy_(tensor)
        host.copy_(flat)

    def write(self, vector: Vector) -> None:
        """Copy a vector into the tensors."""
        with torch.no_grad():
            for view, tensor in zip(self.on_device(vector), self.tensors, strict=True):
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
        gradients = [parameter.grad for parameter in self.parameters.tensors if parameter.grad is not None]
        # A GPU is waited for once in most cases: if the sum is finite, all terms are.
        total = sum((each.sum().float().to(self.parameters.device) for each in gradients), torch.zeros(()))
        return bool(torch.isfinite(total)) or all(bool(torch.isfinite(each).all()) for each in gradients)

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

    A hook copies the gradient of each parameter to flat memory as soon as it is complete. From a GPU, each complete
    piece of it is copied to the vector on a second stream, which overlaps the rest of the backward pass.
    """

    def __init__(self, shape: Shape) -> None:
        self.vector = shape.vector()
        #: True during the last micro-batch, because the hooks copy only then
        self.armed = False
        parameters = shape.parameters
        self._parameters, self._host = parameters.tensors, torch.from_numpy(self.vector)
        self._flat = parameters.flat(self._host)
        self._views = list(parameters.views(self._flat))
        self._stream = torch.cuda.Stream(parameters.device) if shape.on_gpu else None
        self._pieces, self._piece_of = _pieces(parameters.parts)
        self.begin()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._collect, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def begin(self) -> None:
        """Begin a new gradient, and discard the parts of an abandoned one."""
        self.armed = False
        #: parameters whose gradients are missing, by piece
        self._missing: list[set[int]] = [set() for _ in self._pieces]
        for index, piece in enumerate(self._piece_of):
            self._missing[piece].add(index)

    def _collect(self, index: int, parameter: Tensor) -> None:
        if self.armed and parameter.grad is not None:
            self._views[index].copy_(parameter.grad)
            piece = self._piece_of[index]
            self._missing[piece].discard(index)
            if not self._missing[piece]:
                # Again if the gradient of a parameter is completed twice, as in a checkpointed segment.
                self._send(self._pieces[piece])

    def _send(self, part: slice) -> None:
        """Copy a part of the flat memory to the vector after all that is queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._flat.device))
            with torch.cuda.stream(self._stream):
                self._host[part].copy_(self._flat[part], non_blocking=True)

    def finish(self, loss_scale: float = 1.0) -> Vector:
        """Return the whole gradient, divided by `loss_scale`, with parameters that only earlier micro-batches used."""
        for piece, missing in zip(self._pieces, self._missing, strict=True):
            for index in missing:
                gradient = self._parameters[index].grad
                self._views[index].zero_() if gradient is None else self._views[index].copy_(gradient)
            if missing:
                self._send(piece)
        if self._stream is not None:
            self._stream.synchronize()
        self.begin()
        if loss_scale != 1.0:
            self.vector *= np.float32(1.0 / loss_scale)
        return self.vector

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()


def _pieces(parts: Sequence[slice]) -> tuple[list[slice], list[int]]:
    """Return the parts of a vector that are copied together, and for each parameter the number of its piece."""
    pieces: list[slice] = []
    piece_of = []
    for part in parts:
        if not pieces or pieces[-1].stop - pieces[-1].start >= PIECE:
            pieces.append(part)
        pieces[-1] = slice(pieces[-1].start, part.stop)
        piece_of.append(len(pieces) - 1)
    return pieces, piece_of


def is_finite(vector: Vector) -> bool:
    """Return True if every number is finite."""
    tensor = torch.from_numpy(vector)
    # One pass in most cases: if the sum is finite, all terms are. An infinite sum may be an overflow.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
