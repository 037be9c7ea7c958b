"""Frames on a TCP connection: a fixed header, a payload and a checksum over both.

::

    magic 4s | version u8 | kind u8 | flags u16 | epoch u32 | step i64 | length u64 | payload | crc32 u32

Payloads are numbers or JSON, never pickle. All integers are little-endian. The first five bytes have the same meaning
in every version of the protocol. The receiver sets a maximum length for each kind of frame. If a header exceeds it, the
connection ends before any memory is allocated.

The checksum comes last, so that it can be checked piece by piece while a payload of 100 MB arrives. It is the CRC-32
of the folded payload: each MiB is replaced by the sum of its rows of 8 KiB, in words of 32 bits. A CRC over every byte
would take longer than the copy. The folded CRC still detects every change shorter than 8 KiB, and all but one in 2^32
of the other changes.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum
from functools import reduce
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

MAGIC = b"SHGB"
#: version of the protocol; both ends must have the same
VERSION = 7
#: maximum bytes of a control frame's JSON, and of any payload before the sender has proved that it knows the token
CONTROL_BYTES = 4096
#: bytes that are sent, received and checksummed at a time, so that they stay in the CPU's cache
CHUNK = 1 << 20
#: bytes of a row of the folded checksum
ROW = 1 << 13
#: bytes of the kernel's buffer for each direction; the kernel may grant less
SOCKET_BUFFER = 4 << 20
#: frames with a payload up to this many bytes are sent by one call
SMALL_FRAME = 1 << 16
#: seconds between two heartbeats that are sent while a long frame arrives
HEARTBEAT_SECONDS = 0.25

_HEADER = struct.Struct("<4sBBHIqQ")
#: bytes of a header
HEADER_BYTES = _HEADER.size
_CHECKSUM = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """Purpose of a frame."""

    #: first frame from each end: a nonce; from the replica also the proof that it knows the token, its rank and its
    #: digest
    HELLO = 1
    #: admission of a replica: its place
    WELCOME = 2
    #: parameters and buffers of a step
    PARAMS = 3
    #: a replica's vector for a step
    GRAD = 4
    #: announcement of a new step, whose number is in the header; gradients of older steps are too late
    STEP = 5
    #: heartbeat
    PING = 6
    #: end of the connection, with the reason
    QUIT = 7


class BrokenFrame(ConnectionError):
    """The received bytes violate the protocol, so the connection cannot be used any more."""


class OtherVersion(BrokenFrame):
    """The other end uses another version of the protocol."""


class Header(Struct, frozen=True, kw_only=True):
    """Header of a frame."""

    kind: Kind
    #: number of the coordinator's start, from 1
    epoch: int = 0
    #: number of the step that the frame is for
    step: int = 0
    #: bytes of the payload
    length: int = 0

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(MAGIC, VERSION, self.kind, 0, self.epoch, self.step, self.length)


def unpack(data: Buffer) -> Header:
    """Read a header. Raises BrokenFrame or OtherVersion."""
    magic, version, kind, _, epoch, step, length = _HEADER.unpack(data)
    if magic != MAGIC:
        raise BrokenFrame("not a frame of this protocol")
    if version != VERSION:
        raise OtherVersion(f"the other end speaks version {version} of the protocol, this one version {VERSION}")
    try:
        return Header(kind=Kind(kind), epoch=epoch, step=step, length=length)
    except ValueError:
        raise BrokenFrame(f"unknown kind of frame: {kind}") from None


class Large(NamedTuple):
    """A kind of frames that may be longer than control frames."""

    kind: Kind
    #: maximum bytes of a payload
    most: int
    #: returns the memory into which the payload of a frame with this header is read
    buffer_for: Callable[[Header], memoryview] = lambda header: memoryview(bytearray(header.length))


class Frame:
    """A frame to send: its header, its payload in parts, and its checksum. Several connections may send it."""

    def __init__(self, header: Header, *parts: Buffer) -> None:
        self.parts = [memoryview(part).cast("B") for part in parts]
        self.header = replace(header, length=sum(map(len, self.parts)))
        self.head = self.header.pack()
        self._crc: int | None = None
        self._computing = threading.Lock()

    def checksum(self) -> int:
        """Return the checksum of header and payload. It is computed once for all connections that send the frame."""
        with self._computing:
            if self._crc is None:
                self._crc = reduce(folded_crc, self.chunks(), zlib.crc32(self.head))
            return self._crc

    def chunks(self) -> Iterator[Buffer]:
        """Yield the payload in pieces of `CHUNK` bytes. Pieces that span several parts are copied, other pieces are
        not.
        """
        pending: list[memoryview] = []
        count = 0
        for part in self.parts:
            at = 0
            while at < len(part):
                piece = part[at : at + CHUNK - count]
                at += len(piece)
                count += len(piece)
                pending.append(piece)
                if count == CHUNK:
                    yield pending[0] if len(pending) == 1 else b"".join(pending)
                    pending, count = [], 0
        if pending:
            yield pending[0] if len(pending) == 1 else b"".join(pending)


def folded_crc(crc: int, chunk: Buffer) -> int:
    """Return the checksum `crc`, updated with the next piece of a payload."""
    whole = len(chunk) - len(chunk) % ROW
    if whole > ROW:
        rows = np.frombuffer(chunk, dtype="<u4", count=whole // 4).reshape(-1, ROW // 4)
        crc = zlib.crc32(rows.sum(axis=0, dtype="<u4").data, crc)
        return zlib.crc32(memoryview(chunk)[whole:], crc)
    return zlib.crc32(chunk, crc)


def control_frame(kind: Kind, content: object = None, *, epoch: int = 0, step: int = 0) -> Frame:
    """Return a frame with `content`, a small record, as JSON. The payload is empty if `content` is None."""
    payload = b"" if content is None else msgspec.json.encode(content)
    return Frame(Header(kind=kind, epoch=epoch, step=step), payload)


class Clear:
    """Format of an unencrypted connection's frames: plain bytes with a checksum at the end. `Encrypted` is the other
    format.

    A frame is received into memory that the format provides: first `head`, then `room` for each piece of `CHUNK` bytes
    of the payload, then `tail`.
    """

    def __init__(self) -> None:
        self.head, self.tail = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(_CHECKSUM.size))
        self._crc = 0

    def pieces(self, frame: Frame) -> Iterator[Buffer]:
        """Yield the bytes of a frame in pieces. A piece of more than `SMALL_FRAME` bytes is valid only until the next
        piece.
        """
        yield frame.head
        yield from frame.chunks()
        yield _CHECKSUM.pack(frame.checksum())

    def room(self, piece: memoryview) -> memoryview:
        """Return the memory that receives the bytes of a piece of the payload."""
        return piece

    def read_head(self) -> Buffer:
        """Return the received header. Raises BrokenFrame."""
        self._crc = zlib.crc32(self.head)
        return self.head

    def read(self, piece: memoryview) -> None:
        """Check or decrypt the bytes received into `room`, and write them to `piece`. Raises BrokenFrame."""
        self._crc = folded_crc(self._crc, piece)

    def read_tail(self) -> None:
        """Check the end of the frame. Raises BrokenFrame."""
        if _CHECKSUM.unpack(self.tail)[0] != self._crc:
            raise BrokenFrame("the checksum does not match: the frame was damaged on its way")


class Wire:
    """One end of a connection that carries frames. One thread may receive; any thread may send."""

    def __init__(self, connection: socket.socket, now: Callable[[], float] = time.monotonic) -> None:
        self._socket, self._now = connection, now
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        #: format of the frames; changed only once, at the end of the handshake
        self.form = Clear()
        #: heartbeat that is sent while a long frame arrives, because PINGs that need an answer wait behind that frame
        self.heartbeat: Frame | None = None
        self._heartbeat_at = now()
        self._until: float | None = None
        self._silence = math.inf
        self.bytes_in = self.bytes_out = 0
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        # Turn off Nagle's algorithm, which delays small frames.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frame: Frame, *, wait: bool = True) -> None:
        """Send a whole frame, unless another thread is sending and `wait` is False. Raises OSError."""
        if not self._sending.acquire(blocking=wait):
            return
        try:
            self._apply_timeout()
            pieces = self.form.pieces(frame)
            for piece in [b"".join(pieces)] if frame.header.length <= SMALL_FRAME else pieces:
                self._socket.sendall(piece)
                self.bytes_out += len(piece)
        finally:
            self._sending.release()

    def receive(self, *kinds: Kind, large: Large | None = None) -> tuple[Header, memoryview]:
        """Read the next frame, which must be a control frame of one of `kinds`, or a frame of the kind `large`.

        Raises BrokenFrame if the frame is too long, of another kind, damaged or incomplete; EOFError if the other end
        has closed the connection between two frames; and OSError.
        """
        form = self.form
        self._fill(form.head, first=True)
        header = unpack(form.read_head())
        expected = large if large is not None and header.kind is large.kind else Large(header.kind, CONTROL_BYTES)
        if expected is not large and header.kind not in kinds:
            raise BrokenFrame(f"{header.kind.name} is not expected here")
        if header.length > expected.most:
            raise BrokenFrame(f"{header.kind.name} of {header.length} bytes exceeds the limit of {expected.most}")
        payload = expected.buffer_for(header)[: header.length]
        for at in range(0, header.length, CHUNK):
            chunk = payload[at : at + CHUNK]
            self._fill(form.room(chunk))
            form.read(chunk)
            if self.heartbeat and len(chunk) == CHUNK and (now := self._now()) - self._heartbeat_at > HEARTBEAT_SECONDS:
                self._heartbeat_at = now
                self.send(self.heartbeat, wait=False)
        self._fill(form.tail)
        form.read_tail()
        return header, payload

    def _fill(self, view: memoryview, *, first: bool = False) -> None:
        got = 0
        while got < len(view):
            self._apply_timeout()
            try:
                with self._receiving:
                    count = self._socket.recv_into(view[got:])
            except BlockingIOError:
                raise TimeoutError(f"nothing heard for {self._silence:g} s") from None
            if not count:
                if first and not got:
                    raise EOFError("closed")
                raise BrokenFrame("the connection closed in the middle of a frame")
            got += count
        self.bytes_in += got

    def set_timeout(self, seconds: float | None) -> None:
        """Limit the total time of all following calls to `seconds`. None removes the limit.

        Bytes that arrive do not extend the time.
        """
        self._until = None if seconds is None else self._now() + seconds
        self._socket.settimeout(seconds)

    def limit_silence(self, seconds: float) -> None:
        """Let `receive` raise TimeoutError if no byte arrives for `seconds`. Sending is not limited."""
        # Set the kernel's timeout, because the timeout of a socket object applies to both directions.
        limit = struct.pack("ll", *divmod(math.ceil(seconds * 1e6), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._silence = seconds

    def _apply_timeout(self) -> None:
        if self._until is not None:
            if (left := self._until - self._now()) <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left)

    def close(self) -> None:
        """Close the connection, from any thread. Calls in progress in other threads end with an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # Wait until no other thread uses the descriptor, because another connection may get the same number next.
        with self._sending, self._receiving:
            self._socket.close()

    def finish(self) -> None:
        """Shut down the sending direction. The frames that were sent before still arrive."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
