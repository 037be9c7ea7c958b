"""The replica's end of the connection: connects to the coordinator, reconnects, and keeps the newest parameters."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.errors import ShadhoError
from shadho_celery.training.wire.frames import BrokenFrame, Frame, Header, Kind, Large, Wire, control_frame
from shadho_celery.training.wire.handshake import HANDSHAKE_SECONDS, Hello, Quit, Refused, TrainingOver, say_hello
from shadho_celery.training.wire.vectors import Vector

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
