"""Coordinator's end of one replica's connection, and the events that it produces."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shadho_celery.training.frames import Frame, Header, Kind, Wire, small_buffer
from shadho_celery.training.handshake import parse_quit, quit_frame


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Event: a replica was admitted."""

    peer: Peer


@dataclass(frozen=True, kw_only=True)
class Left:
    """Event: the connection of a replica has ended."""

    peer: Peer
    reason: str


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """Event: a whole frame has arrived. The replica's next vector is read after `Peer.release_payload`."""

    peer: Peer
    header: Header
    #: view of the connection's buffer
    payload: memoryview
    #: time at which its last byte arrived; the coordinator may handle it later
    at: float


Event = Joined | Left | Arrived


class Peer:
    """One replica as seen by the coordinator: a thread that reads its frames and one that sends to it.

    Sending never blocks the coordinator: notices are queued, and waiting parameters are replaced by newer ones.
    """

    def __init__(self, wire: Wire, *, place: int, rank: int, max_bytes: int) -> None:
        self.wire, self.place, self.rank = wire, place, rank
        self._buffer = memoryview(bytearray(max_bytes))
        self._buffer_free = threading.Semaphore(1)
        self._changed = threading.Condition()
        self._notices: deque[Frame] = deque()
        self._latest: tuple[Frame, Callable[[], None]] | None = None
        self._closed = False
        #: reason for which the connection ended or was ended
        self.reason: str | None = None
        #: True while the reading thread waits for `release_payload`; no heartbeat is read in that time
        self.is_waiting = False

    def notify(self, frame: Frame) -> None:
        """Queue a small frame. It is sent before waiting parameters."""
        with self._changed:
            self._notices.append(frame)
            self._changed.notify()

    def publish(self, frame: Frame, done: Callable[[], None]) -> None:
        """Queue the parameters of a step in place of older waiting ones.

        `done` is called once: after they are sent, or when they are replaced or dropped.
        """
        with self._changed:
            self._latest, replaced = (frame, done), self._latest
            closed = self._closed
            self._changed.notify()
        if replaced:
            replaced[1]()
        if closed:
            self._drop_params()

    def release_payload(self) -> None:
        """Allow the next vector to be read into the buffer of the last one."""
        self._buffer_free.release()

    def drop(self, reason: str) -> None:
        """End the connection at once."""
        self.reason = self.reason or reason
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.wire.close()
        self._drop_params()

    def dismiss(self, reason: str, *, error: bool = False) -> None:
        """Send QUIT to the replica, after the queued notices."""
        self.reason = self.reason or reason
        self.notify(quit_frame(reason, error=error))

    def read(self, limits: Mapping[Kind, int], arrived: Callable[[Header, memoryview], None]) -> None:
        """Read frames and call `arrived` with each vector. Raises the exception that ends the connection."""

        def buffer_for(header: Header) -> memoryview:
            if header.kind is not Kind.GRAD:
                return small_buffer(header)
            self.is_waiting = True
            self._buffer_free.acquire()
            self.is_waiting = False
            return self._buffer

        while True:
            header, payload = self.wire.receive(limits, buffer_for)
            if header.kind is Kind.GRAD:
                arrived(header, payload)
            elif header.kind is Kind.QUIT:
                self.reason = self.reason or parse_quit(payload).reason

    def send(self) -> None:
        """Send queued notices and parameters until the connection ends."""
        try:
            while True:
                with self._changed:
                    while not (self._notices or self._latest or self._closed):
                        self._changed.wait()
                    if self._closed:
                        return
                    notice = self._notices.popleft() if self._notices else None
                    latest, self._latest = (None, self._latest) if notice else (self._latest, None)
                if notice:
                    self.wire.send(notice)
                    if notice.is_last:
                        self.wire.finish()
                elif latest:
                    try:
                        self.wire.send(latest[0])
                    finally:
                        latest[1]()
        except OSError as error:
            self.drop(f"sending failed: {error}")
        finally:
            self._drop_params()

    def _drop_params(self) -> None:
        with self._changed:
            latest, self._latest = self._latest, None
        if latest:
            latest[1]()
