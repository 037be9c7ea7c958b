"""Handshake of a gang: mutual authentication by challenge and response. Neither end sends the token.

1. The coordinator sends HELLO with a nonce.

2. The replica answers HELLO with its own nonce, the HMAC-SHA256 of both nonces under the token, its rank and the digest
of its model and settings.

3. The coordinator answers WELCOME with its own HMAC, or QUIT with the reason.

No payload before WELCOME is longer than 4 KiB. Without a proof, an end accepts nothing except the reason in a QUIT.

The handshake is in plain text. If the gang is encrypted, later frames have another format (`encryption`), whose key
depends on the handshake. So if somebody has changed the handshake, the two ends cannot read each other's frames.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.checks import one_line, resolve
from shadho_celery.errors import ShadhoError
from shadho_celery.training.wire.frames import BrokenFrame, Buffer, Frame, Kind, OtherVersion, Wire, control_frame

#: time limit of the whole handshake in seconds
HANDSHAKE_SECONDS = 10.0
#: maximum characters of a QUIT's reason, each of at most four bytes
MAX_REASON = 900

Number = Annotated[int, Meta(ge=0)]
Record = TypeVar("Record", bound=Struct)


class Refused(ShadhoError):
    """The coordinator does not admit this replica. Both must run the same objective with the same token."""


class TrainingOver(Exception):
    """The training has ended for this replica. The message gives the reason."""


class Challenge(Struct, frozen=True, kw_only=True):
    """Content of the coordinator's HELLO."""

    nonce: str


class Hello(Struct, frozen=True, kw_only=True):
    """Content of a replica's HELLO."""

    #: the replica's rank in its gang
    rank: Number
    #: digest of model, batches and settings, which must equal the coordinator's digest
    digest: str
    #: True if the frames after the handshake will be encrypted; the coordinator must have the same value
    encrypted: bool = False
    #: the replica's own nonce, and HMAC of its role and both nonces under the token, in hexadecimal digits
    nonce: str = ""
    proof: str = ""


class Welcome(Struct, frozen=True, kw_only=True):
    """Content of the coordinator's WELCOME. It has no settings, because the replica runs the same objective."""

    #: HMAC of the coordinator's role and both nonces
    proof: str
    #: the replica's position in the gang, from 0; connected replicas have different places
    place: Number


class Quit(Struct, frozen=True, kw_only=True):
    """Content of a QUIT, with which either end announces the end of the connection."""

    reason: str = "no reason given"
    #: True if the reason is an error and not the normal end of a training
    error: bool = False

    @classmethod
    def read(cls, payload: Buffer) -> Quit:
        """Return the record of a QUIT. Raises BrokenFrame."""
        return parse(payload, cls, Kind.QUIT)

    def frame(self, epoch: int = 0) -> Frame:
        """Return the QUIT frame. The reason becomes one line, which is cut if it is too long for a control frame."""
        return control_frame(Kind.QUIT, replace(self, reason=one_line(self.reason, MAX_REASON)), epoch=epoch)

    def exception(self) -> Refused | TrainingOver:
        """Return the exception that a replica raises when it receives this QUIT: Refused after an error, else
        TrainingOver.
        """
        return Refused(self.reason) if self.error else TrainingOver(self.reason)


# Resolve the types now, because several threads decode these records at the same time.
resolve(Challenge, Hello, Welcome, Quit)


def proof_of(token: str, role: str, first: str, second: str) -> str:
    """Return the HMAC of a role and both nonces, with the token as the key."""
    return hmac.new(token.encode(), f"{role}:{first}:{second}".encode(), "sha256").hexdigest()


def parse(payload: Buffer, record: type[Record], kind: Kind) -> Record:
    """Decode the JSON of a control frame. Raises BrokenFrame with the name of an invalid field."""
    try:
        return msgspec.json.decode(payload, type=record)
    except (ValueError, RecursionError) as error:
        raise BrokenFrame(f"{kind.name} is not valid: {error}") from None


def receive_hello(wire: Wire, token: str, admit: Callable[[Hello], int], epoch: int) -> Hello:
    """Do the handshake as the coordinator. Return the replica's HELLO after WELCOME was sent.

    `admit` returns the replica's place, or raises Refused or TrainingOver to reject it. Raises Refused, TrainingOver,
    BrokenFrame, EOFError and OSError.
    """
    wire.set_timeout(HANDSHAKE_SECONDS)
    nonce = secrets.token_hex(16)
    challenge = control_frame(Kind.HELLO, Challenge(nonce=nonce), epoch=epoch)
    wire.send(challenge)
    try:
        said = Frame(*wire.receive(Kind.HELLO))
        hello = parse(said.parts[0], Hello, Kind.HELLO)
        if not _is_proof(hello.proof, proof_of(token, "replica", nonce, hello.nonce)):
            raise Refused("the token is wrong: this replica belongs to another trial or attempt; start it again")
        welcome = Welcome(proof=proof_of(token, "coordinator", hello.nonce, nonce), place=admit(hello))
    except (Refused, TrainingOver, OtherVersion) as error:
        with suppress(OSError):
            wire.send(Quit(reason=str(error), error=not isinstance(error, TrainingOver)).frame(epoch))
            wire.finish()
        raise
    final = control_frame(Kind.WELCOME, welcome, epoch=epoch)
    wire.send(final)
    if hello.encrypted:
        _encrypt(wire, token, challenge, said, final, is_coordinator=True)
    wire.set_timeout(None)
    return hello


def say_hello(wire: Wire, token: str, hello: Hello) -> tuple[int, int]:
    """Do the handshake as the replica. Return the coordinator's epoch and the replica's place.

    Raises Refused, TrainingOver if the gang needs no more replicas, BrokenFrame, EOFError and OSError.
    """
    wire.set_timeout(HANDSHAKE_SECONDS)
    try:
        challenge = Frame(*wire.receive(Kind.HELLO))
        theirs = parse(challenge.parts[0], Challenge, Kind.HELLO).nonce
        nonce = secrets.token_hex(16)
        proved = replace(hello, nonce=nonce, proof=proof_of(token, "replica", theirs, nonce))
        said = control_frame(Kind.HELLO, proved)
        wire.send(said)
        header, payload = wire.receive(Kind.WELCOME, Kind.QUIT)
    except OtherVersion as error:
        raise Refused(f"{error}; install the same shadho_celery on both machines") from None
    if header.kind is Kind.QUIT:
        raise Quit.read(payload).exception()
    welcome = parse(payload, Welcome, Kind.WELCOME)
    if not _is_proof(welcome.proof, proof_of(token, "coordinator", nonce, theirs)):
        raise Refused("the program at that address does not know the trial's token; check the coordinator's address")
    if hello.encrypted:
        _encrypt(wire, token, challenge, said, Frame(header, payload), is_coordinator=False)
    wire.set_timeout(None)
    return header.epoch, welcome.place


def _encrypt(wire: Wire, token: str, *handshake: Frame, is_coordinator: bool) -> None:
    """Use encryption for the following frames of a connection, in both directions."""
    # Imported here because `cryptography` need not be installed without a signing key.
    from shadho_celery.training.wire.encryption import Encrypted

    said = b"".join(b"".join([frame.head, *frame.parts]) for frame in handshake)
    wire.form = Encrypted(token, said, is_coordinator=is_coordinator)


def _is_proof(claimed: str, expected: str) -> bool:
    # Compare bytes, because `compare_digest` raises an error for text that is not ASCII.
    return hmac.compare_digest(claimed.encode(), expected.encode())
