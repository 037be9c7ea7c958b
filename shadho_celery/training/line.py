"""The replica's end of the bus: finds the coordinator, again if need be, and always has its newest parameters."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from shadho_celery.context import ReplicaSeat
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.training.frames import (
    BrokenFrame,
    Frame,
    Header,
    Kind,
    Wire,
    content_of,
    control,
    control_limits,
    small_room,
)
from shadho_celery.training.handshake import HANDSHAKE_SECONDS, Over, Refused, farewell, say_hello
from shadho_celery.training.strategies import Vector

logger = logging.getLogger(__name__)

#: seconds from one look at whether the trial shall stop to the next
TICK = 0.25
#: seconds between two attempts to connect: the first pause, and the longest
BACKOFF = (0.05, 2.0)
#: seconds from one connection's beginning to the next one's, at least: what ended the one may end the next
APART = 2.0
#: seconds that the threads of a connection that was closed have to end
LEAVE_SECONDS = 1.0


class Lost(Exception):
    """The connection has broken; the coordinator may be back."""


class Line:
    """One replica's connection, and the parameters that came over it.

    Two buffers: one fills while the other, the newest whole one, can be read.
    """

    def __init__(
        self,
        seat: ReplicaSeat,
        hello: Mapping[str, Any],
        params: tuple[Vector, Vector],
        *,
        stop: Callable[[], bool],
        patience_seconds: float = 60.0,
        deadline_seconds: float = 30.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seat, self._hello, self._stop, self._now = seat, {**hello, "rank": seat.rank}, stop, now
        self._patience, self._deadline = patience_seconds, deadline_seconds
        host, _, port = seat.address.rpartition(":")
        if not port.isdecimal():
            raise UsageError(f"the coordinator's address is {seat.address!r}; it must be host:port")
        self._address = (host, int(port))
        self._front, self._back = params
        self._changed = threading.Condition()
        self._step = self._newest = -1
        self._ended: Exception | None = None
        self._wire: Wire | None = None
        self._began = -math.inf
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.epoch = 0

    def connect(self) -> dict[str, Any]:
        """Find the coordinator and return what it says in WELCOME.

        Raises Refused, Over, or ShadhoError where it was not found for `patience_seconds`.
        """
        self.close()
        self._sleep(self._began + APART - self._now())
        until, pause = self._now() + self._patience, BACKOFF[0]
        while True:
            try:
                return self._attempt()
            except (OSError, EOFError, Lost) as error:
                if self._now() + pause > until:
                    raise ShadhoError(
                        f"the coordinator at {self._seat.address} was not found for {self._patience:g} s ({error}); "
                        "look whether its trial still runs and the port is open"
                    ) from error
            self._sleep(pause)
            pause = min(2 * pause, BACKOFF[1])

    def _attempt(self) -> dict[str, Any]:
        connection = socket.create_connection(self._address, timeout=HANDSHAKE_SECONDS)
        try:
            wire = Wire(connection, self._now)
            epoch, welcome = say_hello(wire, self._seat.token, self._hello)
            if epoch < self.epoch:
                raise Lost(f"a coordinator of epoch {epoch} after one of {self.epoch}")
        except BaseException:
            connection.close()
            raise
        self.epoch, self._wire, self._began = epoch, wire, self._now()
        self._step, self._newest, self._ended = -1, -1, None
        self._over = threading.Event()
        works: tuple[Callable[..., None], ...] = (self._read, self._watch)
        self._threads = [
            threading.Thread(target=work, args=(wire, self._over), name="gang-line", daemon=True) for work in works
        ]
        for thread in self._threads:
            thread.start()
        return welcome

    def _sleep(self, seconds: float) -> None:
        until = self._now() + seconds
        while (left := until - self._now()) > 0:
            self._check_stop()
            time.sleep(min(TICK, left))

    def _check_stop(self) -> None:
        if self._stop():
            raise Over("the trial was told to stop")

    def check(self) -> None:
        """Raise what has ended this connection: Over, Refused or Lost."""
        self._check_stop()
        if self._ended is not None:
            raise self._ended

    def wait(self, after: int) -> int:
        """Block until the parameters of a step beyond `after` are here; return their step."""
        with self._changed:
            while True:
                self.check()
                if self._step > after:
                    return self._step
                self._changed.wait(TICK)

    def pause(self, seconds: float, given_up: Callable[[], bool]) -> bool:
        """Wait for `seconds`; True as soon as `given_up` is, which is asked whenever a new step was heard of."""
        until = self._now() + seconds
        with self._changed:
            while (left := until - self._now()) > 0:
                if given_up():
                    return True
                self._changed.wait(min(TICK, left))
        return False

    @property
    def newest(self) -> int:
        """The newest step heard of."""
        return self._newest

    def use(self, reader: Callable[[Vector], None]) -> int:
        """Call `reader` with the newest parameters and buffers; return their step."""
        with self._changed:
            reader(self._front)
            return self._step

    def send(self, frame: Frame) -> None:
        self.check()
        try:
            assert self._wire is not None
            self._wire.send(frame)
        except OSError as error:
            # Why the connection ended is the reader's to say: it may have been told so.
            with self._changed:
                self._changed.wait_for(lambda: self._ended is not None, timeout=TICK)
            self.check()
            raise Lost(str(error)) from None

    def leave(self, reason: str) -> None:
        """Tell the coordinator, if it is there, why this replica ends."""
        if self._wire is not None and self._ended is None:
            with suppress(OSError):
                self._wire.send(farewell(reason))
                self._wire.finish()

    def close(self) -> None:
        """End the connection, and its threads: a process that has any left is not used again."""
        if self._wire is not None:
            self._wire.close()
        self._over.set()
        for thread in self._threads:
            thread.join(LEAVE_SECONDS)

    def _read(self, wire: Wire, over: threading.Event) -> None:
        limits = {**control_limits(Kind.STEP, Kind.PING, Kind.QUIT), Kind.PARAMS: self._back.nbytes}
        pong = wire.sign = control(Kind.PING)
        try:
            while True:
                header, payload = wire.receive(limits, self._room)
                if header.kind is Kind.QUIT:
                    content = content_of(payload)
                    raise (Refused if content.get("error") else Over)(str(content.get("reason", "")))
                if header.kind is Kind.PING:
                    # Where the other thread is sending, the coordinator hears of us anyway.
                    wire.send(pong, patient=False)
                elif header.kind is Kind.PARAMS:
                    self._arrived(header)
                else:
                    self._heard_of(header.step)
        except (OSError, EOFError) as error:
            self._end(wire, Lost(str(error)))
        except (Over, Refused) as error:
            self._end(wire, error)
        over.set()

    def _room(self, header: Header) -> memoryview:
        if header.kind is not Kind.PARAMS:
            return small_room(header)
        if header.length != self._back.nbytes or header.epoch != self.epoch:
            raise BrokenFrame("PARAMS of another model or epoch")
        self._heard_of(header.step)
        return self._back.data.cast("B")

    def _heard_of(self, step: int) -> None:
        with self._changed:
            self._newest = max(self._newest, step)
            self._changed.notify_all()

    def _arrived(self, header: Header) -> None:
        with self._changed:
            self._front, self._back = self._back, self._front
            self._step = header.step
            self._changed.notify_all()

    def _end(self, wire: Wire, error: Exception) -> None:
        with self._changed:
            if wire is self._wire and self._ended is None:
                self._ended = error
                self._changed.notify_all()
        wire.close()

    def _watch(self, wire: Wire, over: threading.Event) -> None:
        """A coordinator that is silent for too long is gone: it pings every few seconds."""
        while not over.wait(min(1.0, self._deadline / 4)):
            if self._now() - wire.heard > self._deadline:
                self._end(wire, Lost(f"nothing heard for {self._deadline:g} s"))


def empty_params(size: int) -> Vector:
    """A buffer for parameters and buffers."""
    return np.zeros(size, dtype=np.float32)
