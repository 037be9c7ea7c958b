"""Frames arrive unchanged, plain or encrypted, or the connection ends with BrokenFrame. Nobody between reads one."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from shadho_celery.training.wire.encryption import TAG_BYTES, Encrypted
from shadho_celery.training.wire.frames import (
    CHUNK,
    HEADER_BYTES,
    VERSION,
    BrokenFrame,
    Clear,
    Frame,
    Header,
    Kind,
    Large,
    OtherVersion,
    Wire,
    control_frame,
    unpack,
)

TOKEN = "secret"
HEADER = Header(kind=Kind.GRAD, epoch=3, step=2**40)
#: places of bytes in what is sent for an encrypted frame of two pieces and a half
FIRST = HEADER_BYTES + TAG_BYTES
SECOND = FIRST + CHUNK + TAG_BYTES
LENGTH = 2 * CHUNK + 500
encrypted = pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])


def coordinator(token: str = TOKEN, handshake: bytes = b"hello") -> Encrypted:
    return Encrypted(token, handshake, is_coordinator=True)


def replica(token: str = TOKEN, handshake: bytes = b"hello") -> Encrypted:
    return Encrypted(token, handshake, is_coordinator=False)


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


def sent_bytes(frame: Frame, form: Clear | None = None) -> bytes:
    """Return the bytes that are sent for a frame."""
    return b"".join(bytes(piece) for piece in (form or Clear()).pieces(frame))


def give(far: socket.socket, data: bytes) -> threading.Thread:
    def send() -> None:
        # The wire may be closed before it has read all of it.
        with suppress(OSError):
            far.sendall(data)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


@encrypted
@pytest.mark.parametrize("size", [0, 1, 8, 70_000, CHUNK, 3 * CHUNK + 12_345])
def test_a_frame_arrives_as_it_was_sent(ends: tuple[Wire, socket.socket], size: int, *, encrypted: bool) -> None:
    wire, far = ends
    payload = np.random.default_rng(size).bytes(size)
    other = Wire(far)
    if encrypted:
        wire.form, other.form = coordinator(), replica()
    for _ in range(2):
        sender = threading.Thread(target=other.send, args=(Frame(HEADER, payload[:5], payload[5:]),))
        sender.start()
        header, got = wire.receive(large=Large(Kind.GRAD, size))
        sender.join()
        assert (header.kind, header.epoch, header.step, header.length) == (Kind.GRAD, 3, 2**40, size)
        assert got == payload
    assert wire.bytes_in == other.bytes_out


@pytest.mark.parametrize("cuts", [(16,), (16, CHUNK), (5, 6, 7, CHUNK + 3, 2 * CHUNK)])
def test_parts_and_sending_twice_do_not_change_the_bytes_sent(cuts: tuple[int, ...]) -> None:
    payload = np.random.default_rng(0).bytes(2 * CHUNK + 99)
    edges = [0, *cuts, len(payload)]
    parts = [payload[a:b] for a, b in itertools.pairwise(edges)]
    whole, frame = sent_bytes(Frame(HEADER, payload)), Frame(HEADER, *parts)
    assert [sent_bytes(frame), sent_bytes(frame)] == [whole, whole]


@pytest.mark.parametrize("place", [6, 20, 40, 40 + CHUNK // 2, 40 + 2 * CHUNK, -1])
def test_one_changed_bit_anywhere_breaks_a_frame(ends: tuple[Wire, socket.socket], place: int) -> None:
    wire, far = ends
    data = bytearray(sent_bytes(Frame(HEADER, bytes(LENGTH))))
    data[place] ^= 1
    give(far, bytes(data))
    with pytest.raises(BrokenFrame):
        wire.receive(large=Large(Kind.GRAD, LENGTH))


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


# Encryption


def test_neither_payload_nor_header_nor_token_is_among_the_bytes_sent() -> None:
    vector = np.random.default_rng(0).standard_normal(CHUNK, np.float32).tobytes()
    frame = Frame(HEADER, vector)
    sent = sent_bytes(frame, coordinator())
    assert frame.head[:4] not in sent
    assert TOKEN.encode() not in sent
    # Any eight bytes of it: three million places and as many pieces make a chance hit as good as impossible.
    assert not any(vector[at : at + 8] in sent for at in range(0, len(vector), len(vector) // 200))


@pytest.mark.parametrize(
    "place", [0, 6, HEADER_BYTES, FIRST, FIRST + CHUNK // 2, FIRST + CHUNK, SECOND + 1, -TAG_BYTES - 1, -1]
)
def test_one_changed_bit_anywhere_ends_the_connection_in_one_line(ends: tuple[Wire, socket.socket], place: int) -> None:
    wire, far = ends
    wire.form = coordinator()
    data = bytearray(sent_bytes(Frame(HEADER, bytes(LENGTH)), replica()))
    data[place] ^= 1
    sender = give(far, bytes(data))
    with pytest.raises(BrokenFrame, match="a frame is not authentic: it was changed on its way") as caught:
        wire.receive(large=Large(Kind.GRAD, LENGTH))
    assert "\n" not in str(caught.value)
    wire.close()
    sender.join(30)


def test_a_header_that_is_changed_is_not_used(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    wire.form = coordinator()
    data = bytearray(sent_bytes(Frame(HEADER, b"abc"), replica()))
    data[30] ^= 1
    far.sendall(data)
    with pytest.raises(BrokenFrame, match="not authentic"):
        wire.receive(large=Large(Kind.GRAD, 2**62, lambda header: pytest.fail("room was asked for")))


@pytest.mark.parametrize("order", [(0, 0), (1,), (1, 0)], ids=["repeated", "left out", "moved"])
def test_a_frame_that_is_repeated_left_out_or_moved_ends_the_connection(
    ends: tuple[Wire, socket.socket], order: tuple[int, ...]
) -> None:
    wire, far = ends
    wire.form = coordinator()
    form = replica()
    frames = [sent_bytes(control_frame(Kind.PING, step=step), form) for step in (0, 1)]
    far.sendall(b"".join(frames[number] for number in order))
    if order[0] == 0:
        assert wire.receive(Kind.PING)[0].step == 0
    with pytest.raises(BrokenFrame, match="not authentic"):
        wire.receive(Kind.PING)


def test_pieces_of_one_frame_cannot_change_places(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    wire.form = coordinator()
    data = sent_bytes(Frame(HEADER, bytes(2 * CHUNK)), replica())
    sender = give(far, data[:FIRST] + data[SECOND:] + data[FIRST:SECOND])
    with pytest.raises(BrokenFrame, match="not authentic"):
        wire.receive(large=Large(Kind.GRAD, 2 * CHUNK))
    wire.close()
    sender.join(30)


@pytest.mark.parametrize(
    "form",
    [coordinator(), replica(token="another"), replica(handshake=b"other nonces")],
    ids=["reflected", "another token", "another connection"],
)
def test_a_frame_of_another_direction_token_or_connection_is_not_authentic(
    ends: tuple[Wire, socket.socket], form: Encrypted
) -> None:
    wire, far = ends
    wire.form = coordinator()
    far.sendall(sent_bytes(control_frame(Kind.PING), form))
    with pytest.raises(BrokenFrame, match="not authentic"):
        wire.receive(Kind.PING)


def test_no_nonce_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In either direction, over frames with and without payload."""
    nonces: list[bytes] = []

    class Noting:
        def __init__(self, key: bytes) -> None:
            assert len(key) == 32

        def encrypt(self, nonce: bytes, data: bytes, more: None) -> bytes:
            nonces.append(nonce)
            return b""

        def encrypt_into(self, nonce: bytes, data: bytes, more: None, out: memoryview) -> None:
            nonces.append(nonce)

    monkeypatch.setattr("shadho_celery.training.wire.encryption.AESGCM", Noting)
    for form in (coordinator(), replica()):
        for size in (0, 1, 3 * CHUNK, 0):
            sent_bytes(Frame(HEADER, bytes(size)), form)
    assert len(nonces) == 2 * 8
    assert len(set(nonces)) == len(nonces)
    assert {len(nonce) for nonce in nonces} == {12}
