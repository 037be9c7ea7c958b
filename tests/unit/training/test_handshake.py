"""Handshake: both ends prove the token, and every other HELLO, WELCOME or QUIT ends in one clear error."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shadho_celery.training.wire.frames import BrokenFrame, Clear, Frame, Header, Kind, Wire, control_frame, unpack
from shadho_celery.training.wire.handshake import Hello, Quit, Refused, TrainingOver, proof_of, receive_hello, say_hello

TOKEN = "secret"
HELLO = Hello(rank=3, digest="same")
PLACE = 1


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    """Yield the wires of coordinator and replica."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = Wire(socket.create_connection(server.getsockname()))
        far = Wire(server.accept()[0])
    yield near, far
    near.close()
    far.close()


def admit(_: Hello) -> int:
    return PLACE


def in_the_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def content(wire: Wire, kind: Kind) -> dict[str, Any]:
    return json.loads(bytes(wire.receive(kind)[1]))  # type: ignore[no-any-return]


def proved(proof: object, nonce: object = "n", **fields: object) -> dict[str, object]:
    return {"nonce": nonce, "proof": proof, "rank": 0, "digest": "", **fields}


@pytest.mark.slow
def test_both_ends_prove_the_token_and_get_the_records_of_the_other(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    heard: list[tuple[int, int]] = []
    replica = in_the_background(lambda: heard.append(say_hello(far, TOKEN, HELLO)))
    said = receive_hello(near, TOKEN, admit, epoch=7)
    assert (said.rank, said.digest, said.encrypted) == (HELLO.rank, HELLO.digest, False)
    replica.join(30)
    assert heard == [(7, PLACE)]


def test_what_follows_the_handshake_of_an_encrypted_gang_is_read_by_its_two_ends_only(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    hello = Hello(rank=3, digest="same", encrypted=True)
    replica = in_the_background(lambda: say_hello(far, TOKEN, hello))
    assert receive_hello(near, TOKEN, admit, epoch=7).encrypted
    replica.join(30)
    for one, other in ((near, far), (far, near)):
        one.send(Quit(reason="over").frame())
        assert Quit.read(other.receive(Kind.QUIT)[1]).reason == "over"
    near.send(Quit(reason="over").frame())
    far.form = Clear()
    with pytest.raises(BrokenFrame, match="not a frame"):
        far.receive(Kind.QUIT)


@pytest.mark.parametrize("change", ["rank", "place"])
def test_a_handshake_that_is_changed_on_its_way_ends_an_encrypted_connection(
    ends: tuple[Wire, Wire], change: str
) -> None:
    """The session key is derived from the whole handshake: a relay cannot give a replica another seat or place."""
    near, far = ends
    frames = {"rank": Kind.HELLO, "place": Kind.WELCOME}

    def changed(wire: Wire) -> None:
        receive = wire.receive

        def receive_other(*arguments: Any) -> Any:
            header, payload = receive(*arguments)
            if header.kind is not frames[change] or b"proof" not in bytes(payload):
                return header, payload
            said = json.loads(bytes(payload))
            told = control_frame(header.kind, {**said, change: 17}, epoch=header.epoch)
            return unpack(told.head), told.parts[0]

        wire.receive = receive_other  # type: ignore[method-assign]

    changed(near if change == "rank" else far)
    replica = in_the_background(lambda: say_hello(far, TOKEN, Hello(rank=3, digest="same", encrypted=True)))
    receive_hello(near, TOKEN, admit, epoch=7)
    replica.join(30)
    near.send(control_frame(Kind.PING))
    with pytest.raises(BrokenFrame, match="not authentic"):
        far.receive(Kind.PING)


def test_neither_end_sends_the_token(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    coordinator = in_the_background(lambda: receive_hello(near, TOKEN, admit, epoch=1))
    theirs = content(far, Kind.HELLO)
    hello = proved(proof_of(TOKEN, "replica", theirs["nonce"], "n"))
    far.send(control_frame(Kind.HELLO, hello))
    welcome = content(far, Kind.WELCOME)
    coordinator.join(30)
    assert TOKEN not in str([theirs, hello, welcome])


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (b"", ""),
        (b"[1]", ""),
        (b'{"nonce":"\\ud800","proof":"x"}', ""),
        (b'{"nonce":"x","proof":"\xff"}', ""),
        (b'{"nonce":"x","more":' + b"[" * 2000 + b"]" * 2000 + b"}", ""),
        (b'{"rank":0,"digest":"","nonce":1}', "nonce"),
        (b'{"rank":-1,"digest":""}', "rank"),
        (b'{"rank":true,"digest":""}', "rank"),
        (b'{"digest":""}', "rank"),
    ],
    ids=["empty", "a list", "half a surrogate pair", "no UTF-8", "too deep", "number", "negative", "truth", "missing"],
)
def test_a_hello_that_is_no_record_is_broken_and_a_wrong_field_is_named(
    ends: tuple[Wire, Wire], payload: bytes, field: str
) -> None:
    near, far = ends
    far.send(Frame(Header(kind=Kind.HELLO), payload))
    with pytest.raises(BrokenFrame, match=f"HELLO is not valid: .*{field}"):
        receive_hello(near, TOKEN, admit, epoch=1)


@pytest.mark.parametrize("nonce", ["n", "é"])
@pytest.mark.parametrize("proof", ["", "b", "é"])
def test_a_replica_without_a_right_proof_is_refused(ends: tuple[Wire, Wire], proof: str, nonce: str) -> None:
    near, far = ends
    far.send(control_frame(Kind.HELLO, proved(proof, nonce)))
    with pytest.raises(Refused, match="token is wrong"):
        receive_hello(near, TOKEN, admit, epoch=1)


def answer(wire: Wire, welcome: dict[str, Any], proof: object = None) -> threading.Thread:
    """Run a coordinator that sends this WELCOME, with a right proof by default."""

    def coordinator() -> None:
        wire.send(control_frame(Kind.HELLO, {"nonce": "c"}))
        theirs = content(wire, Kind.HELLO)["nonce"]
        right = proof_of(TOKEN, "coordinator", theirs, "c")
        wire.send(control_frame(Kind.WELCOME, {"proof": right if proof is None else proof, **welcome}))

    return in_the_background(coordinator)


@pytest.mark.parametrize("proof", ["é", "0" * 64])
def test_a_replica_refuses_a_welcome_with_a_wrong_proof(ends: tuple[Wire, Wire], proof: str) -> None:
    near, far = ends
    coordinator = answer(near, {"place": 0}, proof)
    with pytest.raises(Refused, match="does not know the trial's token"):
        say_hello(far, TOKEN, HELLO)
    coordinator.join(30)


@pytest.mark.parametrize("value", [None, True], ids=["null", "truth value"])
def test_a_welcome_with_a_wrong_field_is_broken_and_the_field_is_named(ends: tuple[Wire, Wire], value: object) -> None:
    near, far = ends
    coordinator = answer(near, {"place": value})
    with pytest.raises(BrokenFrame, match=r"WELCOME is not valid: .*\$\.place"):
        say_hello(far, TOKEN, HELLO)
    coordinator.join(30)


def test_a_proof_is_of_one_role_and_both_nonces() -> None:
    proofs = {proof_of(TOKEN, role, *nonces) for role in ("replica", "coordinator") for nonces in ("ab", "ba", "aa")}
    assert len(proofs) == 6


@pytest.mark.parametrize("character", ["a", "é", "😀", '"', "\\"])
def test_the_quit_of_any_reason_fits_a_control_frame(character: str) -> None:
    frame = Quit(reason=character * 10_000, error=True).frame()
    assert len(frame.parts[0]) <= 4096
    parsed = Quit.read(frame.parts[0])
    assert parsed.error
    assert len(parsed.reason) >= 300
    assert set(parsed.reason) == {character, "."}


@pytest.mark.parametrize(("reason", "told"), [("no\nfile", "no file"), ("\ud800", "\\ud800"), ("\x1b[1m", "\\x1b[1m")])
def test_a_reason_is_one_printable_line(reason: str, told: str) -> None:
    assert Quit.read(Quit(reason=reason).frame().parts[0]).reason == told


def test_a_reason_that_fits_arrives_whole() -> None:
    assert Quit.read(Quit(reason="ValueError: größer als 😀").frame().parts[0]).reason == "ValueError: größer als 😀"


def test_a_quit_with_a_wrong_field_is_broken_and_one_without_fields_has_no_reason() -> None:
    with pytest.raises(BrokenFrame, match=r"QUIT is not valid: .*\$\.reason"):
        Quit.read(b'{"reason": 5}')
    assert Quit.read(b"{}") == Quit(reason="no reason given", error=False)


def test_a_replica_that_is_turned_away_gets_the_reason_in_any_spelling(ends: tuple[Wire, Wire]) -> None:
    near, far = ends

    def refuse(_: Hello) -> int:
        raise TrainingOver("é" * 1000)

    def coordinator() -> None:
        with pytest.raises(TrainingOver):
            receive_hello(near, TOKEN, refuse, epoch=1)

    other = in_the_background(coordinator)
    with pytest.raises(TrainingOver, match=r"é{600}"):
        say_hello(far, TOKEN, HELLO)
    other.join(30)
