"""How a gradient travels: as it is, or quantised without bias to a few bits for each number."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from shadho_celery.errors import UsageError

Vector = NDArray[np.float32]
Payload = bytes | bytearray | memoryview

#: numbers that share one scale
BLOCK = 256
#: numbers that are worked on at a time: what they need fits a core's cache
CHUNK = 256 * BLOCK
#: fewest and most bits of a number: one for the sign and at least one for the magnitude
FEWEST, MOST = 2, 8

#: bits, three bytes left free, numbers
_HEADER = struct.Struct("<B3xI")


class Encoder(Protocol):
    """One replica's end; it may remember what it has sent."""

    def encode(self, vector: Vector, generator: np.random.Generator) -> Payload:
        """Return what is sent for a vector; it may share the vector's memory."""
        ...


class Codec(Protocol):
    """Vector -> bytes -> vector; what arrives equals what was sent in expectation."""

    def encoder(self) -> Encoder:
        """Return a fresh encoder, one for each replica."""
        ...

    def decode(self, payload: Payload, out: Vector) -> None:
        """Write the vector into `out`. Raises ValueError where the payload is not one of a vector of that size."""
        ...

    def most_bytes(self, size: int) -> int:
        """Bytes that a vector of `size` numbers takes at the most: a receiver allows no more."""
        ...


@dataclass(frozen=True)
class Raw:
    """Four bytes a number, as they lie in memory."""

    def encoder(self) -> Raw:
        return self

    def encode(self, vector: Vector, generator: np.random.Generator) -> Payload:
        return np.ascontiguousarray(vector, dtype="<f4").data.cast("B")

    def decode(self, payload: Payload, out: Vector) -> None:
        if len(payload) != 4 * out.size:
            raise ValueError(f"{len(payload)} bytes are no vector of {out.size} numbers")
        out[:] = np.frombuffer(payload, dtype="<f4")

    def most_bytes(self, size: int) -> int:
        return 4 * size


@dataclass(frozen=True)
class Quantize:
    """Stochastic rounding to 2^(bits-1) - 1 magnitudes and a sign, on the scale of the greatest of each 256 numbers.

    Unbiased (QSGD, Alistarh et al., arXiv 1610.02132, with the maximum for the norm); zero stays zero; a number that is
    not finite makes its whole block NaN. With ``"dynamic"`` the number of magnitudes follows the gradient's norm: to
    spend the fewest bits on a given sum of squared errors, every step should have the same error (DQ-SGD, Yan et al.,
    arXiv 2107.14575; their weights for how early a step is are left out, since they need the last step's number). A
    replica's first gradient gets 2 bits, and so does every later one that is no longer.
    """

    #: bits of each number, 2 to 8, or "dynamic"
    bits: int | Literal["dynamic"] = "dynamic"

    def __post_init__(self) -> None:
        if self.bits != "dynamic" and not (isinstance(self.bits, int) and FEWEST <= self.bits <= MOST):
            raise UsageError(f"quantize to {self.bits!r} bits: give {FEWEST} to {MOST}, or 'dynamic'")

    def encoder(self) -> Quantizer:
        return Quantizer(self.bits)

    def decode(self, payload: Payload, out: Vector) -> None:
        bits, size = _HEADER.unpack_from(payload) if len(payload) >= _HEADER.size else (0, 0)
        if size != out.size or not FEWEST <= bits <= MOST or len(payload) != encoded_bytes(size, bits):
            raise ValueError(f"{len(payload)} bytes are no quantised vector of {out.size} numbers")
        top = 2 ** (bits - 1) - 1
        at = _HEADER.size
        for part in _chunks(size):
            n = part.stop - part.start
            scales = np.frombuffer(payload, dtype="<f4", count=_blocks(n), offset=at)
            at += scales.nbytes
            planes = np.frombuffer(payload, dtype=np.uint8, count=bits * _bytes(n), offset=at).reshape(bits, -1)
            at += planes.nbytes
            whole = np.zeros(_blocks(n) * BLOCK, dtype=np.float32)
            whole[:n] = _unpacked(planes, n).astype(np.float32) - top
            with np.errstate(invalid="ignore"):
                out[part] = (whole.reshape(-1, BLOCK) * (scales / top)[:, None]).reshape(-1)[:n]

    def most_bytes(self, size: int) -> int:
        return encoded_bytes(size, MOST if self.bits == "dynamic" else self.bits)


class Quantizer:
    """The encoder of `Quantize`: remembers the norm of the first gradient that was not zero."""

    def __init__(self, bits: int | Literal["dynamic"]) -> None:
        self._bits = bits
        self._first = 0.0

    def bits_for(self, vector: Vector) -> int:
        """Bits that this vector is worth."""
        if self._bits != "dynamic":
            return self._bits
        norm = float(np.linalg.norm(vector))
        if not math.isfinite(norm):
            return FEWEST
        self._first = self._first or norm
        return bits_by_norm(norm / self._first) if self._first else FEWEST

    def encode(self, vector: Vector, generator: np.random.Generator) -> Payload:
        bits = self.bits_for(vector)
        top = 2 ** (bits - 1) - 1
        parts = [_HEADER.pack(bits, vector.size)]
        for part in _chunks(vector.size):
            n = part.stop - part.start
            whole = np.zeros(_blocks(n) * BLOCK, dtype=np.float32)
            whole[:n] = vector[part]
            blocks = whole.reshape(-1, BLOCK)
            scales = np.abs(blocks).max(axis=1)
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                blocks *= (np.float32(top) / scales)[:, None]
            # Blocks of zeros, of numbers too small to divide by, and of what is not finite.
            blocks[~np.isfinite(blocks)] = 0.0
            # E floor(y + u) = y for u uniform on [0, 1).
            blocks += generator.random(blocks.shape, dtype=np.float32)
            np.floor(blocks, out=blocks)
            # float32 rounds top + u up now and then.
            codes = (np.clip(blocks, -top, top) + top).astype(np.uint8).reshape(-1)[:n]
            parts += [scales.astype("<f4").tobytes(), _packed(codes, bits)]
        return b"".join(parts)


def bits_by_norm(ratio: float) -> int:
    """Bits for a gradient whose norm is `ratio` times the first one's: as many magnitudes, where the first one has one.

    The error of n magnitudes is in proportion to norm / n, so this keeps it what it was at the first step.
    """
    # A tiny slack: norms of float32 are not exact, and a ratio of 1 must not round up.
    return min(MOST, max(FEWEST, 1 + math.ceil(math.log2(1 + ratio) - 1e-6)))


def encoded_bytes(size: int, bits: int) -> int:
    """Bytes of a quantised vector: a header, and for each chunk its scales and one plane for each bit."""
    chunks, rest = divmod(size, CHUNK)
    return _HEADER.size + sum(
        count * (4 * _blocks(n) + bits * _bytes(n)) for count, n in ((chunks, CHUNK), (1, rest)) if n
    )


def _chunks(size: int) -> Iterator[slice]:
    return (slice(at, min(at + CHUNK, size)) for at in range(0, size, CHUNK))


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def _bytes(n: int) -> int:
    return -(-n // 8)


def _packed(codes: NDArray[np.uint8], bits: int) -> bytes:
    """The codes as one plane of n/8 bytes for each bit: any number of bits packs alike."""
    return np.packbits((codes[None, :] >> np.arange(bits, dtype=np.uint8)[:, None]) & 1, axis=1).tobytes()


def _unpacked(planes: NDArray[np.uint8], n: int) -> NDArray[np.uint8]:
    codes = np.zeros(n, dtype=np.uint8)
    for bit, plane in enumerate(planes):
        codes |= np.unpackbits(plane, count=n) << np.uint8(bit)
    return codes
