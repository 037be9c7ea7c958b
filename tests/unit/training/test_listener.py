"""Listener and client: admission, and the isolation of each connection from the faults of others."""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from services.proxy import Proxy

from shadho_celery.core.addresses import listen
from shadho_celery.errors import ShadhoError
from shadho_celery.objective.context import ReplicaSeat
from shadho_celery.training.coordinator import listener
from shadho_celery.training.coordinator.listener import (
    MAX_HANDSHAKES,
    Arrived,
    Event,
    Joined,
    Left,
    Listener,
    Peer,
    Rejected,
    Terms,
)
from shadho_celery.training.replica import replica as client_of_gang
from shadho_celery.training.replica.replica import MIN_CONNECT_INTERVAL, Client, ConnectionLost
from shadho_celery.training.wire import handshake as wires
from shadho_celery.training.wire.frames import VERSION, Frame, Header, Kind, Large, Wire, control_frame
from shadho_celery.training.wire.handshake import Hello, Refused, TrainingOver, say_hello

TOKEN = "secret"
SIZE = 1000
DIGEST = "same"


class Hub:
    """Listener on a free port, with its events."""

    def __init__(self, places: int = 2, **terms: Any) -> None:
        self.server = listen("127.0.0.1")
        self.port = self.server.getsockname()[1]
        settings: dict[str, Any] = {
            "token": TOKEN,
            "epoch": 3,
            "digest": "same",
            "places": places,
            "max_bytes": 4 * SIZE,
            "heartbeat_seconds": 0.1,
        }
        self.listener = Listener(self.server, Terms(**{**settings, **terms}))
        self.listener.start()

    def seat(self, rank: int = 0, token: str = TOKEN) -> ReplicaSeat:
        return ReplicaSeat(address=f"127.0.0.1:{self.port}", token=token, rank=rank)

    def client(self, rank: int = 0, size: int = SIZE, **settings: Any) -> Client:
        params = (np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32))
        return Client(self.seat(rank), DIGEST, params, stop=lambda: False, **settings)

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
    return Frame(Header(kind=Kind.PARAMS, epoch=epoch, step=step), np.full(size, step, dtype=np.float32).data)


def test_a_replica_is_admitted_gets_parameters_and_sends_its_vector(make: Callable[..., Hub]) -> None:
    hub = make()
    client = hub.client(rank=1)
    assert client.connect() == 1
    assert client.epoch == 3
    peer = hub.joined()
    assert (peer.rank, peer.place) == (1, 1)
    frame = params(7)
    peer.publish(frame)
    is_alive = weakref.ref(frame)
    del frame
    assert client.wait(after=-1) == 7
    until(lambda: is_alive() is None)
    got = np.zeros(SIZE, dtype=np.float32)
    assert client.read_params(lambda vector: np.copyto(got, vector)) == 7
    assert (got == 7).all()
    client.send(Frame(Header(kind=Kind.GRAD, epoch=3, step=7), b"abcd"))
    event = hub.event()
    assert isinstance(event, Arrived)
    assert (event.header.step, bytes(event.payload)) == (7, b"abcd")
    client.close()


def test_a_notice_announces_a_step_before_its_parameters_arrive(make: Callable[..., Hub]) -> None:
    hub = make()
    client = hub.client()
    client.connect()
    peer = hub.joined()
    peer.publish(params(0))
    client.wait(after=-1)
    peer.notify(control_frame(Kind.STEP, epoch=3, step=1))
    until(lambda: client.newest == 1)
    assert client.wait(after=-1) == 0
    client.close()


def test_a_wrong_token_ends_a_replica_with_one_clear_error(make: Callable[..., Hub]) -> None:
    hub = make()
    params_pair = (np.zeros(1, dtype=np.float32),) * 2
    with pytest.raises(Refused, match="token is wrong"):
        Client(hub.seat(token="other"), DIGEST, params_pair, stop=lambda: False).connect()
    until(lambda: hub.listener.refused == {"the token is wrong": 1})


def test_a_replica_with_another_model_or_other_data_ends_with_one_clear_error(make: Callable[..., Hub]) -> None:
    with pytest.raises(Refused, match="model, data or settings differ"):
        make(digest="another").client().connect()
    hub = make(digest="same-100")
    wrong = Client(hub.seat(), "same-90", (np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)), stop=lambda: False)
    with pytest.raises(Refused, match="its data have 90 examples, the coordinator's 100"):
        wrong.connect()
    event = hub.event()
    assert isinstance(event, Rejected)
    assert "90 examples" in event.reason


@pytest.mark.parametrize("is_error", [False, True])
def test_a_replica_can_send_the_reason_for_its_end_and_that_the_users_code_is_to_blame(
    make: Callable[..., Hub], is_error: bool
) -> None:
    hub = make()
    client = hub.client()
    client.connect()
    hub.joined()
    client.send_quit("UsageError: no such file", error=is_error)
    left = hub.left()
    assert (left.reason, left.is_error) == ("UsageError: no such file", is_error)
    client.close()


def test_a_replica_of_another_version_gets_the_reason_and_is_refused(make: Callable[..., Hub]) -> None:
    hub = make()
    with socket.create_connection(("127.0.0.1", hub.port)) as connection:
        data = bytearray(control_frame(Kind.HELLO, {}).head)
        data[4] = VERSION + 1
        connection.sendall(bytes(data))
        wire = Wire(connection)
        wire.set_timeout(30)
        assert wire.receive(Kind.HELLO)[0].kind is Kind.HELLO
        _, payload = wire.receive(Kind.QUIT)
        assert b"version" in bytes(payload)
    until(lambda: hub.listener.refused["another version"] == 1)


def test_a_coordinator_of_another_version_ends_a_replica_with_one_clear_error() -> None:
    with listen("127.0.0.1") as server:

        def pretend() -> None:
            data = bytearray(control_frame(Kind.HELLO, {}).head)
            data[4] = VERSION + 1
            connection, _ = server.accept()
            connection.sendall(bytes(data))
            connection.close()

        threading.Thread(target=pretend, daemon=True).start()
        wire = Wire(socket.create_connection(server.getsockname()))
        with pytest.raises(Refused, match="install the same shadho_celery"):
            say_hello(wire, TOKEN, Hello(rank=0, digest=DIGEST))
        wire.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64),
        bytes(100_000),
        Header(kind=Kind.HELLO, length=4 * 2**30).pack(),
        Header(kind=Kind.GRAD, length=4).pack() + b"abcd",
        control_frame(Kind.HELLO, {"nonce": "x", "proof": "y"}).head[:20],
        b"",
    ],
    ids=["http", "zeros", "4 GB", "no hello", "half a frame", "nothing"],
)
def test_garbage_is_refused_and_the_next_replica_is_admitted(make: Callable[..., Hub], data: bytes) -> None:
    hub = make()
    with socket.create_connection(("127.0.0.1", hub.port)) as connection:
        connection.settimeout(30)
        # Its end may come as a reset at any moment: not everything that it sent was read.
        with suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    until(lambda: sum(hub.listener.refused.values()) == 1)
    client = hub.client()
    client.connect()
    assert hub.joined().rank == 0
    client.close()


def test_any_exception_in_a_handshake_closes_the_connection_and_is_counted(
    make: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: Any) -> None:
        raise MemoryError

    hub = make()
    monkeypatch.setattr(listener, "receive_hello", stumble)
    with socket.create_connection(("127.0.0.1", hub.port)) as connection:
        connection.settimeout(30)
        assert not connection.recv(1)
    until(lambda: hub.listener.refused == {"MemoryError": 1})


def test_silent_connections_do_not_keep_replicas_out(make: Callable[..., Hub]) -> None:
    hub = make()
    connections = [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(MAX_HANDSHAKES + 6)]
    client = hub.client()
    client.connect()
    assert hub.joined().rank == 0
    # The oldest gave way.
    until(lambda: hub.listener.refused == {"too many handshakes at once": 7})
    for connection in connections[:7]:
        connection.settimeout(30)
        while connection.recv(4096):
            pass
    for connection in connections:
        connection.close()
    client.close()


def test_a_handshake_that_trickles_ends_in_time(make: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "HANDSHAKE_SECONDS", 0.5)
    hub = make()
    with socket.create_connection(("127.0.0.1", hub.port)) as connection, suppress(OSError):
        for byte in control_frame(Kind.HELLO, {}).head:
            connection.sendall(bytes([byte]))
            time.sleep(0.2)
            if hub.listener.refused["handshake failed"]:
                break
        else:
            pytest.fail("it may go on")
    until(lambda: hub.listener.refused == {"handshake failed": 1})


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
def test_a_replica_that_sends_garbage_is_dropped_and_others_stay(make: Callable[..., Hub], data: bytes) -> None:
    hub = make()
    good = hub.client(rank=0)
    good.connect()
    peer = hub.joined()
    with socket.create_connection(("127.0.0.1", hub.port)) as bad:
        say_hello(Wire(bad), TOKEN, Hello(rank=1, digest=DIGEST))
        hub.joined()
        bad.sendall(data)
        # The listener may have hung up already.
        with suppress(OSError):
            bad.shutdown(socket.SHUT_WR)
        assert hub.left().peer.rank == 1
    assert hub.listener.refused["broken frame"] == 1
    peer.publish(params(1))
    assert good.wait(after=-1) == 1
    good.close()


def test_a_replica_that_answers_heartbeats_stays_without_other_traffic(make: Callable[..., Hub]) -> None:
    hub = make(deadline_seconds=1.0)
    client = hub.client()
    client.connect()
    peer = hub.joined()
    time.sleep(1.2)
    peer.publish(params(1))
    assert client.wait(after=-1) == 1
    client.close()


def test_a_replica_leaves_a_silent_coordinator_after_the_deadline(
    make: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_of_gang, "DEADLINE_SECONDS", 0.3)
    hub = make(heartbeat_seconds=60)
    client = hub.client()
    client.connect()
    with pytest.raises(ConnectionLost, match="nothing heard"):
        client.wait(after=-1)
    client.close()


def test_a_replica_that_reads_nothing_does_not_block_others_and_gets_the_newest_parameters_later(
    make: Callable[..., Hub],
) -> None:
    size = 4_000_000
    hub = make(max_bytes=100)
    good, slow = hub.client(rank=0, size=size), hub.client(rank=1, size=size)
    good.connect()
    peers = [hub.joined()]
    with socket.create_connection(("127.0.0.1", hub.port)) as host:
        wire = Wire(host)
        say_hello(wire, TOKEN, Hello(rank=1, digest=DIGEST))
        peers.append(hub.joined())
        frames = []
        for step in range(4):
            frame = params(step, size)
            frames.append(weakref.ref(frame))
            for peer in peers:
                peer.publish(frame)
            del frame
            assert good.wait(after=step - 1) == step
        large = Large(Kind.PARAMS, 4 * size)
        steps = []
        while 3 not in steps:
            header, _ = wire.receive(Kind.PING, large=large)
            steps += [header.step] if header.kind is Kind.PARAMS else []
        # What was on its way when it stopped reading, and then the newest: those between were never sent.
        assert steps in ([0, 3], [0, 1, 3])
        until(lambda: not any(frame() for frame in frames))
    good.close()
    slow.close()


def test_a_replica_that_receives_slowly_is_not_silent(make: Callable[..., Hub]) -> None:
    """Each vector takes longer to arrive than silence is allowed to last."""
    size = 4_000_000
    hub = make(deadline_seconds=1.0)
    with Proxy(hub.port) as proxy:
        proxy.bandwidth = 12e6
        hub.port = proxy.port
        client = hub.client(size=size)
        client.connect()
        peer = hub.joined()
        peer.publish(params(0, size))
        until(lambda: client.newest == 0)
        # The second follows at once.
        peer.publish(params(1, size))
        assert client.wait(after=0) == 1
        client.close()


def test_a_silent_host_is_dropped_though_the_kernel_still_accepts_parameters_for_it(make: Callable[..., Hub]) -> None:
    hub = make(deadline_seconds=0.5, max_bytes=100)
    with socket.create_connection(("127.0.0.1", hub.port)) as host:
        say_hello(Wire(host), TOKEN, Hello(rank=0, digest=DIGEST))
        peer = hub.joined()
        while hub.listener.inbox.empty():
            peer.publish(params(0, 25_000))
            time.sleep(0.1)
        assert "nothing heard" in hub.left().reason


def test_no_more_replicas_are_admitted_than_there_are_places(make: Callable[..., Hub]) -> None:
    hub = make(places=1)
    client = hub.client(rank=0)
    client.connect()
    hub.joined()
    with pytest.raises(TrainingOver, match="all the replicas it can use"):
        hub.client(rank=5).connect()
    client.close()
    assert hub.left().peer.place == 0
    late = hub.client(rank=5)
    late.connect()
    assert hub.joined().place == 0
    late.close()


def test_two_replicas_of_one_rank_do_not_replace_each_other_for_ever(make: Callable[..., Hub]) -> None:
    hub = make()
    first, second = hub.client(rank=1), hub.client(rank=1)
    first.connect()
    hub.joined()
    second.connect()
    # It ends: it was not cut off, to look for its coordinator again.
    with pytest.raises(TrainingOver, match="another replica of the same rank has connected"):
        first.wait(after=-1)
    events = {type(event): event.peer for event in (hub.event(), hub.event())}
    assert [peer.place for peer in events.values()] == [1, 1], "it takes its own place"
    events[Joined].publish(params(1))
    assert second.wait(after=-1) == 1
    assert hub.listener.present() == 1
    first.close()
    second.close()


def test_a_dismissed_replica_that_is_dead_is_dropped_after_the_deadline(make: Callable[..., Hub]) -> None:
    hub = make(deadline_seconds=1.0)
    size = 8_000_000
    with socket.create_connection(("127.0.0.1", hub.port)) as host:
        say_hello(Wire(host), TOKEN, Hello(rank=1, digest=DIGEST))
        # More than the kernels' buffers hold: what is said to it after that never goes out.
        hub.joined().publish(params(0, size))
        again = hub.client(rank=1)
        again.connect()
        # Two threads tell them: which comes first is open.
        events = [hub.event(), hub.event()]
        assert [event.reason for event in events if isinstance(event, Left)] == [
            "another replica of the same rank has connected"
        ]
        assert any(isinstance(event, Joined) for event in events)
    until(lambda: not hub.listener._replaced)
    again.close()


def test_a_replica_waits_before_it_reconnects_after_a_short_connection(make: Callable[..., Hub]) -> None:
    hub = make()
    client = hub.client()
    waits: list[float] = []
    client.pause = lambda seconds, abandon: waits.append(seconds)  # type: ignore[assignment, func-returns-value]
    for began_before in (0, 0, 10):
        client.connect()
        client._connected_at -= began_before
        hub.joined().drop("for no reason")
        hub.left()
        with pytest.raises(ConnectionLost):
            client.wait(after=-1)
    client.connect()
    assert waits[0] < 0 < waits[1] <= MIN_CONNECT_INTERVAL
    assert waits[3] < 0 < waits[2] <= MIN_CONNECT_INTERVAL
    client.close()


def test_replicas_get_the_reason_when_the_training_ends(make: Callable[..., Hub]) -> None:
    hub = make()
    client = hub.client()
    client.connect()
    hub.joined()
    hub.listener.close("the training has ended", seconds=30)
    with pytest.raises(TrainingOver, match="the training has ended"):
        client.wait(after=-1)


def test_a_replica_reconnects_to_a_later_epoch_only(make: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    hub = make(epoch=4)
    client = hub.client()
    client.connect()
    hub.listener.close("gone", seconds=0)
    with pytest.raises((ConnectionLost, TrainingOver)):
        client.wait(after=-1)
    monkeypatch.setattr(client_of_gang, "RECONNECT_SECONDS", 0.3)
    client._address = ("127.0.0.1", make(epoch=3).port)
    with pytest.raises(ShadhoError, match=r"not found for 0.3 s .*epoch 3 answered, after one of epoch 4"):
        client.connect()
    client._address = ("127.0.0.1", make(epoch=5).port)
    client.connect()
    assert client.epoch == 5
    client.close()


def test_a_coordinator_that_is_not_found_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_of_gang, "RECONNECT_SECONDS", 0.2)
    with listen("127.0.0.1") as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    seat = ReplicaSeat(address=address, token=TOKEN, rank=0)
    client = Client(seat, DIGEST, (np.zeros(1, dtype=np.float32),) * 2, stop=lambda: False)
    with pytest.raises(ShadhoError, match=f"coordinator at {address} was not found"):
        client.connect()


@pytest.mark.parametrize("encrypted", [False, True], ids=["the replica", "the coordinator"])
def test_a_gang_of_which_one_end_alone_encrypts_is_refused_with_the_remedy(
    make: Callable[..., Hub], encrypted: bool
) -> None:
    hub = make(encrypted=encrypted)
    with pytest.raises(Refused, match="start the workers of both with the same signing key"):
        hub.client(encrypted=not encrypted).connect()


def test_a_frame_changed_on_its_way_ends_its_encrypted_connection_and_the_replica_connects_again(
    make: Callable[..., Hub],
) -> None:
    """In either direction; the coordinator says so in one line and the others train on."""
    hub = make(encrypted=True, places=3)
    ends: list[tuple[socket.socket, socket.socket]] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        between = threading.Thread(target=relay, args=(server, hub.port, ends), daemon=True)
        between.start()
        client = hub.client(encrypted=True)
        client._address = server.getsockname()
        client.connect()
        peer = hub.joined()
        peer.publish(params(7))
        assert client.wait(after=-1) == 7
        ends[0][0].sendall(bytes(100))
        left = hub.left()
        assert left.peer is peer
        assert left.reason.startswith("a frame is not authentic: it was changed on its way")
        assert hub.listener.refused["broken frame"] == 1
        with pytest.raises(ConnectionLost):
            client.wait(after=7)
        client.connect()
        assert hub.joined().rank == peer.rank
        ends[1][1].sendall(bytes(100))
        with pytest.raises(ConnectionLost, match="a frame is not authentic"):
            client.wait(after=7)
        client.close()
    between.join(30)
    for each in ends:
        for end in each:
            end.close()


def relay(server: socket.socket, port: int, ends: list[tuple[socket.socket, socket.socket]]) -> None:
    """Pass on what two replicas and the coordinator at `port` send; add to `ends` where more can be put in."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                # Closing would not end what another thread reads from it.
                each.shutdown(socket.SHUT_RDWR)

    for _ in range(2):
        near, _ = server.accept()
        far = socket.create_connection(("127.0.0.1", port))
        ends.append((far, near))
        for pair in ((near, far), (far, near)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


def test_a_replica_ends_when_its_trial_is_stopped(make: Callable[..., Hub]) -> None:
    hub = make()
    stop = threading.Event()
    client = Client(hub.seat(), DIGEST, (np.zeros(1, dtype=np.float32),) * 2, stop=stop.is_set)
    client.connect()
    stop.set()
    with pytest.raises(TrainingOver, match="was stopped"):
        client.wait(after=-1)
    client.close()
