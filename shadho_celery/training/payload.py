"""Payloads of PARAMS and GRAD: little-endian vectors as they lie in memory, and nothing else."""

from __future__ import annotations

import struct
import sys
import threading

import numpy as np

from shadho_celery.errors import UsageError
from shadho_celery.training.codecs import Codec, Raw
from shadho_celery.training.frames import BrokenFrame, Buffer, Frame, Header, Kind
from shadho_celery.training.strategies import Vector
from shadho_celery.training.vectors import Shape

#: loss; eight unused bytes align the numbers after it
_PREFIX = struct.Struct("<d8x")

if sys.byteorder != "little":
    raise UsageError("this machine is big-endian; training across processes needs a little-endian one")


class Layout:
    """Layout of a model's payloads: PARAMS is parameters, buffers; GRAD is loss, buffers, encoded vector."""

    def __init__(self, shape: Shape, codec: Codec) -> None:
        self.size, self.buffers, self.codec = shape.parameters.size, shape.buffers.size, codec
        self.max_grad_bytes = _PREFIX.size + 4 * self.buffers + codec.max_bytes(self.size)

    def split(self, params: Vector) -> tuple[Vector, Vector]:
        """Return views of the parameters and of the buffers of a PARAMS vector."""
        return params[: self.size], params[self.size :]

    def grad(self, header: Header, loss: float, buffers: Vector, encoded: Buffer) -> Frame:
        """Return the frame of a replica's encoded vector."""
        return Frame(header, _PREFIX.pack(loss), buffers.data, encoded)

    def read_grad(self, payload: memoryview, out: Vector) -> tuple[float, Vector, Vector]:
        """Return loss, buffers and vector. The vector is decoded into `out`, or is a view of `payload`. Raises
        BrokenFrame.
        """
        if len(payload) < _PREFIX.size + 4 * self.buffers:
            raise BrokenFrame("the GRAD is too short for its buffers")
        (loss,) = _PREFIX.unpack_from(payload)
        rest = payload[_PREFIX.size :]
        buffers = np.frombuffer(rest[: 4 * self.buffers], dtype=np.float32)
        encoded = rest[4 * self.buffers :]
        if isinstance(self.codec, Raw) and len(encoded) == 4 * self.size:
            return loss, buffers, np.frombuffer(encoded, dtype=np.float32)
        try:
            self.codec.decode(encoded, out)
        except ValueError as error:
            raise BrokenFrame(str(error)) from None
        return loss, buffers, out


class Snapshot:
    """Copy of one step's parameters, kept while it is being sent to any replica."""

    def __init__(self, layout: Layout) -> None:
        #: parameters, then buffers
        self.vector: Vector = np.zeros(layout.size + layout.buffers, dtype=np.float32)
        #: reference count; at 0 the snapshot may be written again
        self.users = 0
        self.frame: Frame | None = None


class SnapshotPool:
    """Pool of snapshots with reference counts: allocating 100 MB for each step would cost more than the copy."""

    def __init__(self, layout: Layout, *, encrypted: bool = False) -> None:
        """`encrypted` says that the frames are sent encrypted and need no checksum."""
        self._layout, self._encrypted = layout, encrypted
        self._lock = threading.Lock()
        self._all: list[Snapshot] = []

    def take(self) -> Snapshot:
        """Return a snapshot to write to, with the caller as its only user."""
        with self._lock:
            free = next((each for each in self._all if not each.users), None)
            if free is None:
                free = Snapshot(self._layout)
                self._all.append(free)
            free.users = 1
            return free

    def use(self, snapshot: Snapshot) -> None:
        """Add a user."""
        with self._lock:
            snapshot.users += 1

    def release(self, snapshot: Snapshot) -> None:
        """Remove a user."""
        with self._lock:
            snapshot.users -= 1

    def frame(self, snapshot: Snapshot, epoch: int, step: int) -> Frame:
        """Return the frame that sends a snapshot. Its checksum is computed once for all replicas."""
        header = Header(kind=Kind.PARAMS, epoch=epoch, step=step)
        frame = Frame(header, snapshot.vector.data)
        return frame if self._encrypted else frame.checksummed()
