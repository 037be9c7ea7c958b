"""What stands in PARAMS and GRAD: vectors as they lie in memory, little-endian, nothing else."""

from __future__ import annotations

import struct
import sys
import threading

import numpy as np

from shadho_celery.errors import UsageError
from shadho_celery.training.codecs import Codec, Raw
from shadho_celery.training.frames import BrokenFrame, Frame, Header, Kind
from shadho_celery.training.strategies import Vector
from shadho_celery.training.vectors import Shape

#: loss; eight bytes left free, so that the numbers behind it are aligned
_PREFIX = struct.Struct("<d8x")

if sys.byteorder != "little":
    raise UsageError("training across processes needs a little-endian machine")


class Layout:
    """Lengths of a model's payloads: PARAMS is parameters, buffers; GRAD is loss, buffers, an encoded vector."""

    def __init__(self, shape: Shape, codec: Codec) -> None:
        self.size, self.buffers, self.codec = shape.parameters.size, shape.buffers.size, codec
        self.params_bytes = 4 * (self.size + self.buffers)
        self.most_grad_bytes = _PREFIX.size + 4 * self.buffers + codec.most_bytes(self.size)

    def split(self, params: Vector) -> tuple[Vector, Vector]:
        """Parameters and buffers of a PARAMS vector."""
        return params[: self.size], params[self.size :]

    def grad(self, header: Header, loss: float, buffers: Vector, encoded: bytes | bytearray | memoryview) -> Frame:
        """The frame of a replica's vector."""
        return Frame(header, _PREFIX.pack(loss), buffers.data, encoded)

    def read_grad(self, payload: memoryview, out: Vector) -> tuple[float, Vector, Vector]:
        """Loss, buffers, and the vector: decoded to `out`, or a view of the payload. Raises BrokenFrame."""
        if len(payload) < _PREFIX.size + 4 * self.buffers:
            raise BrokenFrame("a GRAD too short for its buffers")
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
    """The parameters of one step, for as long as somebody is being sent them."""

    def __init__(self, layout: Layout) -> None:
        self.vector: Vector = np.zeros(layout.size + layout.buffers, dtype=np.float32)
        self.users = 0
        self.frame: Frame | None = None


class Snapshots:
    """Lends snapshots out again when nobody uses them: a fresh 100 MB for each step would cost more than the copy."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._all: list[Snapshot] = []

    def take(self) -> Snapshot:
        """One to write to; it has one user, the caller."""
        with self._lock:
            free = next((each for each in self._all if not each.users), None)
            if free is None:
                free = Snapshot(self._layout)
                self._all.append(free)
            free.users = 1
            return free

    def use(self, snapshot: Snapshot) -> None:
        with self._lock:
            snapshot.users += 1

    def release(self, snapshot: Snapshot) -> None:
        with self._lock:
            snapshot.users -= 1

    def frame(self, snapshot: Snapshot, epoch: int, step: int) -> Frame:
        """The frame that sends it; summed up once for all."""
        header = Header(kind=Kind.PARAMS, epoch=epoch, step=step)
        return Frame(header, snapshot.vector.data).summed()
