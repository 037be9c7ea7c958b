"""One replica as the coordinator sees it, and what can happen to its connection."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shadho_celery.training.frames import Frame, Header, Kind, Wire, content_of, small_room
from shadho_celery.training.handshake import farewell


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A replica was taken in."""

    peer: Peer


@dataclass(frozen=True, kw_only=True)
class Left:
    """A replica's connection has ended."""

    peer: Peer
    reason: str


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """A whole frame has come; the replica's next one is read after `Peer.read_on`."""

    peer: Peer
    header: Header
    #: a view of the connection's buffer
    payload: memoryview
    #: moment at which the last of it came; it is dealt with when the coordinator comes to it
    at: float


Event = Joined | Left | Arrived


class Peer:
    """One replica, as the coordinator sees it."""

    def __init__(self, wire: Wire, *, slot: int, rank: int, most_bytes: int) -> None:
        self.wire, self.slot, self.rank = wire, slot, rank
        self._buffer = memoryview(bytearray(most_bytes))
        self._taken = threading.Semaphore(1)
        self._changed = threading.Condition()
        self._notices: deque[Frame] = deque()
        self._latest: tuple[Frame, Callable[[], None]] | None = None
        self._closed = False
        self.reason: str | None = None
        #: its next vector waits for the last one to be used: until then nothing is heard of it
        self.waits = False

    def notify(self, frame: Frame) -> None:
        """Send a small frame, in its turn, before any parameters that still wait."""
        with self._changed:
            self._notices.append(frame)
            self._changed.notify()

    def publish(self, frame: Frame, done: Callable[[], None]) -> None:
        """Send parameters; newer ones take their place where they still wait. `done` is called once, sent or not."""
        with self._changed:
            self._latest, replaced = (frame, done), self._latest
            closed = self._closed
            self._changed.notify()
        if replaced:
            replaced[1]()
        if closed:
            self._give_up()

    def read_on(self) -> None:
        """The payload that arrived last is of no more use."""
        self._taken.release()

    def drop(self, reason: str) -> None:
        """End the connection."""
        self.reason = self.reason or reason
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.wire.close()
        self._give_up()

    def dismiss(self, reason: str, *, error: bool = False) -> None:
        """Tell the replica that it is over, and take nothing more from it."""
        self.reason = self.reason or reason
        self.notify(farewell(reason, error=error))

    def read(self, limits: Mapping[Kind, int], arrived: Callable[[Header, memoryview], None]) -> None:
        """Read frames until the connection ends, by an exception."""

        def room(header: Header) -> memoryview:
            if header.kind is not Kind.GRAD:
                return small_room(header)
            self.waits = True
            self._taken.acquire()
            self.waits = False
            return self._buffer

        while True:
            header, payload = self.wire.receive(limits, room)
            if header.kind is Kind.GRAD:
                arrived(header, payload)
            elif header.kind is Kind.QUIT:
                self.reason = self.reason or str(content_of(payload).get("reason"))

    def send(self) -> None:
        """Send what is to be sent until the connection ends."""
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
            self._give_up()

    def _give_up(self) -> None:
        with self._changed:
            latest, self._latest = self._latest, None
        if latest:
            latest[1]()
