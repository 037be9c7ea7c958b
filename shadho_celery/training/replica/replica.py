"""Replica of a gang: it runs the strategy's local rule on its own copy of the model until the training ends.

`Client` is its end of the connection: it connects to the coordinator, reconnects, and keeps the newest parameters.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.training.replica.batches import Computer, mixed
from shadho_celery.training.replica.update import Update
from shadho_celery.training.strategies import Gradient, Strategy
from shadho_celery.training.wire.frames import BrokenFrame, Frame, Header, Kind, Large, Wire, control_frame
from shadho_celery.training.wire.handshake import HANDSHAKE_SECONDS, Hello, Quit, Refused, TrainingOver, say_hello
from shadho_celery.training.wire.vectors import Layout, Quantize, Shape, Vector

logger = logging.getLogger(__name__)

#: seconds between two checks whether the trial was stopped
TICK = 0.25
#: seconds between two attempts to connect: the first pause, and the longest
BACKOFF = (0.05, 2.0)
#: seconds for which a replica tries to connect to its coordinator; and seconds after which a silent coordinator counts
#: as lost
RECONNECT_SECONDS, DEADLINE_SECONDS = 60.0, 30.0
#: minimum seconds between the starts of two connections, because the cause that ended the first may persist
MIN_CONNECT_INTERVAL = 2.0
#: maximum seconds to wait for the end of a closed connection's thread
LEAVE_SECONDS = 1.0


class ConnectionLost(Exception):
    """The connection ended without a QUIT. The replica reconnects, because the coordinator may be started again."""


class Client:
    """One replica's connection, and the parameters received over it.

    There are two buffers: one is being filled, the other one has the newest complete parameters, which can be read.
    """

    def __init__(
        self,
        seat: ReplicaSeat,
        digest: str,
        params: tuple[Vector, Vector],
        *,
        stop: Callable[[], bool],
        encrypted: bool = False,
    ) -> None:
        self._seat, self._stop = seat, stop
        self._hello = Hello(rank=seat.rank, digest=digest, encrypted=encrypted)
        host, _, port = seat.address.rpartition(":")
        self._address = (host, int(port))
        self._front, self._back = params
        self._changed = threading.Condition()
        self._step = -1
        #: newest step that the coordinator has announced; -1 before the first announcement
        self.newest = -1
        self._ended: Exception | None = None
        self._wire: Wire | None = None
        self._connected_at = -math.inf
        self._thread: threading.Thread | None = None
        #: epoch of the coordinator; 0 before the first connection
        self.epoch = 0

    def connect(self) -> int:
        """Connect to the coordinator, trying again with increasing pauses. Return this replica's place.

        Raises Refused, TrainingOver, or ShadhoError if there is no connection within RECONNECT_SECONDS.
        """
        self.close()
        self.pause(self._connected_at + MIN_CONNECT_INTERVAL - time.monotonic(), self._raise_if_stopped)
        until, pause = time.monotonic() + RECONNECT_SECONDS, BACKOFF[0]
        while True:
            try:
                return self._connect_once()
            except (OSError, EOFError, ConnectionLost) as error:
                if time.monotonic() + pause > until:
                    raise ShadhoError(
                        f"the coordinator at {self._seat.address} was not found for {RECONNECT_SECONDS:g} s "
                        f"({error}); check that its trial still runs and that the port is open"
                    ) from error
            self.pause(pause, self._raise_if_stopped)
            pause = min(2 * pause, BACKOFF[1])

    def _connect_once(self) -> int:
        connection = socket.create_connection(self._address, timeout=HANDSHAKE_SECONDS)
        try:
            wire = Wire(connection)
            epoch, place = say_hello(wire, self._seat.token, self._hello)
            if epoch < self.epoch:
                raise ConnectionLost(f"a coordinator of epoch {epoch} answered, after one of epoch {self.epoch}")
            # The coordinator sends heartbeats, so silence means that it is lost.
            wire.limit_silence(DEADLINE_SECONDS)
        except BaseException:
            connection.close()
            raise
        self.epoch, self._wire, self._connected_at = epoch, wire, time.monotonic()
        self._step, self.newest, self._ended = -1, -1, None
        self._thread = threading.Thread(target=self._read, args=(wire,), name="gang-client", daemon=True)
        self._thread.start()
        return place

    def _raise_if_stopped(self) -> None:
        if self._stop():
            raise TrainingOver("the trial was stopped")

    def raise_if_ended(self) -> None:
        """Raise the exception that ended this connection: TrainingOver, Refused or ConnectionLost."""
        self._raise_if_stopped()
        if self._ended is not None:
            raise self._ended

    def wait(self, after: int) -> int:
        """Block until parameters of a later step than `after` are complete. Return their step."""
        with self._changed:
            while True:
                self.raise_if_ended()
                if self._step > after:
                    return self._step
                self._changed.wait(TICK)

    def pause(self, seconds: float, abandon: Callable[[], object]) -> bool:
        """Wait for `seconds`. `abandon` is called at every new step, and regularly; return True if it returns True."""
        until = time.monotonic() + seconds
        with self._changed:
            while (left := until - time.monotonic()) > 0:
                if abandon():
                    return True
                self._changed.wait(min(TICK, left))
        return False

    def read_params(self, reader: Callable[[Vector], None]) -> int:
        """Call `reader` with the newest parameters and buffers. Return their step."""
        with self._changed:
            reader(self._front)
            return self._step

    def send(self, frame: Frame) -> None:
        """Send a frame. Raises TrainingOver, Refused or ConnectionLost."""
        self.raise_if_ended()
        try:
            assert self._wire is not None
            self._wire.send(frame)
        except OSError as error:
            # If the coordinator has sent a QUIT, the reading thread has received it or soon will.
            with self._changed:
                self._changed.wait_for(lambda: self._ended is not None, timeout=TICK)
            self.raise_if_ended()
            raise ConnectionLost(str(error)) from None

    def send_quit(self, reason: str, *, error: bool = False) -> None:
        """If the replica is connected, tell the coordinator why the replica ends. With `error`, the whole gang ends."""
        if self._wire is not None and self._ended is None:
            with suppress(OSError):
                self._wire.send(Quit(reason=reason, error=error).frame())
                self._wire.finish()

    def close(self) -> None:
        """End the connection and its thread. A worker does not reuse a process with running threads."""
        if self._wire is not None:
            self._wire.close()
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)

    def _read(self, wire: Wire) -> None:
        params = Large(Kind.PARAMS, self._back.nbytes, self._buffer_for)
        pong = wire.heartbeat = control_frame(Kind.PING)
        try:
            while True:
                header, payload = wire.receive(Kind.STEP, Kind.PING, Kind.QUIT, large=params)
                if header.kind is Kind.QUIT:
                    raise Quit.read(payload).exception()
                if header.kind is Kind.PING:
                    # If another thread is sending, no answer is needed, because any frame is a sign of life.
                    wire.send(pong, wait=False)
                elif header.kind is Kind.PARAMS:
                    with self._changed:
                        self._front, self._back = self._back, self._front
                        self._step = header.step
                        self._changed.notify_all()
                else:
                    self._announce(header.step)
        except (OSError, EOFError) as error:
            self._end(wire, ConnectionLost(str(error)))
        except (TrainingOver, Refused) as error:
            self._end(wire, error)

    def _buffer_for(self, header: Header) -> memoryview:
        if header.length != self._back.nbytes or header.epoch != self.epoch:
            raise BrokenFrame("PARAMS of another model or epoch")
        self._announce(header.step)
        return self._back.data.cast("B")

    def _announce(self, step: int) -> None:
        with self._changed:
            self.newest = max(self.newest, step)
            self._changed.notify_all()

    def _end(self, wire: Wire, error: Exception) -> None:
        with self._changed:
            if wire is self._wire and self._ended is None:
                self._ended = error
                self._changed.notify_all()
        wire.close()


logger = logging.getLogger(__name__)

#: (place, draw) -> minimum seconds of a gradient, to simulate slow machines
Delay = Callable[[int, int], float]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, data and settings that a replica works with. They are the same in the whole gang."""

    #: model, batches and loss
    computer: Computer
    #: the replica's optimizer, with schedule and clipping; used by strategies with local steps
    update: Update
    strategy: Strategy
    codec: Quantize | None
    #: digest of model, batches and settings, which must equal the coordinator's digest
    digest: str
    #: True if the replica's connection is encrypted
    encrypted: bool = False
    #: returns the minimum seconds of a gradient, to simulate slow machines; None for no minimum
    delay: Delay | None = None


def serve(seat: ReplicaSeat, workload: Workload, stop: Callable[[], bool] = lambda: False) -> None:
    """Act as a replica until the training ends. Raises Refused if the coordinator does not admit this replica."""
    computer = workload.computer
    shape = Shape(computer.model)
    layout = Layout(shape, workload.codec, computer.batches.places)
    client = Client(
        seat,
        workload.digest,
        (shape.vector(layout.params_size), shape.vector(layout.params_size)),
        stop=stop,
        encrypted=workload.encrypted,
    )
    try:
        while True:
            place = client.connect()
            replica = ConnectedReplica(workload, shape, layout=layout, client=client, place=place)
            computer.batches.load_ahead(place)
            try:
                workload.strategy.train(replica)
            except ConnectionLost as error:
                logger.warning("replica %d lost its coordinator (%s) and reconnects", seat.rank, error)
            finally:
                computer.batches.close()
    except TrainingOver as over:
        logger.info("replica %d ends: %s", seat.rank, over)
    except Exception as error:
        # Send the reason to the coordinator, because users see the coordinator's error and not this one. UsageError
        # ends the gang, because it would end every other replica too.
        reason = f"{computer.blame(error)}{type(error).__name__}: {error}"
        client.send_quit(reason, error=isinstance(error, UsageError))
        raise
    finally:
        client.close()


class ConnectedReplica:
    """Implementation of `Replica` for one connection."""

    def __init__(
        self,
        workload: Workload,
        shape: Shape,
        *,
        layout: Layout,
        client: Client,
        place: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size, self.place = layout.size, place
        self._workload, self._shape, self._layout = workload, shape, layout
        self._client, self._now = client, now
        self.wait, self.read, self.write = client.wait, shape.parameters.read, shape.parameters.write
        self._computer, self._batches, self._update = workload.computer, workload.computer.batches, workload.update
        #: step of the newest parameters that the strategy has read
        self._step = 0
        #: loss scale, and number of this place's batch, which came with these parameters
        self._orders = 1.0, 0
        self._buffers = shape.vector(layout.buffers)
        self._gradient = shape.vector()

    def newest(self) -> int:
        return self._client.newest

    def received(self, out: Vector) -> int:
        self._step = self._client.read_params(lambda params: np.copyto(out, params[: self.size]))
        return self._step

    def load(self) -> int:
        def write(params: Vector) -> None:
            parameters, buffers = self._layout.split(params)
            self._shape.parameters.write(parameters)
            self._shape.buffers.write(buffers)
            self._orders = self._layout.orders(params, self.place)

        self._step = self._client.read_params(write)
        return self._step

    def gradient(self, draw: int, abandon: Callable[[], bool] | None = None) -> Gradient | None:
        scale, number = self._orders
        result = self._backward(*divmod(number, self._batches.places), draw, abandon, scale)
        if result is None:
            return None
        loss, weight = result
        self._shape.parameters.read_gradients(self._gradient, scale)
        return Gradient(vector=self._gradient, loss=loss, weight=weight)

    def descend(self, draw: int) -> float:
        self._shape.buffers.read(self._buffers)
        result = self._backward(draw, self.place, draw, None)
        assert result is not None
        loss, _ = result
        self._update.go_to(self._step)
        if math.isfinite(loss) and self._shape.has_finite_gradients():
            self._update.apply(self._shape.parameters.tensors)
        else:
            # Skip the step: a gradient that is not finite would make the parameters and the momentum not finite for
            # ever.
            self._shape.buffers.write(self._buffers)
        return loss

    def send(self, step: int, vector: Vector, loss: float, weight: float = 1.0) -> None:
        self._shape.buffers.read(self._buffers)
        header = Header(kind=Kind.GRAD, epoch=self._client.epoch, step=step)
        # The seed makes the rounding the same again after a restart.
        seed = mixed(self._batches.seed, self.place, step, 2)
        self._client.send(self._layout.grad(header, loss, weight, self._buffers, vector, seed=seed))

    def _backward(
        self, step: int, place: int, draw: int, abandon: Callable[[], bool] | None, loss_scale: float = 1.0
    ) -> tuple[float, float] | None:
        """Compute the gradient of batch (step, place). Then wait for the rest of the simulated delay of `draw`."""

        def abandoned() -> bool:
            self._client.raise_if_ended()
            return abandon is not None and abandon()

        began = self._now()
        result = self._computer.backward(step, place, abandoned, loss_scale=loss_scale)
        if result is None or self._workload.delay is None:
            return result
        # The time that the gradient took counts towards the delay.
        left = began + self._workload.delay(self.place, draw) - self._now()
        return None if self._client.pause(left, abandoned) else result
