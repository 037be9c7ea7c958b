"""The coordinator's end of the connections: admits replicas, receives their frames, and sends to them without blocking.

Each replica has a thread that reads and a thread that sends. A fault of a connection (wrong token, garbage, an
incomplete frame, silence) ends only this connection, and is counted and logged.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from shadho_celery.core.addresses import close_socket
from shadho_celery.training.wire.frames import (
    BrokenFrame,
    Frame,
    Header,
    Kind,
    Large,
    OtherVersion,
    Wire,
    control_frame,
)
from shadho_celery.training.wire.handshake import Hello, Quit, Refused, TrainingOver, receive_hello

logger = logging.getLogger(__name__)

#: maximum number of connections that are in their handshake; a further one closes the oldest
MAX_HANDSHAKES = 64


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Event: a replica was admitted."""

    peer: Peer


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Event: a replica of this trial was not admitted."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Left:
    """Event: the connection of a replica has ended."""

    peer: Peer
    reason: str
    #: True if an error of the user's own code ended the replica
    is_error: bool = False


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """Event: a replica's vector has arrived. Its next vector is read only after `release_payload`."""

    peer: Peer
    header: Header
    #: view of the connection's buffer
    payload: memoryview
    #: time at which the frame was complete; the coordinator may handle it later
    at: float


Event = Joined | Rejected | Left | Arrived


class Peer:
    """A replica's connection as seen by the coordinator. One thread reads its frames, another thread sends to it.

    Sending never blocks the coordinator: notices are queued, and newer parameters replace parameters that still wait.
    """

    def __init__(self, wire: Wire, *, place: int, rank: int, max_bytes: int) -> None:
        """`place` is the replica's position in the gang, from 0. `rank` is the number with which it was started."""
        self.wire, self.place, self.rank = wire, place, rank
        self._buffer = memoryview(bytearray(max_bytes))
        self._buffer_free = threading.Semaphore(1)
        self._changed = threading.Condition()
        self._notices: deque[Frame] = deque()
        self._latest: Frame | None = None
        self._closed = False
        #: reason why the connection ended or was ended
        self.reason: str | None = None
        #: True if the replica has said that it ends because of an error in the user's code
        self.is_error = False

    def notify(self, frame: Frame) -> None:
        """Queue a small frame. It is sent before queued parameters."""
        with self._changed:
            self._notices.append(frame)
            self._changed.notify()

    def publish(self, frame: Frame) -> None:
        """Queue the parameters of a step. They replace earlier parameters that have not been sent yet."""
        with self._changed:
            self._latest = None if self._closed else frame
            self._changed.notify()

    def release_payload(self) -> None:
        """Allow the next vector to be read, which overwrites the last one."""
        self._buffer_free.release()

    def drop(self, reason: str) -> None:
        """End the connection at once."""
        self.reason = self.reason or reason
        with self._changed:
            self._closed, self._latest = True, None
            self._changed.notify()
        self.wire.close()

    def dismiss(self, reason: str, *, error: bool = False) -> None:
        """Send QUIT with this reason to the replica, after the queued notices."""
        self.reason = self.reason or reason
        self.notify(Quit(reason=reason, error=error).frame())

    def read(self, put: Callable[[Arrived], None]) -> None:
        """Read frames and call `put` with each vector until the connection ends. Raises the exception that ends it."""
        grad = Large(Kind.GRAD, len(self._buffer), self._buffer_for)
        while True:
            header, payload = self.wire.receive(Kind.PING, Kind.QUIT, large=grad)
            if header.kind is Kind.GRAD:
                put(Arrived(peer=self, header=header, payload=payload, at=time.monotonic()))
            elif header.kind is Kind.QUIT:
                said = Quit.read(payload)
                self.reason, self.is_error = self.reason or said.reason, said.error

    def _buffer_for(self, _: Header) -> memoryview:
        self._buffer_free.acquire()
        return self._buffer

    def send(self) -> None:
        """Send queued notices and parameters until the connection ends."""
        try:
            while True:
                with self._changed:
                    while not (self._notices or self._latest or self._closed):
                        self._changed.wait()
                    if self._closed:
                        return
                    frame = self._notices.popleft() if self._notices else self._latest
                    self._latest = None if frame is self._latest else self._latest
                if frame is not None:
                    self.wire.send(frame)
                    if frame.header.kind is Kind.QUIT:
                        self.wire.finish()
                # Delete the reference: the memory of a sent frame is reused once nothing refers to the frame.
                del frame
        except OSError as error:
            self.drop(f"sending failed: {error}")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Conditions for the admission of a replica."""

    token: str
    #: number of this start of the coordinator, from 1
    epoch: int
    #: digest of model, batches and settings, which must equal the replica's digest
    digest: str
    #: maximum length of a GRAD payload in bytes
    max_bytes: int
    #: number of positions in the gang
    places: int
    #: True if the frames after the handshake are encrypted
    encrypted: bool = False
    #: seconds of silence after which a replica counts as lost
    deadline_seconds: float = 30.0
    #: seconds between two heartbeats
    heartbeat_seconds: float = 2.0


class Listener:
    """Server that admits replicas and puts the events of their connections on `inbox`."""

    def __init__(self, server: socket.socket, terms: Terms) -> None:
        self.inbox: SimpleQueue[Event] = SimpleQueue()
        #: number of connections that were refused, or ended by a fault, by cause
        self.refused: Counter[str] = Counter()
        self._server, self._terms = server, terms
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        #: connections that were dismissed because a replica of the same rank has connected
        self._replaced: set[Peer] = set()
        #: connections in their handshake, the oldest first
        self._handshakes: dict[Wire, None] = {}
        self._closing = threading.Event()
        #: bytes received and sent over connections that have ended
        self._gone_bytes = [0, 0]

    def start(self) -> None:
        """Start the threads that accept connections and send heartbeats."""
        for work in (self._accept, self._send_heartbeats):
            threading.Thread(target=work, name=f"gang-{work.__name__.strip('_')}", daemon=True).start()

    def present(self) -> int:
        """Return the number of replicas that have a place, including those whose WELCOME has not been sent yet."""
        return len(self._peers)

    def bytes_moved(self) -> tuple[int, int]:
        """Return the numbers of bytes received and sent over all connections so far."""
        with self._lock:
            wires = [peer.wire for peer in self._all_peers()]
            received, sent = self._gone_bytes
        return received + sum(w.bytes_in for w in wires), sent + sum(w.bytes_out for w in wires)

    def close(self, reason: str, *, seconds: float = 2.0) -> None:
        """Dismiss all replicas and close. Connections that are still open after `seconds` are dropped."""
        self._closing.set()
        close_socket(self._server)
        with self._lock:
            peers, handshakes = self._all_peers(), list(self._handshakes)
        for peer in peers:
            peer.dismiss(reason)
        for wire in handshakes:
            wire.close()
        until = time.monotonic() + seconds
        while time.monotonic() < until and (self._peers or self._replaced):
            # A reading thread that waits for its buffer must continue, so that it notices the end of its connection.
            for peer in peers:
                peer.release_payload()
            time.sleep(0.01)
        for peer in peers:
            peer.drop(reason)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, address = self._server.accept()
            except OSError:
                if self._closing.is_set():
                    return
                time.sleep(0.1)  # a temporary error, for example no free file descriptors
                continue
            try:
                wire = Wire(connection)
            except OSError:
                connection.close()
                continue
            with self._lock:
                self._handshakes[wire] = None
                too_many = list(self._handshakes)[:-MAX_HANDSHAKES]
                for oldest in too_many:
                    del self._handshakes[oldest]
            for oldest in too_many:
                oldest.close()
            threading.Thread(
                target=self._serve, args=(wire, f"{address[0]}:{address[1]}"), name="gang-peer", daemon=True
            ).start()

    def _serve(self, wire: Wire, address: str) -> None:
        admitted: list[Peer] = []

        def admit(hello: Hello) -> int:
            admitted.append(self._admit(wire, hello))
            return admitted[0].place

        try:
            receive_hello(wire, self._terms.token, admit, self._terms.epoch)
        except Exception as error:
            # Catch every exception, because an unauthenticated connection must not end the coordinator.
            with self._lock:
                cause = _cause(error) if wire in self._handshakes else "too many handshakes at once"
                self.refused[cause] += 1
            logger.warning("refused the connection from %s: %s (%s)", address, cause, error)
            for peer in admitted:
                self._forget(peer)
            wire.close()
            return
        finally:
            with self._lock:
                self._handshakes.pop(wire, None)
        self._read_from(admitted[0])

    def _read_from(self, peer: Peer) -> None:
        threading.Thread(target=peer.send, name=f"gang-send-{peer.place}", daemon=True).start()
        self.inbox.put(Joined(peer=peer))
        try:
            # Replicas answer heartbeats, so silence is a fault. This call fails if the coordinator has closed the
            # connection.
            peer.wire.limit_silence(self._terms.deadline_seconds)
            peer.read(self.inbox.put)
        except Exception as error:
            if isinstance(error, BrokenFrame) and peer.reason is None and not self._closing.is_set():
                self.refused[_cause(error)] += 1
            peer.drop(str(error) or type(error).__name__)
        self._forget(peer)
        self.inbox.put(Left(peer=peer, reason=peer.reason or "closed", is_error=peer.is_error))

    def _admit(self, wire: Wire, hello: Hello) -> Peer:
        """Give a replica its place. Raises Refused if it must not join, TrainingOver if no more replicas are needed."""
        if hello.digest != self._terms.digest:
            theirs, ours = (digest.partition("-")[2] for digest in (hello.digest, self._terms.digest))
            length = f" (its data have {theirs} examples, the coordinator's {ours})" if theirs != ours else ""
            reason = (
                f"this replica's model, data or settings differ from the coordinator's{length}; "
                "run the same code with the same params"
            )
            self.inbox.put(Rejected(reason=reason))
            raise Refused(reason)
        if hello.encrypted != self._terms.encrypted:
            raise Refused(
                "one of this replica and its coordinator encrypts and the other does not; "
                "start the workers of both with the same signing key"
            )
        with self._lock:
            if self._closing.is_set():
                raise TrainingOver("the training has ended")
            earlier = [peer for peer in self._peers.values() if peer.rank == hello.rank]
            free = [place for place in range(self._terms.places) if place not in self._peers]
            free = [peer.place for peer in earlier] or ([hello.rank] if hello.rank in free else free)
            if not free or len(self._peers) - len(earlier) >= self._terms.places:
                raise TrainingOver("the gang has all the replicas it can use")
            peer = Peer(wire, place=free[0], rank=hello.rank, max_bytes=self._terms.max_bytes)
            self._peers[peer.place] = peer
            self._replaced.update(earlier)
        for peer_before in earlier:
            # Dismiss the old replica instead of dropping its connection: it would reconnect, and the two would replace
            # each other for ever.
            peer_before.dismiss("another replica of the same rank has connected")
        return peer

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            self._gone_bytes[0] += peer.wire.bytes_in
            self._gone_bytes[1] += peer.wire.bytes_out
            self._replaced.discard(peer)
            if self._peers.get(peer.place) is peer:
                del self._peers[peer.place]

    def _all_peers(self) -> list[Peer]:
        return [*self._peers.values(), *self._replaced]

    def _send_heartbeats(self) -> None:
        ping = control_frame(Kind.PING, epoch=self._terms.epoch)
        while not self._closing.wait(self._terms.heartbeat_seconds):
            with self._lock:
                peers = self._all_peers()
            for peer in peers:
                peer.notify(ping)


def _cause(error: Exception) -> str:
    """Return a short name for the cause of an error, by which refused connections are counted."""
    if isinstance(error, OtherVersion):
        return "another version"
    if isinstance(error, Refused | TrainingOver):
        return str(error).partition(":")[0].partition(";")[0]
    if isinstance(error, BrokenFrame):
        return "broken frame"
    return "handshake failed" if isinstance(error, OSError | EOFError) else type(error).__name__
