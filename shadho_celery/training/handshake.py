"""How coordinator and replica come to know one another: both prove the trial's token, neither sends it.

The coordinator says HELLO with a nonce. The replica answers HELLO with a nonce of its own, the HMAC-SHA256 of both
under the token, and what it is: its rank, and a digest of its model and settings. The coordinator answers WELCOME with
its own HMAC, or QUIT with the reason. Nothing that comes before that is longer than 4 KiB.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from shadho_celery.errors import ShadhoError
from shadho_celery.training.frames import (
    CONTROL_BYTES,
    BrokenFrame,
    Frame,
    Kind,
    OtherVersion,
    Wire,
    content_of,
    control,
    control_limits,
    small_room,
)

#: seconds that all of it may take
HANDSHAKE_SECONDS = 10.0
#: of a reason: characters, and bytes of its JSON beside what else a QUIT says
LONGEST_REASON = (1000, CONTROL_BYTES - 96)


class Refused(ShadhoError):
    """The coordinator does not take this replica; both must run the same objective, with the same token."""


class Over(Exception):
    """The training is over for this replica; its message says why."""


def make_token() -> str:
    """A secret for one trial."""
    return secrets.token_hex(16)


def proof(token: str, role: str, first: str, second: str) -> str:
    """What only somebody with the token can say of these two nonces, in this role."""
    return hmac.new(token.encode(), _encoded(f"{role}:{first}:{second}"), "sha256").hexdigest()


def farewell(reason: str, *, error: bool = False, epoch: int = 0) -> Frame:
    """QUIT with as much of its reason as a control frame holds."""
    characters, most = LONGEST_REASON
    lengths = accumulate(len(json.dumps(each)) - 2 for each in reason[:characters])
    said = reason[: sum(length <= most for length in lengths)]
    return control(Kind.QUIT, {"reason": said, "error": error}, epoch=epoch)


def _encoded(text: str) -> bytes:
    """Whatever JSON makes a text of: halves of surrogate pairs too."""
    return text.encode(errors="surrogatepass")


def receive_hello(
    wire: Wire, token: str, admit: Callable[[dict[str, Any]], Mapping[str, Any]], epoch: int
) -> dict[str, Any]:
    """The coordinator's part: return the replica's HELLO once `admit` has made its WELCOME of it.

    `admit` raises Refused, or Over, to turn it away. Raises those, BrokenFrame, EOFError and OSError.
    """
    wire.timeout(HANDSHAKE_SECONDS)
    nonce = secrets.token_hex(16)
    wire.send(control(Kind.HELLO, {"nonce": nonce}, epoch=epoch))
    try:
        hello = content_of(wire.receive(control_limits(Kind.HELLO), small_room)[1])
        theirs, said = hello.get("nonce"), hello.get("proof")
        if not isinstance(theirs, str) or not isinstance(said, str):
            raise BrokenFrame("HELLO without a nonce or a proof")
        # Bytes: `compare_digest` takes no text beyond ASCII.
        if not hmac.compare_digest(_encoded(said), proof(token, "replica", nonce, theirs).encode()):
            raise Refused("the token is wrong: this replica belongs to another trial or attempt; start it anew")
        welcome = admit(hello)
    except (Refused, Over, OtherVersion) as error:
        _turn_away(wire, error, epoch)
        raise
    answer = {**welcome, "proof": proof(token, "coordinator", theirs, nonce)}
    wire.send(control(Kind.WELCOME, answer, epoch=epoch))
    wire.timeout(None)
    return hello


def _turn_away(wire: Wire, error: Exception, epoch: int) -> None:
    try:
        wire.send(farewell(str(error), error=not isinstance(error, Over), epoch=epoch))
        wire.finish()
    except OSError:
        pass


def say_hello(wire: Wire, token: str, hello: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The replica's part: return the epoch and the WELCOME.

    Raises Refused, Over where it is not needed any more, BrokenFrame, EOFError and OSError.
    """
    wire.timeout(HANDSHAKE_SECONDS)
    try:
        theirs = content_of(wire.receive(control_limits(Kind.HELLO, Kind.QUIT), small_room)[1]).get("nonce")
        if not isinstance(theirs, str):
            raise BrokenFrame("HELLO without a nonce")
        nonce = secrets.token_hex(16)
        said = {**hello, "nonce": nonce, "proof": proof(token, "replica", theirs, nonce)}
        wire.send(control(Kind.HELLO, said))
        header, payload = wire.receive(control_limits(Kind.WELCOME, Kind.QUIT), small_room)
    except OtherVersion as error:
        raise Refused(f"{error}; install the same shadho_celery on both machines") from None
    content = content_of(payload)
    if header.kind is Kind.QUIT:
        reason = str(content.get("reason", "no reason given"))
        raise Refused(reason) if content.get("error") else Over(reason)
    expected = proof(token, "coordinator", nonce, theirs)
    if not hmac.compare_digest(_encoded(str(content.get("proof"))), expected.encode()):
        raise Refused("whoever listens there does not know the trial's token; check the coordinator's address")
    wire.timeout(None)
    return header.epoch, content
