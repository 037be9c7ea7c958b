"""Encryption of a connection's frames by AES-256-GCM. Its authentication replaces the checksum.

::

    header 28s | tag 16s | piece of the payload, up to 1 MiB | tag 16s | next piece | tag 16s | ...

The session key is HKDF-SHA256 of the gang's token, salted with the hash of the whole handshake, including both nonces.
The nonce of a piece consists of its direction and the number of pieces sent before it, so no nonce is used twice with a
key. Authentication fails if a piece is changed, repeated, left out or moved. The header is authenticated before it is
used.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shadho_celery.training.wire.frames import CHUNK, HEADER_BYTES, SMALL_FRAME, BrokenFrame, Buffer, Clear, Frame

#: bytes of the session key
KEY_BYTES = 32
#: bytes of GCM's tag
TAG_BYTES = 16

#: format of a nonce: direction, and number of the piece
_NONCE = struct.Struct(">B3xQ")


class Encrypted(Clear):
    """Format of the frames of one encrypted connection, used after its handshake."""

    def __init__(self, token: str, handshake: bytes, *, is_coordinator: bool) -> None:
        """`handshake` is the concatenation of all frames of the handshake, which must be the same at both ends."""
        salt = hashlib.sha256(handshake).digest()
        key = HKDF(SHA256(), KEY_BYTES, salt, b"shadho training bus").derive(token.encode())
        self._cipher = AESGCM(key)
        self._sent, self._received = _nonces(is_coordinator), _nonces(not is_coordinator)
        self.head, self.tail = memoryview(bytearray(HEADER_BYTES + TAG_BYTES)), memoryview(b"")
        #: memory for an encrypted piece in each direction; allocating it for each piece would cost a third of the speed
        self._outward, self._inward = (memoryview(bytearray(CHUNK + TAG_BYTES)) for _ in range(2))

    def pieces(self, frame: Frame) -> Iterator[Buffer]:
        yield self._cipher.encrypt(next(self._sent), frame.head, None)
        for chunk in frame.chunks():
            if len(chunk) <= SMALL_FRAME:
                yield self._cipher.encrypt(next(self._sent), chunk, None)
            else:
                out = self._outward[: len(chunk) + TAG_BYTES]
                self._cipher.encrypt_into(next(self._sent), chunk, None, out)
                yield out

    def room(self, piece: memoryview) -> memoryview:
        return self._inward[: len(piece) + TAG_BYTES]

    def read_head(self) -> Buffer:
        header = memoryview(bytearray(HEADER_BYTES))
        self._decrypt(self.head, header)
        return header

    def read(self, piece: memoryview) -> None:
        self._decrypt(self.room(piece), piece)

    def read_tail(self) -> None:
        """Do nothing: each piece has its own tag."""

    def _decrypt(self, data: memoryview, into: memoryview) -> None:
        try:
            self._cipher.decrypt_into(next(self._received), data, None, into)
        except InvalidTag:
            raise BrokenFrame(
                "a frame is not authentic: it was changed on its way, or the two ends have different tokens"
            ) from None


def _nonces(of_coordinator: bool) -> Iterator[bytes]:
    """Yield the nonces of one direction."""
    for number in range(2**64):
        yield _NONCE.pack(of_coordinator, number)
