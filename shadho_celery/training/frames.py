"""Frames on a TCP connection: a fixed header, a payload, a checksum over both. No pickle: numbers, or JSON.

::

    magic 4s | version u8 | kind u8 | flags u16 | epoch u32 | sender i32 | step i64 | length u64 | payload | crc32 u32

All little-endian. The checksum comes last so that a payload of 100 MB is summed up piece by piece while it travels. It
is the CRC-32 of the payload folded: of each MB, the sums of its rows of 8 KiB, in words of 32 bits. A CRC of every byte
would cost more than the copy; folded, it still tells every change of less than 8 KiB, and all others but one in 2^32.
The first five bytes stay as they are in every version. A receiver names the greatest length it allows for each kind; a
header that says more ends the connection before anything is allocated.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

MAGIC = b"SHGB"
#: of the protocol: both ends speak the same, or part
VERSION = 1
#: the most that a control frame's JSON takes, and any frame before the other end has proved who it is
CONTROL_BYTES = 4096
#: bytes that are sent, received and summed up at a time: they are still in the core's cache
CHUNK = 1 << 20
#: bytes of a row
ROW = 1 << 13
#: asked of the kernel for each direction; it may give less
SOCKET_BUFFER = 4 << 20
#: below this one call sends the whole frame
SMALL = 1 << 16
#: seconds from one sign of life to the next while a long frame comes in
SIGN_SECONDS = 0.25
#: the coordinator's own number as a sender
COORDINATOR = -1

_HEADER = struct.Struct("<4sBBHIiqQ")
_CHECKSUM = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a frame is for."""

    #: who is there: a nonce, and the proof of the token
    HELLO = 1
    #: the coordinator takes the replica in: its place, the seed, the epoch
    WELCOME = 2
    #: the parameters and buffers of a step
    PARAMS = 3
    #: what a replica made of them
    GRAD = 4
    #: a new step has begun: a gradient of an older one comes too late (eight bytes: its number)
    STEP = 5
    #: still there?
    PING = 6
    #: it is over, and why
    QUIT = 7


class BrokenFrame(ConnectionError):
    """What came is no frame; the connection is of no more use."""


class OtherVersion(BrokenFrame):
    """The other end speaks another version of the protocol."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What stands before a payload."""

    kind: Kind
    #: which life of the coordinator it belongs to: one more after each restart
    epoch: int = 0
    #: the replica's place; `COORDINATOR` for the coordinator
    sender: int = COORDINATOR
    #: the step that the payload belongs to
    step: int = 0
    #: bytes of the payload
    length: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, self.kind, 0, self.epoch, self.sender, self.step, self.length)


def unpack(data: Buffer) -> Header:
    """Read a header. Raises BrokenFrame, or OtherVersion."""
    magic, version, kind, _, epoch, sender, step, length = _HEADER.unpack(data)
    if magic != MAGIC:
        raise BrokenFrame("no frame of ours")
    if version != VERSION:
        raise OtherVersion(f"the other end speaks version {version} of the protocol, this one version {VERSION}")
    try:
        return Header(kind=Kind(kind), epoch=epoch, sender=sender, step=step, length=length)
    except ValueError:
        raise BrokenFrame(f"no such kind of frame: {kind}") from None


class Frame:
    """A frame ready to be sent; to many, if need be: its checksum is made once."""

    def __init__(self, header: Header, *parts: Buffer) -> None:
        self.parts = [memoryview(part).cast("B") for part in parts]
        length = sum(map(len, self.parts))
        self.head = Header(
            kind=header.kind, epoch=header.epoch, sender=header.sender, step=header.step, length=length
        ).pack()
        self.step = header.step
        #: nothing is sent after it
        self.is_last = header.kind is Kind.QUIT
        self.bytes = len(self.head) + length + _CHECKSUM.size
        self.crc: int | None = None

    def summed(self) -> Frame:
        """With the checksum made, before several threads send it."""
        crc = zlib.crc32(self.head)
        for chunk in self.chunks():
            crc = checksum(chunk, crc)
        self.crc = crc
        return self

    def chunks(self) -> Iterator[Buffer]:
        """The payload cut into `CHUNK` bytes; only those that lie in several parts are copied."""
        waiting: list[memoryview] = []
        count = 0
        for part in self.parts:
            at = 0
            while at < len(part):
                piece = part[at : at + CHUNK - count]
                at += len(piece)
                count += len(piece)
                waiting.append(piece)
                if count == CHUNK:
                    yield waiting[0] if len(waiting) == 1 else b"".join(waiting)
                    waiting, count = [], 0
        if waiting:
            yield waiting[0] if len(waiting) == 1 else b"".join(waiting)


def checksum(chunk: Buffer, crc: int) -> int:
    """Go on from `crc` over one chunk of a payload."""
    whole = len(chunk) - len(chunk) % ROW
    if whole > ROW:
        rows = np.frombuffer(chunk, dtype="<u4", count=whole // 4).reshape(-1, ROW // 4)
        crc = zlib.crc32(rows.sum(axis=0, dtype="<u4").data, crc)
        return zlib.crc32(memoryview(chunk)[whole:], crc)
    return zlib.crc32(chunk, crc)


def control(kind: Kind, content: Mapping[str, Any] | None = None, *, epoch: int = 0, step: int = 0) -> Frame:
    """A frame with a little JSON."""
    return Frame(Header(kind=kind, epoch=epoch, step=step), json.dumps(content or {}).encode())


def content_of(payload: Buffer) -> dict[str, Any]:
    """The JSON of a control frame. Raises BrokenFrame."""
    try:
        content = json.loads(bytes(payload))
    except (ValueError, RecursionError):
        raise BrokenFrame("a control frame without JSON") from None
    if not isinstance(content, dict):
        raise BrokenFrame("a control frame without a JSON object")
    return content


class Wire:
    """One end of a connection. One thread may receive; any may send."""

    def __init__(self, connection: socket.socket, now: Callable[[], float] = time.monotonic) -> None:
        self._socket, self._now = connection, now
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._head = bytearray(_HEADER.size)
        #: moment of the last byte that came
        self.heard = now()
        #: said now and then while a long frame comes in: what asks whether we are still there waits behind it
        self.sign: Frame | None = None
        self._signed = now()
        self._until: float | None = None
        self.bytes_in = self.bytes_out = 0
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        keep_alive(connection)

    def send(self, frame: Frame, *, patient: bool = True) -> bool:
        """Send a frame whole; False where another thread is sending and this one shall not wait. Raises OSError."""
        if not self._sending.acquire(blocking=patient):
            return False
        try:
            self._send(frame)
        finally:
            self._sending.release()
        self.bytes_out += frame.bytes
        return True

    def _send(self, frame: Frame) -> None:
        self._keep_time()
        if frame.bytes <= SMALL:
            crc = frame.crc if frame.crc is not None else frame.summed().crc
            self._socket.sendall(b"".join([frame.head, *frame.parts, _CHECKSUM.pack(crc)]))
            return
        crc = zlib.crc32(frame.head)
        self._socket.sendall(frame.head)
        for chunk in frame.chunks():
            self._socket.sendall(chunk)
            if frame.crc is None:
                crc = checksum(chunk, crc)
        self._socket.sendall(_CHECKSUM.pack(crc if frame.crc is None else frame.crc))

    def receive(self, limits: Mapping[Kind, int], room: Callable[[Header], memoryview]) -> tuple[Header, memoryview]:
        """Read the next frame's payload into the `room` that is given for it.

        Raises BrokenFrame where it is longer than the limit of its kind (none: not expected at all), damaged or cut
        off in the middle; EOFError where the other end has closed between two frames; OSError.
        """
        self._fill(memoryview(self._head), first=True)
        header = unpack(self._head)
        limit = limits.get(header.kind)
        if limit is None:
            raise BrokenFrame(f"{header.kind.name} is not expected here")
        if header.length > limit:
            raise BrokenFrame(f"{header.kind.name} of {header.length} bytes, where {limit} are allowed")
        payload = room(header)[: header.length]
        crc = zlib.crc32(self._head)
        for at in range(0, header.length, CHUNK):
            chunk = payload[at : at + CHUNK]
            self._fill(chunk)
            crc = checksum(chunk, crc)
            if self.sign and len(chunk) == CHUNK and self.heard - self._signed > SIGN_SECONDS:
                self._signed = self.heard
                self.send(self.sign, patient=False)
        tail = bytearray(_CHECKSUM.size)
        self._fill(memoryview(tail))
        if _CHECKSUM.unpack(tail)[0] != crc:
            raise BrokenFrame(f"{header.kind.name} was damaged on its way")
        self.bytes_in += _HEADER.size + header.length + _CHECKSUM.size
        return header, payload

    def _fill(self, view: memoryview, *, first: bool = False) -> None:
        got = 0
        while got < len(view):
            self._keep_time()
            with self._receiving:
                count = self._socket.recv_into(view[got:])
            if not count:
                if first and not got:
                    raise EOFError("closed")
                raise BrokenFrame("cut off in the middle of a frame")
            self.heard = self._now()
            got += count

    def timeout(self, seconds: float | None) -> None:
        """Let all that follows take so long together, however much trickles in; None for as long as it takes."""
        self._until = None if seconds is None else self._now() + seconds
        self._socket.settimeout(seconds)

    def _keep_time(self) -> None:
        if self._until is not None:
            if (left := self._until - self._now()) <= 0:
                raise TimeoutError("it took too long")
            self._socket.settimeout(left)

    def close(self) -> None:
        """Close it, from any thread: calls under way in others end with an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # Its number may be the next connection's: nobody may still be about to use it.
        with self._sending, self._receiving:
            self._socket.close()

    def finish(self) -> None:
        """Say that nothing more is sent, so that what was sent last arrives before the connection closes."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel ask after a silent host; frames go out at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def control_limits(*kinds: Kind) -> dict[Kind, int]:
    """`CONTROL_BYTES` for each."""
    return dict.fromkeys(kinds, CONTROL_BYTES)


def small_room(header: Header) -> memoryview:
    """A place for a control frame."""
    return memoryview(bytearray(header.length))
