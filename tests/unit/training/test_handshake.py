"""Whatever one end says before it has proved who it is, the other end has one clear answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shadho_celery.training.frames import BrokenFrame, Kind, Wire, content_of, control, control_limits, small_room
from shadho_celery.training.handshake import Over, Refused, farewell, proof, receive_hello, say_hello

TOKEN = "secret"


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    """The coordinator's wire, and that of whoever comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = Wire(socket.create_connection(server.getsockname()))
        far = Wire(server.accept()[0])
    yield near, far
    near.close()
    far.close()


def admit(_: dict[str, Any]) -> dict[str, Any]:
    return {"slot": 0}


def in_the_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_both_prove_the_token_and_neither_sends_it(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    heard: list[tuple[int, dict[str, Any]]] = []
    replica = in_the_background(lambda: heard.append(say_hello(far, TOKEN, {"rank": 3})))
    hello = receive_hello(near, TOKEN, admit, epoch=7)
    replica.join(30)
    assert hello["rank"] == 3
    assert heard[0][0] == 7
    assert heard[0][1]["slot"] == 0
    assert TOKEN not in json.dumps([hello, heard])


@pytest.mark.parametrize(
    "hello", [{"nonce": "\ud800", "proof": "x"}, {"nonce": "a", "proof": "\udfff"}, {"nonce": "é", "proof": "é"}]
)
def test_a_nonce_or_proof_that_is_no_text_is_a_wrong_one(ends: tuple[Wire, Wire], hello: dict[str, str]) -> None:
    near, far = ends
    far.send(control(Kind.HELLO, hello))
    with pytest.raises(Refused, match="token is wrong"):
        receive_hello(near, TOKEN, admit, epoch=1)


@pytest.mark.parametrize("hello", [{}, {"nonce": 1, "proof": "x"}, {"nonce": "x", "proof": None}])
def test_a_hello_without_nonce_or_proof_is_broken(ends: tuple[Wire, Wire], hello: dict[str, Any]) -> None:
    near, far = ends
    far.send(control(Kind.HELLO, hello))
    with pytest.raises(BrokenFrame, match="without a nonce or a proof"):
        receive_hello(near, TOKEN, admit, epoch=1)


@pytest.mark.parametrize("said", ["\ud800", None, 5])
def test_a_replica_takes_no_text_that_is_none_for_a_proof(ends: tuple[Wire, Wire], said: object) -> None:
    near, far = ends

    def pretend() -> None:
        near.send(control(Kind.HELLO, {"nonce": "\ud800"}))
        near.receive(control_limits(Kind.HELLO), small_room)
        near.send(control(Kind.WELCOME, {"proof": said}))

    coordinator = in_the_background(pretend)
    with pytest.raises(Refused, match="does not know the trial's token"):
        say_hello(far, TOKEN, {})
    coordinator.join(30)


def test_a_proof_is_of_one_role_and_both_nonces() -> None:
    proofs = {proof(TOKEN, role, *nonces) for role in ("replica", "coordinator") for nonces in ("ab", "ba", "aa")}
    assert len(proofs) == 6


@pytest.mark.parametrize("character", ["a", "é", "\ud800", "😀", '"', "\n"])
def test_however_long_a_reason_its_quit_is_let_through(character: str) -> None:
    frame = farewell(character * 10_000, error=True)
    assert len(frame.parts[0]) <= 4096
    content = content_of(frame.parts[0])
    assert content["error"]
    assert len(content["reason"]) >= 300
    assert set(content["reason"]) == {character}


def test_a_reason_that_fits_is_said_whole() -> None:
    assert content_of(farewell("ValueError: größer als 😀").parts[0])["reason"] == "ValueError: größer als 😀"


def test_who_is_turned_away_hears_the_whole_of_it_however_it_is_spelt(ends: tuple[Wire, Wire]) -> None:
    near, far = ends

    def refuse(_: dict[str, Any]) -> dict[str, Any]:
        raise Over("é" * 1000)

    def coordinator() -> None:
        with pytest.raises(Over):
            receive_hello(near, TOKEN, refuse, epoch=1)

    other = in_the_background(coordinator)
    with pytest.raises(Over, match=r"é{600}"):
        say_hello(far, TOKEN, {})
    other.join(30)
