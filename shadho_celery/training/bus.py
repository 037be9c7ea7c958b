"""The coordinator's end of the bus: takes replicas in, reads from each, sends to each without waiting for any.

Each replica has a thread that reads and one that sends. Whatever is wrong with a connection (a wrong token, garbage,
half a frame, silence) ends that connection, is counted and logged, and disturbs nobody else.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from shadho_celery.training.assembly import close_socket
from shadho_celery.training.frames import (
    BrokenFrame,
    Header,
    Kind,
    OtherVersion,
    Wire,
    control,
    control_limits,
)
from shadho_celery.training.handshake import Over, Refused, receive_hello
from shadho_celery.training.peer import Arrived, Event, Joined, Left, Peer

logger = logging.getLogger(__name__)

#: connections that may be in their handshake at a time; the oldest gives way to one more
MOST_STRANGERS = 64


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On what a replica is taken in, and how long its silence is believed."""

    token: str
    #: which life of the coordinator this is
    epoch: int
    #: replicas that have a place at a time
    places: int
    #: digest of model and settings; a replica must have the same
    setup: str
    #: what WELCOME says beside the place
    welcome: Mapping[str, Any]
    #: bytes of the longest GRAD
    most_bytes: int
    #: a replica of which nothing is heard for so long is gone
    deadline_seconds: float = 30.0
    #: it is asked so often
    ping_seconds: float = 2.0


class Listener:
    """Listens, takes replicas in, and puts what happens on `inbox`."""

    def __init__(self, server: socket.socket, terms: Terms, now: Callable[[], float] = time.monotonic) -> None:
        self.inbox: SimpleQueue[Event] = SimpleQueue()
        #: connections turned away or ended, by cause
        self.refused: Counter[str] = Counter()
        #: replicas that have a place at a time; fewer later, where backups are not needed
        self.places = terms.places
        self._server, self._terms, self._now = server, terms, now
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        #: those that were told to go, since their replicas have come again
        self._replaced: set[Peer] = set()
        #: the oldest first
        self._strangers: dict[Wire, None] = {}
        self._closing = threading.Event()
        self._gone_bytes = [0, 0]

    def start(self) -> None:
        for work in (self._accept, self._pulse):
            threading.Thread(target=work, name=f"gang-{work.__name__.strip('_')}", daemon=True).start()

    def present(self) -> int:
        """How many replicas have a place, those whose handshake is not over yet too."""
        return len(self._peers)

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes that came, and that went, over all connections so far."""
        with self._lock:
            wires = [peer.wire for peer in self._everybody()]
            came, went = self._gone_bytes
        return came + sum(w.bytes_in for w in wires), went + sum(w.bytes_out for w in wires)

    def close(self, reason: str, *, error: bool = False, seconds: float = 2.0) -> None:
        """Tell everybody that it is over, and close; those who do not go within `seconds` are cut off."""
        self._closing.set()
        close_socket(self._server)
        with self._lock:
            peers, strangers = self._everybody(), list(self._strangers)
        for peer in peers:
            peer.dismiss(reason, error=error)
        for wire in strangers:
            wire.close()
        until = self._now() + seconds
        while self._now() < until and (self._peers or self._replaced):
            # Whoever waits to hand in a payload is let go on, to see the end.
            for peer in peers:
                peer.read_on()
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
                time.sleep(0.1)  # out of file descriptors, say: that passes
                continue
            try:
                wire = Wire(connection, self._now)
            except OSError:
                connection.close()
                continue
            with self._lock:
                self._strangers[wire] = None
                too_many = list(self._strangers)[:-MOST_STRANGERS]
                for oldest in too_many:
                    del self._strangers[oldest]
            for oldest in too_many:
                oldest.close()
            threading.Thread(
                target=self._serve, args=(wire, f"{address[0]}:{address[1]}"), name="gang-peer", daemon=True
            ).start()

    def _serve(self, wire: Wire, address: str) -> None:
        admitted: list[Peer] = []

        def admit(hello: dict[str, Any]) -> Mapping[str, Any]:
            admitted.append(self._admit(wire, hello))
            return {**self._terms.welcome, "slot": admitted[0].slot}

        try:
            receive_hello(wire, self._terms.token, admit, self._terms.epoch)
        except Exception as error:
            # Whatever a stranger brings about.
            with self._lock:
                cause = _cause(error) if wire in self._strangers else "too many at once"
                self.refused[cause] += 1
            logger.warning("connection from %s turned away: %s (%s)", address, cause, error)
            for peer in admitted:
                self._forget(peer)
            wire.close()
            return
        finally:
            with self._lock:
                self._strangers.pop(wire, None)
        self._converse(admitted[0])

    def _converse(self, peer: Peer) -> None:
        threading.Thread(target=peer.send, name=f"gang-send-{peer.slot}", daemon=True).start()
        self.inbox.put(Joined(peer=peer))
        limits = {Kind.GRAD: self._terms.most_bytes, **control_limits(Kind.PING, Kind.QUIT)}
        try:
            peer.read(limits, lambda header, payload: self._arrived(peer, header, payload))
        except Exception as error:
            if isinstance(error, BrokenFrame) and peer.reason is None and not self._closing.is_set():
                self.refused[_cause(error)] += 1
            peer.drop(str(error) or type(error).__name__)
        self._forget(peer)
        self.inbox.put(Left(peer=peer, reason=peer.reason or "closed"))

    def _arrived(self, peer: Peer, header: Header, payload: memoryview) -> None:
        if header.sender != peer.slot:
            raise BrokenFrame(f"a frame of place {header.sender} from place {peer.slot}")
        self.inbox.put(Arrived(peer=peer, header=header, payload=payload, at=self._now()))

    def _admit(self, wire: Wire, hello: dict[str, Any]) -> Peer:
        rank = hello.get("rank")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise BrokenFrame("HELLO without a rank")
        if hello.get("setup") != self._terms.setup:
            raise Refused("this replica has another model, strategy or codec; run the same code with the same params")
        with self._lock:
            if self._closing.is_set():
                raise Over("the training has ended")
            mine = [peer for peer in self._peers.values() if peer.rank == rank]
            free = [slot for slot in range(self._terms.places) if slot not in self._peers]
            free = [peer.slot for peer in mine] or ([rank] if rank in free else free)
            if not free or len(self._peers) - len(mine) >= self.places:
                raise Over("the gang has all the replicas it can use")
            peer = Peer(wire, slot=free[0], rank=rank, most_bytes=self._terms.most_bytes)
            self._peers[peer.slot] = peer
            self._replaced.update(mine)
        for old in mine:
            # Not cut off: it would come again in its turn, for ever.
            old.dismiss("its replica has come again")
        return peer

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            self._gone_bytes[0] += peer.wire.bytes_in
            self._gone_bytes[1] += peer.wire.bytes_out
            self._replaced.discard(peer)
            if self._peers.get(peer.slot) is peer:
                del self._peers[peer.slot]

    def _everybody(self) -> list[Peer]:
        return [*self._peers.values(), *self._replaced]

    def _pulse(self) -> None:
        ping = control(Kind.PING, epoch=self._terms.epoch)
        while not self._closing.wait(self._terms.ping_seconds):
            with self._lock:
                peers = self._everybody()
            for peer in peers:
                silent = self._now() - peer.wire.heard > self._terms.deadline_seconds
                if silent and not peer.waits:
                    peer.drop(f"nothing heard for {self._terms.deadline_seconds:g} s")
                else:
                    peer.notify(ping)


def _cause(error: Exception) -> str:
    """A few words to count by."""
    if isinstance(error, OtherVersion):
        return "another version"
    if isinstance(error, Refused | Over):
        return str(error).partition(":")[0].partition(";")[0]
    if isinstance(error, BrokenFrame):
        return "broken frame"
    return "no handshake" if isinstance(error, OSError | EOFError) else type(error).__name__
