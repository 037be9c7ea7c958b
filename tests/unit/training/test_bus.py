"""The bus: who is let in, and that nothing which one connection does disturbs another."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from shadho_celery.context import ReplicaSeat
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.training import bus, handshake
from shadho_celery.training.assembly import listen
from shadho_celery.training.bus import MOST_STRANGERS, Listener, Terms
from shadho_celery.training.frames import VERSION, Frame, Header, Kind, Wire, control, small_room
from shadho_celery.training.handshake import Over, Refused, say_hello
from shadho_celery.training.line import APART, Line, Lost
from shadho_celery.training.peer import Arrived, Event, Joined, Left, Peer

TOKEN = "secret"
SIZE = 1000
HELLO = {"setup": "same"}


class Hub:
    """A listener, and what it told."""

    def __init__(self, **terms: Any) -> None:
        self.server = listen("127.0.0.1")
        self.port = self.server.getsockname()[1]
        settings: dict[str, Any] = {
            "token": TOKEN,
            "epoch": 3,
            "places": 2,
            "setup": "same",
            "welcome": {"seed": 5},
            "most_bytes": 4 * SIZE,
            "ping_seconds": 0.1,
        }
        self.listener = Listener(self.server, Terms(**{**settings, **terms}))
        self.listener.start()

    def seat(self, rank: int = 0, token: str = TOKEN) -> ReplicaSeat:
        return ReplicaSeat(address=f"127.0.0.1:{self.port}", token=token, rank=rank)

    def line(self, rank: int = 0, size: int = SIZE, **settings: Any) -> Line:
        params = (np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32))
        return Line(self.seat(rank), HELLO, params, stop=lambda: False, patience_seconds=10, **settings)

    def event(self) -> Event:
        return self.listener.inbox.get(timeout=30)

    def joined(self) -> Peer:
        event = self.event()
        assert isinstance(event, Joined)
        return event.peer

    def left(self) -> Left:
        event = self.event()
        assert isinstance(event, Left)
        return event


def crawl(wire: Wire, *, bytes_per_second: float) -> None:
    """Let a wire read so slowly."""
    fill = wire._fill

    def slowly(view: memoryview, *, first: bool = False) -> None:
        for at in range(0, len(view), 1 << 16):
            fill(view[at : at + (1 << 16)], first=first and not at)
            time.sleep(min(len(view), 1 << 16) / bytes_per_second)

    wire._fill = slowly  # type: ignore[method-assign]


@pytest.fixture
def make() -> Iterator[Callable[..., Hub]]:
    hubs: list[Hub] = []

    def start(**terms: Any) -> Hub:
        hubs.append(Hub(**terms))
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.listener.close("over", seconds=1)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def params(step: int, size: int = SIZE, epoch: int = 3) -> Frame:
    return Frame(Header(kind=Kind.PARAMS, epoch=epoch, step=step), np.full(size, step, dtype=np.float32).data).summed()


def whole(kind: Kind, payload: bytes) -> bytes:
    """What goes over the wire for a frame."""
    frame = Frame(Header(kind=kind), payload).summed()
    return frame.head + payload + (frame.crc or 0).to_bytes(4, "little")


def test_a_replica_is_welcomed_gets_parameters_and_sends_its_vector(make: Callable[..., Hub]) -> None:
    hub = make()
    line = hub.line(rank=1)
    assert line.connect()["seed"] == 5
    assert line.epoch == 3
    peer = hub.joined()
    assert (peer.rank, peer.slot) == (1, 1)
    done = threading.Event()
    peer.publish(params(7), done.set)
    assert line.wait(after=-1) == 7
    assert done.wait(30)
    got = np.zeros(SIZE, dtype=np.float32)
    assert line.use(lambda vector: np.copyto(got, vector)) == 7
    assert (got == 7).all()
    line.send(Frame(Header(kind=Kind.GRAD, epoch=3, sender=1, step=7), b"abcd"))
    event = hub.event()
    assert isinstance(event, Arrived)
    assert (event.header.step, bytes(event.payload)) == (7, b"abcd")
    line.close()


def test_a_notice_tells_of_a_step_whose_parameters_are_not_here_yet(make: Callable[..., Hub]) -> None:
    hub = make()
    line = hub.line()
    line.connect()
    peer = hub.joined()
    peer.publish(params(0), lambda: None)
    line.wait(after=-1)
    peer.notify(control(Kind.STEP, epoch=3, step=1))
    until(lambda: line.newest == 1)
    assert line.wait(after=-1) == 0
    line.close()


def test_a_wrong_token_ends_a_replica_with_one_clear_error(make: Callable[..., Hub]) -> None:
    hub = make()
    params_pair = (np.zeros(1, dtype=np.float32),) * 2
    with pytest.raises(Refused, match="token is wrong"):
        Line(hub.seat(token="other"), HELLO, params_pair, stop=lambda: False).connect()
    until(lambda: hub.listener.refused == {"the token is wrong": 1})


def test_a_replica_does_not_believe_a_coordinator_without_the_token() -> None:
    with listen("127.0.0.1") as server:

        def pretend() -> None:
            wire = Wire(server.accept()[0])
            wire.send(control(Kind.HELLO, {"nonce": "0" * 32}))
            wire.receive({Kind.HELLO: 4096}, small_room)
            wire.send(control(Kind.WELCOME, {"proof": "0" * 64, "slot": 0}))
            wire.close()

        threading.Thread(target=pretend, daemon=True).start()
        wire = Wire(socket.create_connection(server.getsockname()))
        with pytest.raises(Refused, match="does not know the trial's token"):
            say_hello(wire, TOKEN, {"rank": 0})
        wire.close()


def test_a_replica_with_another_model_ends_with_one_clear_error(make: Callable[..., Hub]) -> None:
    hub = make(setup="another")
    with pytest.raises(Refused, match="another model"):
        hub.line().connect()


def test_a_replica_of_another_version_is_told_so_and_dropped(make: Callable[..., Hub]) -> None:
    hub = make()
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        data = bytearray(control(Kind.HELLO, {}).head)
        data[4] = VERSION + 1
        stranger.sendall(bytes(data))
        wire = Wire(stranger)
        wire.timeout(30)
        assert wire.receive({Kind.HELLO: 4096}, small_room)[0].kind is Kind.HELLO
        _, payload = wire.receive({Kind.QUIT: 4096}, small_room)
        assert b"version" in bytes(payload)
    until(lambda: hub.listener.refused["another version"] == 1)


def test_a_coordinator_of_another_version_ends_a_replica_with_one_clear_error() -> None:
    with listen("127.0.0.1") as server:

        def pretend() -> None:
            data = bytearray(control(Kind.HELLO, {}).head)
            data[4] = VERSION + 1
            connection, _ = server.accept()
            connection.sendall(bytes(data))
            connection.close()

        threading.Thread(target=pretend, daemon=True).start()
        wire = Wire(socket.create_connection(server.getsockname()))
        with pytest.raises(Refused, match="install the same shadho_celery"):
            say_hello(wire, TOKEN, {"rank": 0})
        wire.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64),
        bytes(100_000),
        Header(kind=Kind.HELLO, length=4 * 2**30).pack(),
        Header(kind=Kind.GRAD, length=4).pack() + b"abcd",
        control(Kind.HELLO, {"nonce": "x", "proof": "y"}).head[:20],
        whole(Kind.HELLO, b'{"nonce":"\\ud800","proof":"x"}'),
        whole(Kind.HELLO, b'{"nonce":"x","proof":"\\ud800"}'),
        whole(Kind.HELLO, b"[" * 4000),
        b"",
    ],
    ids=["http", "zeros", "4 GB", "no hello", "half a frame", "nonce", "proof", "too deep", "nothing"],
)
def test_garbage_is_dropped_and_the_next_replica_is_taken_in(make: Callable[..., Hub], data: bytes) -> None:
    hub = make()
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        stranger.settimeout(30)
        # Its end may come as a reset at any moment: not everything that it sent was read.
        with suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    until(lambda: sum(hub.listener.refused.values()) == 1)
    line = hub.line()
    line.connect()
    assert hub.joined().rank == 0
    line.close()


def test_what_goes_wrong_in_a_handshake_is_counted_and_closed_whatever_it_is(
    make: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: Any) -> None:
        raise MemoryError

    hub = make()
    monkeypatch.setattr(bus, "receive_hello", stumble)
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        stranger.settimeout(30)
        assert not stranger.recv(1)
    until(lambda: hub.listener.refused == {"MemoryError": 1})
    until(lambda: not hub.listener._strangers)


def test_strangers_who_say_nothing_keep_no_replica_out(make: Callable[..., Hub]) -> None:
    hub = make()
    strangers = [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(MOST_STRANGERS + 6)]
    line = hub.line()
    began = time.monotonic()
    line.connect()
    assert time.monotonic() - began < 5
    assert hub.joined().rank == 0
    assert len(hub.listener._strangers) <= MOST_STRANGERS
    # The oldest gave way.
    until(lambda: hub.listener.refused == {"too many at once": 7})
    for stranger in strangers[:7]:
        stranger.settimeout(30)
        while stranger.recv(4096):
            pass
    for stranger in strangers:
        stranger.close()
    line.close()


def test_a_stranger_who_trickles_is_gone_in_time(make: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.5)
    hub = make()
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger, suppress(OSError):
        for byte in control(Kind.HELLO, {}).head:
            stranger.sendall(bytes([byte]))
            time.sleep(0.2)
            if hub.listener.refused["no handshake"]:
                break
        else:
            pytest.fail("it may go on")
    until(lambda: hub.listener.refused == {"no handshake": 1})


@pytest.mark.parametrize(
    "data",
    [
        Header(kind=Kind.GRAD, epoch=3, length=4 * 2**30).pack(),
        b"rubbish" * 10,
        Header(kind=Kind.GRAD, epoch=3, length=100).pack() + b"half",
        Header(kind=Kind.PARAMS, epoch=3, length=4).pack() + b"abcd",
    ],
    ids=["4 GB", "garbage", "half a frame", "wrong kind"],
)
def test_a_replica_that_sends_rubbish_is_dropped_and_others_stay(make: Callable[..., Hub], data: bytes) -> None:
    hub = make()
    good, bad = hub.line(rank=0), hub.line(rank=1)
    good.connect()
    peer = hub.joined()
    bad.connect()
    hub.joined()
    assert bad._wire is not None
    bad._wire._socket.sendall(data)
    bad._wire.finish()
    assert hub.left().peer.rank == 1
    assert hub.listener.refused["broken frame"] == 1
    peer.publish(params(1), lambda: None)
    assert good.wait(after=-1) == 1
    good.close()
    bad.close()


def test_a_frame_from_another_place_ends_the_connection(make: Callable[..., Hub]) -> None:
    hub = make()
    line = hub.line(rank=0)
    line.connect()
    hub.joined()
    line.send(Frame(Header(kind=Kind.GRAD, epoch=3, sender=1), b"abcd"))
    assert "place 1" in hub.left().reason
    line.close()


def test_a_replica_that_is_killed_has_left_at_once(make: Callable[..., Hub]) -> None:
    hub = make()
    line = hub.line()
    line.connect()
    hub.joined()
    line.close()
    assert hub.left().peer.rank == 0


def test_a_replica_says_why_it_leaves(make: Callable[..., Hub]) -> None:
    hub = make()
    line = hub.line()
    line.connect()
    hub.joined()
    line.leave("ValueError: no such column")
    assert hub.left().reason == "ValueError: no such column"
    line.close()


def test_a_long_reason_arrives_cut_whatever_it_is_spelt_in(make: Callable[..., Hub]) -> None:
    hub = make()
    line = hub.line()
    line.connect()
    hub.joined()
    line.leave("é" * 1000)
    assert "é" * 600 in hub.left().reason
    line.close()


def test_a_silent_host_is_gone_after_the_deadline(make: Callable[..., Hub]) -> None:
    hub = make(deadline_seconds=0.5)
    with socket.create_connection(("127.0.0.1", hub.port)) as host:
        say_hello(Wire(host), TOKEN, {"rank": 0, **HELLO})
        hub.joined()
        assert "nothing heard" in hub.left().reason


def test_a_replica_that_answers_is_not_gone_however_long_nothing_happens(make: Callable[..., Hub]) -> None:
    hub = make(deadline_seconds=1.5)
    line = hub.line()
    line.connect()
    peer = hub.joined()
    time.sleep(3)
    peer.publish(params(1), lambda: None)
    assert line.wait(after=-1) == 1
    line.close()


def test_a_replica_gives_up_a_silent_coordinator(make: Callable[..., Hub]) -> None:
    hub = make(ping_seconds=60)
    line = hub.line(deadline_seconds=0.3)
    line.connect()
    with pytest.raises(Lost, match="nothing heard"):
        line.wait(after=-1)
    line.close()


def test_one_that_reads_nothing_holds_nobody_up_and_gets_the_newest_when_it_does(make: Callable[..., Hub]) -> None:
    size = 4_000_000
    hub = make(most_bytes=100)
    good, slow = hub.line(rank=0, size=size), hub.line(rank=1, size=size)
    good.connect()
    peers = [hub.joined()]
    with socket.create_connection(("127.0.0.1", hub.port)) as host:
        wire = Wire(host)
        say_hello(wire, TOKEN, {"rank": 1, **HELLO})
        peers.append(hub.joined())
        released = []
        for step in range(4):
            for peer in peers:
                peer.publish(params(step, size), lambda: released.append(1))
            assert good.wait(after=step - 1) == step
        limits = {Kind.PARAMS: 4 * size, Kind.PING: 4096}
        steps = []
        while 3 not in steps:
            header, _ = wire.receive(limits, small_room)
            steps += [header.step] if header.kind is Kind.PARAMS else []
        # What was on its way when it stopped reading, and then the newest: those between were never sent.
        assert steps in ([0, 3], [0, 1, 3])
        until(lambda: len(released) == 8)
    good.close()
    slow.close()


def test_a_replica_that_takes_long_for_its_parameters_is_not_silent(make: Callable[..., Hub]) -> None:
    size = 8_000_000
    hub = make(deadline_seconds=1.5)
    line = hub.line(size=size)
    line.connect()
    peer = hub.joined()
    assert line._wire is not None
    crawl(line._wire, bytes_per_second=12e6)
    peer.publish(params(0, size), lambda: None)
    until(lambda: peer._latest is None)
    # The second follows at once.
    peer.publish(params(1, size), lambda: None)
    assert line.wait(after=0) == 1
    line.close()


def test_a_silent_host_is_gone_however_many_parameters_the_kernel_still_takes_for_it(make: Callable[..., Hub]) -> None:
    hub = make(deadline_seconds=0.5, most_bytes=100)
    with socket.create_connection(("127.0.0.1", hub.port)) as host:
        say_hello(Wire(host), TOKEN, {"rank": 0, **HELLO})
        peer = hub.joined()
        began = time.monotonic()
        while hub.listener.inbox.empty():
            peer.publish(params(0, 25_000), lambda: None)
            time.sleep(0.1)
            assert time.monotonic() - began < 5
        assert "nothing heard" in hub.left().reason


def test_there_is_no_place_for_more_than_the_gang_can_use(make: Callable[..., Hub]) -> None:
    hub = make(places=1)
    line = hub.line(rank=0)
    line.connect()
    hub.joined()
    with pytest.raises(Over, match="all the replicas it can use"):
        hub.line(rank=5).connect()
    line.close()
    assert hub.left().peer.slot == 0
    late = hub.line(rank=5)
    late.connect()
    assert hub.joined().slot == 0
    late.close()


def test_a_replica_that_comes_again_takes_its_own_place(make: Callable[..., Hub]) -> None:
    hub = make()
    first, again = hub.line(rank=1), hub.line(rank=1)
    first.connect()
    hub.joined()
    again.connect()
    events = [hub.event(), hub.event()]
    assert {type(event) for event in events} == {Joined, Left}
    assert {event.peer.slot for event in events} == {1}
    first.close()
    again.close()


def test_two_replicas_of_one_rank_do_not_throw_each_other_out_without_end(make: Callable[..., Hub]) -> None:
    hub = make()
    first, second = hub.line(rank=1), hub.line(rank=1)
    first.connect()
    hub.joined()
    second.connect()
    # It ends: it was not cut off, to look for its coordinator again.
    with pytest.raises(Over, match="its replica has come again"):
        first.wait(after=-1)
    peers = [event.peer for event in (hub.event(), hub.event()) if isinstance(event, Joined)]
    peers[0].publish(params(1), lambda: None)
    assert second.wait(after=-1) == 1
    assert hub.listener.present() == 1
    until(lambda: not hub.listener._replaced)
    first.close()
    second.close()


def test_one_that_was_told_to_go_and_is_dead_is_forgotten_after_the_deadline(make: Callable[..., Hub]) -> None:
    hub = make(deadline_seconds=1.0)
    size = 8_000_000
    with socket.create_connection(("127.0.0.1", hub.port)) as host:
        say_hello(Wire(host), TOKEN, {"rank": 1, **HELLO})
        # More than the kernels' buffers hold: what is said to it after that never goes out.
        hub.joined().publish(params(0, size), lambda: None)
        again = hub.line(rank=1)
        again.connect()
        hub.joined()
        assert hub.left().reason == "its replica has come again"
    assert not hub.listener._replaced
    again.close()


def test_one_whose_connection_has_just_begun_waits_before_the_next(make: Callable[..., Hub]) -> None:
    hub = make()
    line = hub.line()
    waits: list[float] = []
    line._sleep = waits.append  # type: ignore[method-assign]
    for began_before in (0, 0, 10):
        line.connect()
        line._began -= began_before
        hub.joined().drop("for no reason")
        hub.left()
        with pytest.raises(Lost):
            line.wait(after=-1)
    line.connect()
    assert waits[0] < 0 < waits[1] <= APART
    assert waits[3] < 0 < waits[2] <= APART
    line.close()


def test_everybody_is_told_when_it_is_over(make: Callable[..., Hub]) -> None:
    hub = make()
    line = hub.line()
    line.connect()
    hub.joined()
    hub.listener.close("the training has ended", seconds=30)
    with pytest.raises(Over, match="the training has ended"):
        line.wait(after=-1)


def test_a_replica_finds_a_coordinator_that_is_started_again_and_not_the_old_one(make: Callable[..., Hub]) -> None:
    hub = make(epoch=4)
    line = hub.line()
    line.connect()
    hub.listener.close("gone", seconds=0)
    with pytest.raises((Lost, Over)):
        line.wait(after=-1)
    line._patience = 1.0
    line._address = ("127.0.0.1", make(epoch=3).port)
    with pytest.raises(ShadhoError, match=r"not found for 1 s .*epoch 3 after one of 4"):
        line.connect()
    line._address = ("127.0.0.1", make(epoch=5).port)
    line.connect()
    assert line.epoch == 5
    line.close()


def test_a_coordinator_that_is_nowhere_is_one_clear_error() -> None:
    with listen("127.0.0.1") as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    seat = ReplicaSeat(address=address, token=TOKEN, rank=0)
    line = Line(seat, HELLO, (np.zeros(1, dtype=np.float32),) * 2, stop=lambda: False, patience_seconds=0.2)
    with pytest.raises(ShadhoError, match=f"coordinator at {address} was not found"):
        line.connect()


def test_a_port_that_is_taken_is_a_usage_error(make: Callable[..., Hub]) -> None:
    with pytest.raises(UsageError, match="cannot listen on"):
        listen("127.0.0.1", make().port)


def test_a_replica_whose_trial_is_told_to_stop_ends(make: Callable[..., Hub]) -> None:
    hub = make()
    stop = threading.Event()
    line = Line(hub.seat(), HELLO, (np.zeros(1, dtype=np.float32),) * 2, stop=stop.is_set)
    line.connect()
    stop.set()
    with pytest.raises(Over, match="told to stop"):
        line.wait(after=-1)
    line.close()
