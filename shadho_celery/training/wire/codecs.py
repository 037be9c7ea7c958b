"""Payloads of PARAMS and GRAD frames, which contain only little-endian numbers.

A replica's vector is sent as float32, or by unbiased quantisation to a few bits per number.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shadho_celery.core.checks import check_whole
from shadho_celery.errors import UsageError
from shadho_celery.training.wire.frames import BrokenFrame, Buffer, Frame, Header
from shadho_celery.training.wire.vectors import Shape, Vector

#: how many numbers share one scale
BLOCK = 256
#: how many blocks are processed at a time, so that their working memory fits a core's cache
PART = 256
#: minimum and maximum bits per number: one for the sign and at least one for the magnitude
MIN_BITS, MAX_BITS = 2, 8

#: start of a GRAD: its loss and its weight
_PREFIX = struct.Struct("<dd")

if sys.byteorder != "little":
    raise UsageError("this machine is big-endian; training across processes needs a little-endian one")


@dataclass(frozen=True)
class Quantize:
    """Stochastic rounding to a sign and 2^(bits-1) - 1 magnitudes, scaled by the maximum of each block of 256 numbers.

    It is unbiased (QSGD, Alistarh et al., arXiv 1610.02132, with the maximum instead of the norm). Zero stays zero. A
    number that is not finite makes its whole block NaN.
    """

    #: bits per number, 2 to 8: one for the sign, the rest for the magnitude
    bits: int = 2

    def __post_init__(self) -> None:
        check_whole(MIN_BITS, MAX_BITS, bits=self.bits)

    @property
    def _block(self) -> np.dtype[np.void]:
        """Type of an encoded block: its scale, and for each bit a plane with that bit of every number."""
        return np.dtype([("scale", "<f4"), ("planes", "u1", (self.bits, BLOCK // 8))])

    def encode(self, vector: Vector, generator: np.random.Generator) -> bytes:
        """Return a vector as bytes. The last block is filled with zeros. `generator` is for the random rounding."""
        top = 2 ** (self.bits - 1) - 1
        encoded = np.empty(-(-vector.size // BLOCK), self._block)
        for part in _parts(len(encoded)):
            numbers = vector[part.start * BLOCK : part.stop * BLOCK]
            blocks = np.zeros((part.stop - part.start, BLOCK), dtype=np.float32)
            blocks.reshape(-1)[: len(numbers)] = numbers
            scales = np.abs(blocks).max(axis=1)
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                blocks *= (np.float32(top) / scales)[:, None]
            # Blocks of zeros, of numbers too small to divide by, and of infinities are not finite now.
            blocks[~np.isfinite(blocks)] = 0.0
            # E floor(y + u) = y for u uniform on [0, 1).
            blocks += generator.random(blocks.shape, dtype=np.float32)
            np.floor(blocks, out=blocks)
            # float32 sometimes rounds top + u up.
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

    PARAMS has parameters, buffers, the loss scale, and the number of each place's batch. GRAD has loss, weight, buffers
    and a vector, encoded if there is a codec.
    """

    def __init__(self, shape: Shape, codec: Quantize | None, places: int) -> None:
        self.size, self.buffers, self.codec = shape.parameters.size, shape.buffers.size, codec
        #: length of a PARAMS vector; the scale and a batch's number take the place of two numbers each
        self.params_size = self.size + self.buffers + 2 * (1 + places)
        vector_bytes = 4 * self.size if codec is None else codec.encoded_bytes(self.size)
        #: length of a GRAD's payload in bytes
        self.grad_bytes = _PREFIX.size + 4 * self.buffers + vector_bytes

    def split(self, params: Vector) -> tuple[Vector, Vector]:
        """Return views of the parameters and of the buffers of a PARAMS vector."""
        return params[: self.size], params[self.size : self.size + self.buffers]

    def set_orders(self, params: Vector, loss_scale: float, numbers: Sequence[int]) -> None:
        """Write the loss scale and the number of each place's batch to a PARAMS vector."""
        orders = params[self.size + self.buffers :]
        orders[:2].view(np.float64)[0] = loss_scale
        orders[2:].view(np.int64)[:] = numbers

    def orders(self, params: Vector, place: int) -> tuple[float, int]:
        """Return the loss scale and the number of a place's batch from a PARAMS vector."""
        orders = params[self.size + self.buffers :]
        return float(orders[:2].view(np.float64)[0]), int(orders[2:].view(np.int64)[place])

    def grad(self, header: Header, loss: float, weight: float, buffers: Vector, vector: Vector, *, seed: int) -> Frame:
        """Return the GRAD frame of a replica's vector. `seed` is for random rounding."""
        sent: Buffer = np.ascontiguousarray(vector, dtype=np.float32).data
        if self.codec is not None:
            sent = self.codec.encode(vector, np.random.default_rng(seed))
        return Frame(header, _PREFIX.pack(loss, weight), buffers.data, sent)

    def read_grad(self, payload: memoryview) -> tuple[float, float, Vector, Vector]:
        """Return the loss, the weight, the buffers and the vector of a GRAD. Raises BrokenFrame if it is not valid.

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
