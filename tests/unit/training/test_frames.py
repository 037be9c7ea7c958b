"""Frames arrive unchanged, or the connection ends with BrokenFrame."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from shadho_celery.training.wire.frames import (
    CHUNK,
    HEADER_BYTES,
    VERSION,
    BrokenFrame,
    Frame,
    Header,
    Kind,
    Large,
    OtherVersion,
    Wire,
    control_frame,
    unpack,
)

HEADER = Header(kind=Kind.GRAD, epoch=3, step=2**40)


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    """Yield a wire, and the bare socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    far.settimeout(30)
    wire = Wire(near)
    wire.set_timeout(30)
    yield wire, far
    wire.close()
    far.close()


def sent_bytes(frame: Frame) -> bytes:
    """Return the bytes that are sent for a frame."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = Wire(socket.create_connection(server.getsockname()))
        far, _ = server.accept()
    collected = bytearray()

    def collect() -> None:
        while data := far.recv(1 << 16):
            collected.extend(data)

    reader = threading.Thread(target=collect)
    reader.start()
    wire.send(frame)
    wire.close()
    reader.join()
    far.close()
    return bytes(collected)


@pytest.mark.parametrize("size", [0, 1, 8, 70_000, CHUNK, 3 * CHUNK + 12_345])
def test_a_frame_arrives_as_it_was_sent(ends: tuple[Wire, socket.socket], size: int) -> None:
    wire, far = ends
    payload = np.random.default_rng(size).bytes(size)
    other = Wire(far)
    sender = threading.Thread(target=other.send, args=(Frame(HEADER, payload),))
    sender.start()
    header, got = wire.receive(large=Large(Kind.GRAD, size))
    sender.join()
    assert (header.kind, header.epoch, header.step, header.length) == (Kind.GRAD, 3, 2**40, size)
    assert got == payload
    assert wire.bytes_in == other.bytes_out


@pytest.mark.parametrize("cuts", [(16,), (16, CHUNK), (5, 6, 7, CHUNK + 3, 2 * CHUNK)])
def test_parts_and_a_precomputed_checksum_do_not_change_the_bytes_sent(cuts: tuple[int, ...]) -> None:
    payload = np.random.default_rng(0).bytes(2 * CHUNK + 99)
    edges = [0, *cuts, len(payload)]
    parts = [payload[a:b] for a, b in itertools.pairwise(edges)]
    whole = sent_bytes(Frame(HEADER, payload))
    assert sent_bytes(Frame(HEADER, *parts)) == whole
    assert sent_bytes(Frame(HEADER, *parts).checksummed()) == whole


@pytest.mark.parametrize("place", [6, 20, 40, 40 + CHUNK // 2, 40 + 2 * CHUNK, -1])
def test_one_changed_bit_anywhere_breaks_a_frame(ends: tuple[Wire, socket.socket], place: int) -> None:
    wire, far = ends
    data = bytearray(sent_bytes(Frame(HEADER, bytes(2 * CHUNK + 500))))
    data[place] ^= 1
    threading.Thread(target=far.sendall, args=(bytes(data),)).start()
    with pytest.raises(BrokenFrame):
        wire.receive(large=Large(Kind.GRAD, 2 * CHUNK + 500))


@pytest.mark.parametrize("kept", [1, 31, 32, 100, -1])
def test_half_a_frame_is_broken(ends: tuple[Wire, socket.socket], kept: int) -> None:
    wire, far = ends
    far.sendall(sent_bytes(Frame(HEADER, bytes(200)))[:kept])
    far.close()
    with pytest.raises(BrokenFrame, match="closed in the middle"):
        wire.receive(large=Large(Kind.GRAD, 200))


def test_a_connection_that_closes_between_two_frames_is_not_broken(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    far.close()
    with pytest.raises(EOFError):
        wire.receive(large=Large(Kind.GRAD, 200))


@pytest.mark.parametrize("length", [201, 4 * 2**30, 2**63])
def test_a_length_beyond_the_limit_is_refused_before_anything_is_allocated(
    ends: tuple[Wire, socket.socket], length: int
) -> None:
    wire, far = ends
    far.sendall(Header(kind=Kind.GRAD, length=length).pack())
    with pytest.raises(BrokenFrame, match=f"{length} bytes exceeds the limit of 200"):
        wire.receive(large=Large(Kind.GRAD, 200, lambda header: pytest.fail("room was asked for")))


def test_a_kind_that_is_not_expected_is_refused(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    far.sendall(sent_bytes(control_frame(Kind.QUIT)))
    with pytest.raises(BrokenFrame, match="QUIT is not expected"):
        wire.receive(large=Large(Kind.GRAD, 200))


def test_garbage_is_not_a_frame() -> None:
    with pytest.raises(BrokenFrame, match="not a frame of this protocol"):
        unpack(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\n"[:HEADER_BYTES])


def test_a_frame_of_an_unknown_kind_is_broken() -> None:
    data = bytearray(HEADER.pack())
    data[5] = 200
    with pytest.raises(BrokenFrame, match="unknown kind"):
        unpack(data)


def test_another_version_has_its_own_error() -> None:
    data = bytearray(HEADER.pack())
    data[4] = VERSION + 1
    with pytest.raises(OtherVersion, match=f"version {VERSION + 1} of the protocol, this one version {VERSION}"):
        unpack(data)


def test_heartbeats_are_sent_while_a_long_frame_arrives() -> None:
    clock = itertools.count(step=0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = Wire(socket.create_connection(server.getsockname()))
        far = Wire(server.accept()[0], now=lambda: float(next(clock)))
    near.set_timeout(30)
    for sign, length, signs in [
        (None, 40 * CHUNK, 0),
        (control_frame(Kind.PING), CHUNK - 1, 0),
        (control_frame(Kind.PING), 40 * CHUNK, 1),
    ]:
        far.heartbeat = sign
        sender = threading.Thread(target=near.send, args=(Frame(HEADER, bytes(length)),))
        sender.start()
        far.receive(large=Large(Kind.GRAD, length))
        sender.join()
        far.send(control_frame(Kind.QUIT))
        heard = 0
        while near.receive(Kind.PING, Kind.QUIT)[0].kind is Kind.PING:
            heard += 1
        assert heard >= signs
        assert bool(heard) == bool(signs)
    near.close()
    far.close()


def test_close_waits_for_the_calls_of_other_threads() -> None:
    """Otherwise the call could continue on the next connection that gets the same descriptor."""

    class Slow:
        """Socket of a thread that is not scheduled for a while."""

        def __init__(self) -> None:
            self.inside, self.down, self.found = threading.Event(), threading.Event(), ""

        def setsockopt(self, *_: object) -> None: ...

        def shutdown(self, _: int) -> None:
            self.down.set()

        def recv_into(self, _: memoryview) -> int:
            self.inside.set()
            assert self.down.wait(30)
            time.sleep(0.2)
            self.found += "open "
            return 0

        def close(self) -> None:
            self.found += "closed"

    slow = Slow()
    wire = Wire(slow)  # type: ignore[arg-type]

    def receive() -> None:
        with pytest.raises(EOFError):
            wire.receive(large=Large(Kind.GRAD, 0))

    reader = threading.Thread(target=receive)
    reader.start()
    assert slow.inside.wait(30)
    wire.close()
    reader.join()
    assert slow.found == "open closed"
