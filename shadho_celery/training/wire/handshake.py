"""Mutual authentication of coordinator and replica by challenge and response. Neither end sends the token.

1. The coordinator sends HELLO with a nonce.

2. The replica answers HELLO with its own nonce, the HMAC-SHA256 of both nonces under the token, its rank and the digest
of its model and settings.

3. The coordinator answers WELCOME with its own HMAC, or QUIT with the reason.

No frame before WELCOME is longer than 4 KiB. Nonce and proof are checked before any other field is read. Only the
reason of a QUIT is accepted without proof.

The handshake is in plain text. If the gang is encrypted, everything after it is encrypted with a key that depends on
the handshake. If the two ends saw different handshakes, they cannot read what follows.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable
from itertools import accumulate
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from shadho_celery.core.checks import resolve
from shadho_celery.errors import ShadhoError
from shadho_celery.training.wire.frames import (
    CONTROL_BYTES,
    BrokenFrame,
    Buffer,
    Frame,
    Kind,
    OtherVersion,
    Wire,
    control_content,
    control_frame,
    control_limits,
    small_buffer,
)

#: time limit of the whole handshake in seconds
HANDSHAKE_SECONDS = 10.0
#: maximum length of a QUIT's reason, in characters and in bytes of its JSON; the other fields take less than 96 bytes
MAX_REASON = (1000, CONTROL_BYTES - 96)

Number = Annotated[int, Meta(ge=0)]
Record = TypeVar("Record", bound=Struct)


class Refused(ShadhoError):
    """The coordinator does not admit this replica. Both must run the same objective with the same token."""


class TrainingOver(Exception):
    """End of the training for this replica. The message gives the reason."""


class Challenge(Struct, frozen=True, kw_only=True):
    """HELLO of the coordinator."""

    nonce: str


class Proof(Struct, frozen=True, kw_only=True):
    """Fields of a replica's HELLO that are read before it is authenticated."""

    nonce: str
    #: HMAC of the role and both nonces under the token, in hexadecimal digits
    proof: str


class Hello(Struct, frozen=True, kw_only=True):
    """Fields of a replica's HELLO that are read after it is authenticated."""

    #: number of the replica in its gang
    rank: Number
    #: digest of model, batches and settings, which must be equal at both ends
    digest: str
    #: True if the frames after the handshake will be encrypted, which must be equal at both ends
    encrypted: bool = False


class Welcome(Struct, frozen=True, kw_only=True):
    """Admission of a replica. It knows all settings, because it runs the same objective with the same digest."""

    #: position in the gang, from 0; no two connected replicas have the same
    place: Number


class Quit(Struct, frozen=True, kw_only=True):
    """End of a connection, announced by either end."""

    reason: str = "no reason given"
    #: True if the reason is an error and not the normal end of a training
    error: bool = False

    def exception(self) -> Refused | TrainingOver:
        """Return the exception by which a replica ends that receives this QUIT."""
        return Refused(self.reason) if self.error else TrainingOver(self.reason)


# Replicas that connect at the same time are admitted by one thread each.
resolve(Challenge, Proof, Hello, Welcome, Quit)


def make_token() -> str:
    """Return a new random token for a trial's gang."""
    return secrets.token_hex(32)


def proof_of(token: str, role: str, first: str, second: str) -> str:
    """Return the HMAC of a role and both nonces under the token."""
    return hmac.new(token.encode(), _encoded(f"{role}:{first}:{second}"), "sha256").hexdigest()


def parse(content: dict[str, object], record: type[Record], kind: Kind) -> Record:
    """Convert the JSON of a control frame to its record. Raises BrokenFrame, which names the field."""
    try:
        return msgspec.convert(content, record)
    except msgspec.ValidationError as error:
        raise BrokenFrame(f"{kind.name} has a wrong field: {error}") from None


def parse_quit(payload: Buffer) -> Quit:
    """Return the record of a QUIT. Raises BrokenFrame."""
    return parse(control_content(payload), Quit, Kind.QUIT)


def quit_frame(reason: str, *, error: bool = False, epoch: int = 0) -> Frame:
    """Return a QUIT frame. The reason is cut if it is too long for a control frame."""
    characters, most_bytes = MAX_REASON
    lengths = accumulate(len(json.dumps(each)) - 2 for each in reason[:characters])
    cut = reason[: sum(length <= most_bytes for length in lengths)]
    return control_frame(Kind.QUIT, _content(Quit(reason=cut, error=error)), epoch=epoch)


def receive_hello(wire: Wire, token: str, admit: Callable[[Hello], int], epoch: int) -> Hello:
    """Act as the coordinator. Return the replica's HELLO after its WELCOME is sent.

    `admit` returns the replica's place, or raises Refused or TrainingOver to reject it. Raises Refused, TrainingOver,
    BrokenFrame, EOFError and OSError.
    """
    wire.set_timeout(HANDSHAKE_SECONDS)
    nonce = secrets.token_hex(16)
    challenge = control_frame(Kind.HELLO, _content(Challenge(nonce=nonce)), epoch=epoch)
    wire.send(challenge)
    try:
        said = Frame(*wire.receive(control_limits(Kind.HELLO), small_buffer))
        content = control_content(said.parts[0])
        offered = parse(content, Proof, Kind.HELLO)
        if not _is_proof(offered.proof, proof_of(token, "replica", nonce, offered.nonce)):
            raise Refused("the token is wrong: this replica belongs to another trial or attempt; start it again")
        hello = parse(content, Hello, Kind.HELLO)
        welcome = Welcome(place=admit(hello))
    except (Refused, TrainingOver, OtherVersion) as error:
        _turn_away(wire, error, epoch)
        raise
    answer = {**_content(welcome), "proof": proof_of(token, "coordinator", offered.nonce, nonce)}
    final = control_frame(Kind.WELCOME, answer, epoch=epoch)
    wire.send(final)
    if hello.encrypted:
        _encrypt(wire, token, challenge, said, final, is_coordinator=True)
    wire.set_timeout(None)
    return hello


def say_hello(wire: Wire, token: str, hello: Hello) -> tuple[int, int]:
    """Act as the replica. Return the epoch and the place.

    Raises Refused, TrainingOver if the gang needs no more replicas, BrokenFrame, EOFError and OSError.
    """
    wire.set_timeout(HANDSHAKE_SECONDS)
    try:
        challenge = Frame(*wire.receive(control_limits(Kind.HELLO), small_buffer))
        theirs = parse(control_content(challenge.parts[0]), Challenge, Kind.HELLO).nonce
        nonce = secrets.token_hex(16)
        proof = Proof(nonce=nonce, proof=proof_of(token, "replica", theirs, nonce))
        said = control_frame(Kind.HELLO, _content(hello, proof))
        wire.send(said)
        header, payload = wire.receive(control_limits(Kind.WELCOME, Kind.QUIT), small_buffer)
    except OtherVersion as error:
        raise Refused(f"{error}; install the same shadho_celery on both machines") from None
    if header.kind is Kind.QUIT:
        raise parse_quit(payload).exception()
    content = control_content(payload)
    if not _is_proof(content.get("proof"), proof_of(token, "coordinator", nonce, theirs)):
        raise Refused("the program at that address does not know the trial's token; check the coordinator's address")
    welcome = parse(content, Welcome, Kind.WELCOME)
    if hello.encrypted:
        _encrypt(wire, token, challenge, said, Frame(header, payload), is_coordinator=False)
    wire.set_timeout(None)
    return header.epoch, welcome.place


def _encrypt(wire: Wire, token: str, *handshake: Frame, is_coordinator: bool) -> None:
    """Encrypt the wire's next frames, in both directions."""
    # Imported here because `cryptography` need not be installed without a signing key.
    from shadho_celery.training.wire.encryption import Encrypted

    said = b"".join(b"".join([frame.head, *frame.parts]) for frame in handshake)
    wire.form = Encrypted(token, said, is_coordinator=is_coordinator)


def _turn_away(wire: Wire, error: Exception, epoch: int) -> None:
    try:
        wire.send(quit_frame(str(error), error=not isinstance(error, TrainingOver), epoch=epoch))
        wire.finish()
    except OSError:
        pass


def _is_proof(claimed: object, expected: str) -> bool:
    # Compare bytes, because `compare_digest` accepts only text that is ASCII.
    return isinstance(claimed, str) and hmac.compare_digest(_encoded(claimed), expected.encode())


def _encoded(text: str) -> bytes:
    """Encode any text that JSON can contain, including unpaired surrogates."""
    return text.encode(errors="surrogatepass")


def _content(*records: Struct) -> dict[str, object]:
    return {name: value for record in records for name, value in msgspec.structs.asdict(record).items()}
