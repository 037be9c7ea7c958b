"""Encryption of frames: what arrives is what was sent, or the connection ends; nobody between the ends reads it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from shadho_celery.training.wire.encryption import TAG_BYTES, Encrypted
from shadho_celery.training.wire.frames import (
    CHUNK,
    HEADER_BYTES,
    BrokenFrame,
    Frame,
    Header,
    Kind,
    Large,
    Wire,
    control_frame,
)

TOKEN = "secret"
HEADER = Header(kind=Kind.GRAD, epoch=3, step=2**40)
SIZES = [0, 1, 8, 70_000, CHUNK, 3 * CHUNK + 12_345]
#: places of bytes in what is sent for a frame of two pieces and a half
FIRST = HEADER_BYTES + TAG_BYTES
SECOND = FIRST + CHUNK + TAG_BYTES
LENGTH = 2 * CHUNK + 500


def coordinator(token: str = TOKEN, handshake: bytes = b"hello") -> Encrypted:
    return Encrypted(token, handshake, is_coordinator=True)


def replica(token: str = TOKEN, handshake: bytes = b"hello") -> Encrypted:
    return Encrypted(token, handshake, is_coordinator=False)


def sent_bytes(form: Encrypted, frame: Frame) -> bytes:
    return b"".join(bytes(piece) for piece in form.pieces(frame))


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    """Yield the coordinator's encrypted wire, and the bare socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    wire = Wire(near)
    wire.set_timeout(30)
    wire.form = coordinator()
    yield wire, far
    wire.close()
    far.close()


def give(far: socket.socket, data: bytes) -> threading.Thread:
    def send() -> None:
        # The wire may be closed before it has read all of it.
        with suppress(OSError):
            far.sendall(data)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("size", SIZES)
def test_a_frame_arrives_as_it_was_sent(ends: tuple[Wire, socket.socket], size: int) -> None:
    wire, far = ends
    payload = np.random.default_rng(size).bytes(size)
    other = Wire(far)
    other.form = replica()
    for _ in range(2):
        sender = threading.Thread(target=other.send, args=(Frame(HEADER, payload[:5], payload[5:]),))
        sender.start()
        header, got = wire.receive(large=Large(Kind.GRAD, size))
        sender.join()
        assert (header.kind, header.epoch, header.step, header.length) == (Kind.GRAD, 3, 2**40, size)
        assert got == payload
    assert wire.bytes_in == other.bytes_out


def test_neither_payload_nor_header_nor_token_is_among_the_bytes_sent() -> None:
    vector = np.random.default_rng(0).standard_normal(CHUNK, np.float32).tobytes()
    frame = Frame(HEADER, vector)
    sent = sent_bytes(coordinator(), frame)
    assert frame.head[:4] not in sent
    assert TOKEN.encode() not in sent
    # Any eight bytes of it: three million places and as many pieces make a chance hit as good as impossible.
    assert not any(vector[at : at + 8] in sent for at in range(0, len(vector), len(vector) // 200))


@pytest.mark.parametrize(
    "place", [0, 6, HEADER_BYTES, FIRST, FIRST + CHUNK // 2, FIRST + CHUNK, SECOND + 1, -TAG_BYTES - 1, -1]
)
def test_one_changed_bit_anywhere_ends_the_connection_in_one_line(ends: tuple[Wire, socket.socket], place: int) -> None:
    wire, far = ends
    data = bytearray(sent_bytes(replica(), Frame(HEADER, bytes(LENGTH))))
    data[place] ^= 1
    sender = give(far, bytes(data))
    with pytest.raises(BrokenFrame, match="a frame is not authentic: it was changed on its way") as caught:
        wire.receive(large=Large(Kind.GRAD, LENGTH))
    assert "\n" not in str(caught.value)
    wire.close()
    sender.join(30)


def test_a_header_that_is_changed_is_not_used(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    data = bytearray(sent_bytes(replica(), Frame(HEADER, b"abc")))
    data[30] ^= 1
    far.sendall(data)
    with pytest.raises(BrokenFrame, match="not authentic"):
        wire.receive(large=Large(Kind.GRAD, 2**62, lambda header: pytest.fail("room was asked for")))


@pytest.mark.parametrize("order", [(0, 0), (1,), (1, 0)], ids=["repeated", "left out", "moved"])
def test_a_frame_that_is_repeated_left_out_or_moved_ends_the_connection(
    ends: tuple[Wire, socket.socket], order: tuple[int, ...]
) -> None:
    wire, far = ends
    form = replica()
    frames = [sent_bytes(form, control_frame(Kind.PING, step=step)) for step in (0, 1)]
    far.sendall(b"".join(frames[number] for number in order))
    if order[0] == 0:
        assert wire.receive(Kind.PING)[0].step == 0
    with pytest.raises(BrokenFrame, match="not authentic"):
        wire.receive(Kind.PING)


def test_pieces_of_one_frame_cannot_change_places(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    data = sent_bytes(replica(), Frame(HEADER, bytes(2 * CHUNK)))
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
    far.sendall(sent_bytes(form, control_frame(Kind.PING)))
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
            sent_bytes(form, Frame(HEADER, bytes(size)))
    assert len(nonces) == 2 * 8
    assert len(set(nonces)) == len(nonces)
    assert {len(nonce) for nonce in nonces} == {12}
