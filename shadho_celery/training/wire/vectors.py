"""Vectors: conversion of a model's parameters, buffers and gradient to flat float32 vectors and back, their
quantisation, and the payloads of PARAMS and GRAD frames.

The parameters are those that require gradients, in the order of ``model.parameters()``. The buffers are those that
training changes: floating-point buffers, and BatchNorm's count of batches. If the model is on a GPU, a vector is in
pinned host memory, and is copied as a whole from or to flat memory on the GPU. On a CPU, the flat memory is the vector
itself.

Payloads of PARAMS and GRAD frames contain only little-endian numbers.

A replica's vector is sent as float32, or quantised without bias to a few bits per number (`Quantize`).
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shadho_celery.core.checks import check_whole
from shadho_celery.errors import UsageError
from shadho_celery.training.wire.frames import BrokenFrame, Buffer, Frame, Header

#: one-dimensional array with the values of tensors in their order, such as all parameters, or their gradient
Vector = NDArray[np.float32]

#: maximum number of parameters that one coordinator supports well
MAX_PARAMETERS = 50_000_000


class Tensors:
    """Tensors in a fixed order, which are read and written as one vector."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        ends = list(accumulate(t.numel() for t in self.tensors))
        self.size = ends[-1] if ends else 0
        self.parts = [slice(end - t.numel(), end) for end, t in zip(ends, self.tensors, strict=True)]
        #: device of the first tensor, on which flat memory is allocated
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")

    def views(self, vector: Tensor) -> Iterator[Tensor]:
        """Yield for each tensor its part of `vector`, as a view in the shape of the tensor."""
        for part, tensor in zip(self.parts, self.tensors, strict=True):
            yield vector[part].view(tensor.shape)

    def flat(self, host: Tensor) -> Tensor:
        """Return flat memory for a vector: `host` itself on a CPU, else new memory on the device."""
        return host if self.device.type == "cpu" else torch.empty_like(host, device=self.device)

    def on_device(self, vector: Vector) -> Iterator[Tensor]:
        """Copy a vector to the device as a whole. Yield its views as `views` does."""
        host = torch.from_numpy(vector)
        return self.views(self.flat(host).copy_(host))

    def read(self, out: Vector) -> None:
        """Copy the tensors into a vector."""
        self._collect(self.tensors, out)

    def read_gradients(self, out: Vector, loss_scale: float = 1.0) -> None:
        """Copy the tensors' gradients into a vector, divided by `loss_scale`. Missing gradients are zero."""
        self._collect([tensor.grad for tensor in self.tensors], out)
        if loss_scale != 1.0:
            out *= np.float32(1.0 / loss_scale)

    def _collect(self, values: Iterable[Tensor | None], out: Vector) -> None:
        host = torch.from_numpy(out)
        flat = self.flat(host)
        with torch.no_grad():
            for view, value in zip(self.views(flat), values, strict=True):
                view.zero_() if value is None else view.copy_(value)
        host.copy_(flat)

    def write(self, vector: Vector) -> None:
        """Copy a vector into the tensors."""
        with torch.no_grad():
            for view, tensor in zip(self.on_device(vector), self.tensors, strict=True):
                # BatchNorm's count of batches is an integer, but the mean over replicas may not be.
                tensor.copy_(view if tensor.is_floating_point() else view.round())


class Shape:
    """The parameters and buffers of a model that are sent over the network.

    Raises UsageError if no parameter requires gradients, or if such a parameter is not a real floating-point tensor.
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
        #: digest of names, shapes and types, to compare models
        self.digest = hashlib.sha256(repr(described).encode()).hexdigest()[:16]

    def has_finite_gradients(self) -> bool:
        """Return True if every number of the parameters' gradients is finite."""
        gradients = [parameter.grad for parameter in self.parameters.tensors if parameter.grad is not None]
        # This usually waits only once for a GPU: if the sum is finite, all terms are finite.
        total = sum((each.sum().float().to(self.parameters.device) for each in gradients), torch.zeros(()))
        return bool(torch.isfinite(total)) or all(bool(torch.isfinite(each).all()) for each in gradients)

    def divide_gradients(self, by: float) -> None:
        """Divide the parameters' gradients by a number."""
        if by != 1.0:
            for parameter in self.parameters.tensors:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / by)

    def vector(self, size: int | None = None) -> Vector:
        """Return a vector of `size` zeros, by default one for all parameters, in pinned memory if the model is on a
        GPU.
        """
        size = self.parameters.size if size is None else size
        vector: Vector = torch.zeros(size, dtype=torch.float32, pin_memory=self.on_gpu).numpy()
        return vector


def is_finite(vector: Vector) -> bool:
    """Return True if every number is finite."""
    tensor = torch.from_numpy(vector)
    # Usually one pass is enough: if the sum is finite, all terms are. An infinite sum may only be an overflow.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


#: number of values that share one scale
BLOCK = 256
#: number of blocks that are processed at a time, so that the working memory fits the CPU's cache
PART = 256
#: minimum and maximum bits per number: one bit for the sign, and at least one for the magnitude
MIN_BITS, MAX_BITS = 2, 8

#: format of the beginning of a GRAD: loss and weight
_PREFIX = struct.Struct("<dd")

if sys.byteorder != "little":
    raise UsageError("this machine is big-endian; training across processes needs a little-endian one")


@dataclass(frozen=True)
class Quantize:
    """Stochastic rounding to a sign and 2^(bits-1) - 1 magnitudes, scaled by the maximum of each block of 256 numbers.

    It is unbiased (QSGD, Alistarh et al., arXiv 1610.02132, with the maximum instead of the norm). Zero remains zero. A
    number that is not finite makes the numbers of its block not finite.
    """

    #: bits per number, 2 to 8: one for the sign, the others for the magnitude
    bits: int = 2

    def __post_init__(self) -> None:
        check_whole(MIN_BITS, MAX_BITS, bits=self.bits)

    @property
    def _block(self) -> np.dtype[np.void]:
        """Data type of an encoded block: its scale, and for each bit position a plane with that bit of every number."""
        return np.dtype([("scale", "<f4"), ("planes", "u1", (self.bits, BLOCK // 8))])

    def encode(self, vector: Vector, generator: np.random.Generator) -> bytes:
        """Return a vector as bytes. The last block is padded with zeros. `generator` is used for random rounding."""
        top = 2 ** (self.bits - 1) - 1
        encoded = np.empty(-(-vector.size // BLOCK), self._block)
        for part in _parts(len(encoded)):
            numbers = vector[part.start * BLOCK : part.stop * BLOCK]
            blocks = np.zeros((part.stop - part.start, BLOCK), dtype=np.float32)
            blocks.reshape(-1)[: len(numbers)] = numbers
            scales = np.abs(blocks).max(axis=1)
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                blocks *= (np.float32(top) / scales)[:, None]
            # Blocks of zeros, of numbers that are too small to divide by, and with infinities are not finite now.
            blocks[~np.isfinite(blocks)] = 0.0
            # The rounding is unbiased: E floor(y + u) = y for u uniform on [0, 1).
            blocks += generator.random(blocks.shape, dtype=np.float32)
            np.floor(blocks, out=blocks)
            # Clip, because float32 may round top + u up to top + 1.
            codes = (np.clip(blocks, -top, top) + top).astype(np.uint8)
            encoded["scale"][part] = scales
            for bit in range(self.bits):
                encoded["planes"][part, bit] = np.packbits(codes >> bit & 1, axis=1)
        return encoded.tobytes()

    def decode(self, payload: Buffer, out: Vector) -> None:
        """Decode a vector into `out`. Raises ValueError if `payload` is not an encoded vector of that size."""
        if len(payload) != self.encoded_bytes(out.size):
            raise ValueError(f"{len(payload)} bytes are not a quantised vector of {out.size} numbers")
        top = 2 ** (self.bits - 1) - 1
        encoded = np.frombuffer(payload, self._block)
        for part in _parts(len(encoded)):
            codes = np.zeros((part.stop - part.start, BLOCK), dtype=np.uint8)
            for bit in range(self.bits):
                codes |= np.unpackbits(encoded["planes"][part, bit], axis=1) << bit
            numbers = out[part.start * BLOCK : part.stop * BLOCK]
            with np.errstate(invalid="ignore"):
                blocks = (codes.astype(np.float32) - top) * (encoded["scale"][part] / top)[:, None]
            numbers[:] = blocks.reshape(-1)[: len(numbers)]

    def encoded_bytes(self, size: int) -> int:
        """Return the bytes of an encoded vector of `size` numbers."""
        return -(-size // BLOCK) * self._block.itemsize


def _parts(blocks: int) -> Iterator[slice]:
    return (slice(at, min(at + PART, blocks)) for at in range(0, blocks, PART))


class Layout:
    """Layout of a model's payloads.

    PARAMS contains parameters, buffers, the loss scale, and the number of each place's batch. GRAD contains loss,
    weight, buffers and a vector, which is encoded if there is a codec.
    """

    def __init__(self, shape: Shape, codec: Quantize | None, places: int) -> None:
        self.size, self.buffers, self.codec = shape.parameters.size, shape.buffers.size, codec
        #: length of a PARAMS vector; the loss scale, and each batch's number, take 64 bits, as long as two float32
        self.params_size = self.size + self.buffers + 2 * (1 + places)
        vector_bytes = 4 * self.size if codec is None else codec.encoded_bytes(self.size)
        #: bytes of a GRAD's payload
        self.grad_bytes = _PREFIX.size + 4 * self.buffers + vector_bytes

    def split(self, params: Vector) -> tuple[Vector, Vector]:
        """Return a PARAMS vector's parameters and its buffers, as views."""
        return params[: self.size], params[self.size : self.size + self.buffers]

    def set_orders(self, params: Vector, loss_scale: float, numbers: Sequence[int]) -> None:
        """Write the loss scale and the numbers of the places' batches into a PARAMS vector."""
        orders = params[self.size + self.buffers :]
        orders[:2].view(np.float64)[0] = loss_scale
        orders[2:].view(np.int64)[:] = numbers

    def orders(self, params: Vector, place: int) -> tuple[float, int]:
        """Return the loss scale and the number of a place's batch from a PARAMS vector."""
        orders = params[self.size + self.buffers :]
        return float(orders[:2].view(np.float64)[0]), int(orders[2:].view(np.int64)[place])

    def grad(self, header: Header, loss: float, weight: float, buffers: Vector, vector: Vector, *, seed: int) -> Frame:
        """Return the GRAD frame for a replica's vector. `seed` is used for random rounding."""
        sent: Buffer = np.ascontiguousarray(vector, dtype=np.float32).data
        if self.codec is not None:
            sent = self.codec.encode(vector, np.random.default_rng(seed))
        return Frame(header, _PREFIX.pack(loss, weight), buffers.data, sent)

    def read_grad(self, payload: memoryview) -> tuple[float, float, Vector, Vector]:
        """Return the loss, the weight, the buffers and the vector in a GRAD. Raises BrokenFrame if it is not valid.

        The buffers are a view of `payload`, and so is a vector that is not encoded.
        """
        if len(payload) != self.grad_bytes:
            raise BrokenFrame(f"the GRAD has {len(payload)} bytes, but {self.grad_bytes} belong to this model")
        loss, weight = _PREFIX.unpack_from(payload)
        if not 0 <= weight < math.inf:
            raise BrokenFrame(f"the GRAD has the weight {weight}")
        rest = payload[_PREFIX.size :]
        buffers = np.frombuffer(rest[: 4 * self.buffers], dtype=np.float32)
        encoded = rest[4 * self.buffers :]
        if self.codec is None:
            return loss, weight, buffers, np.frombuffer(encoded, dtype=np.float32)
        out = np.empty(self.size, dtype=np.float32)
        try:
            self.codec.decode(encoded, out)
        except ValueError as error:
            raise BrokenFrame(str(error)) from None
        return loss, weight, buffers, out
